"""The pods' own words as processes of this machine: what the chart starts is a service. No Kubernetes in it."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.serving import ROOT, free_port
from tests.helm.chart import CHART, TOKENS, Doc, container, documents, merged, one, pods

pytestmark = [pytest.mark.helm, pytest.mark.long, pytest.mark.engine]

MARK = "DISAGG_ROUTER_HELM_TEST"
UP_LIMIT_S = 240
# Ports that every pod has for itself, and that the pods of one machine must share out.
OWN_PORTS = ("8000", "8001", "8080", "8100", "8265", "6379", "52365")
WORLD = {
    "secrets": TOKENS,
    "config": {
        "model": {"path": str(ROOT / "model"), "served_name": "tiny"},
        "engine": {"device": "cpu", "args": {"max-model-len": 8192, "block-size": 32}, "start_limit_s": 200},
        "pools": {"prefill": {"gpus": 0}, "decode": {"gpus": 0}},
        "router": {"policy": {"name": "threshold", "tokens": 64}},
    },
    "head": {"mountCache": True},
    "poolDefaults": {"extraRayArgs": ["--min-worker-port=0", "--max-worker-port=0"]},
}


def own_address() -> str:
    """A UDP connect sends nothing; it makes the kernel choose."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])


@dataclass
class Machine:
    """What a cluster would give to a pod: an address, ports, folders, secrets."""

    folder: Path
    docs: list[Doc]
    ip: str = field(default_factory=own_address)
    mark: str = field(default_factory=lambda: secrets.token_hex(8))
    started: list[Running] = field(default_factory=list)
    shared: dict[str, str] = field(
        default_factory=lambda: {port: str(free_port()) for port in ("6379", "8265", "8100")}
    )

    def start(self, name: str) -> Running:
        """The pod's one container, with its own ports moved."""
        ports = {port: str(free_port()) for port in OWN_PORTS} | self.shared
        wanted = container(pods(self.docs)[name])
        env = {e["name"]: self._value(e) for e in wanted["env"]}
        env |= {MARK: self.mark, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        words = [self._moved(word, ports) for word in wanted["args"]]
        env = {key: self._moved(value, ports) for key, value in env.items()}
        with open(self.folder / f"{name}.log", "wb") as log:
            process = subprocess.Popen(words, env=env, stdout=log, stderr=log, start_new_session=True)
        self.started.append(Running(name, process, f"http://{self.ip}", wanted, ports, self.folder / f"{name}.log"))
        return self.started[-1]

    def _value(self, entry: Mapping[str, Any]) -> str:
        if "value" in entry:
            return str(entry["value"])
        if "fieldRef" in entry["valueFrom"]:
            return self.ip
        return {"auth_token": TOKENS["rayToken"], "admin_token": TOKENS["adminToken"]}.get(
            entry["valueFrom"]["secretKeyRef"]["key"], ""
        )

    def _moved(self, text: str, ports: Mapping[str, str]) -> str:
        for there, here in {
            "/etc/disagg-router": str(self.folder),
            "/var/lib/disagg-router": str(self.folder / "state"),
            "/cache/": f"{self.folder}/cache/",
            "r-disagg-router-head": self.ip,
            "$(POD_IP)": self.ip,
            "--dashboard-host=0.0.0.0": "--dashboard-host=127.0.0.1",
        }.items():
            text = text.replace(there, here)
        for there, here in ports.items():
            for before in ("=", ":", "--port "):
                text = text.replace(f"{before}{there}", f"{before}{here}")
        return text

    def end(self) -> None:
        """What carries the mark is ours; a container's end would take it along."""
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if f"{MARK}={self.mark}".encode() in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    os.kill(int(entry), signal.SIGKILL)
        for pod in self.started:
            pod.process.wait(10)


@dataclass
class Running:
    name: str
    process: subprocess.Popen[bytes]
    url: str
    wanted: Doc
    ports: dict[str, str]
    log: Path

    def probe(self, kind: str) -> int:
        """The status that kubelet would see; 0 when nobody listens."""
        asked = self.wanted[f"{kind}Probe"]["httpGet"]
        port = next(str(p["containerPort"]) for p in self.wanted["ports"] if p["name"] == asked["port"])
        try:
            return httpx.get(f"{self.url}:{self.ports[port]}{asked['path']}", timeout=5, trust_env=False).status_code
        except httpx.TransportError:
            return 0

    def until(self, kind: str, limit_s: float = UP_LIMIT_S) -> None:
        end_s = time.monotonic() + limit_s
        while self.probe(kind) != 200:
            assert self.process.poll() is None, self.log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < end_s, f"{self.name}: {kind}; {self.log.read_text(errors='replace')[-3000:]}"
            time.sleep(0.5)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(40)


@pytest.fixture
def machine() -> Iterator[Machine]:
    with tempfile.TemporaryDirectory(prefix="dr-", ignore_cleanup_errors=True) as name:  # socket paths are short
        folder = Path(name)
        ray = [f"--temp-dir={folder}/ray", f"--ray-client-server-port={free_port()}", "--min-worker-port=0"]
        own = [*ray, "--max-worker-port=0", f"--dashboard-agent-listen-port={free_port()}"]
        docs = documents(merged(WORLD, {"head": {"extraRayArgs": own}}))
        (folder / "cluster.yaml").write_text(one(docs, "ConfigMap")["data"]["cluster.yaml"], encoding="utf-8")
        machine = Machine(folder, docs)
        try:
            yield machine
        finally:
            machine.end()


def test_the_pods_words_make_a_service(machine: Machine) -> None:
    """Four pods, the head not first: probes pass, a prompt is handed over, `helm test` is content, all ends well."""
    prefill, head, router = machine.start("prefill"), machine.start("head"), machine.start("router")
    prefill.until("startup")  # two Ray nodes that start at once in one folder, as pods never do, take the same socket
    engines = [prefill, machine.start("decode")]
    router.until("liveness", 60)
    assert router.probe("readiness") == 503
    for pod in (head, *engines, router):
        for kind in ("startup", "liveness", "readiness"):
            pod.until(kind)
    admin = f"{router.url}:{router.ports['8001']}"
    assert httpx.get(f"{admin}/metrics", timeout=5, trust_env=False).status_code == 401
    bearer = {"authorization": f"Bearer {TOKENS['adminToken']}"}
    end_s = time.monotonic() + UP_LIMIT_S
    while not (status := httpx.get(f"{admin}/status", headers=bearer, timeout=5, trust_env=False).json())["settled"]:
        assert time.monotonic() < end_s, status
        time.sleep(0.5)
    assert [pair["state"] for pair in status["pairs"]] == ["ready"], status
    public = f"{router.url}:{router.ports['8000']}"
    body = {"model": "tiny", "prompt": "z" * 300, "max_tokens": 8}
    answer = httpx.post(f"{public}/v1/completions", json=body, timeout=60, trust_env=False)
    assert (answer.status_code, answer.headers["x-disagg-path"]) == (200, "remote_prefill"), answer.text
    script = [sys.executable, str(CHART / "files" / "served.py"), public, "tiny", "10", "60"]
    assert "answered 4 tokens" in subprocess.run(script, capture_output=True, text=True, check=True).stdout
    assert router.stop() == 0
    assert head.stop() == 0
