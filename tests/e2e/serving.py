"""`disagg-router serve` as a user runs it: a process of its own, real Ray, real engines."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from disagg_router.controller.cluster import cluster_id
from disagg_router.controller.ports import PortAllocator

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "disagg_router"]
START_LIMIT_S = 240
PULLED = "vllm:prompt_tokens_by_source_total", "external_kv_transfer"
SOURCES = "local_compute", "local_cache_hit", "external_kv_transfer"
MARKER = b"DISAGG_ROUTER_INSTANCE="


@dataclass
class Serving:
    """One running `serve`. `folder` holds its cluster file, its logs and its stderr."""

    folder: Path
    process: subprocess.Popen[str]
    url: str
    admin_url: str

    @property
    def cluster(self) -> str:
        return cluster_id(self.folder / "cluster.yaml")

    def status(self) -> dict[str, Any]:
        return get(f"{self.admin_url}/status").json()

    def instance(self, role: str) -> dict[str, Any]:
        return next(one for one in self.status()["instances"] if one["role"] == role)

    def prompt_tokens(self, instance: str) -> dict[str, float]:
        """How that engine came by the prompt tokens it has had, by its own counters."""
        url = next(one["url"] for one in self.status()["instances"] if one["id"] == instance)
        return {source: engine_counter(url, PULLED[0], source=source) for source in SOURCES}

    def pulled_tokens(self) -> float:
        """Prompt tokens whose KV the decode engine got from another, by its own counter."""
        name, source = PULLED
        return engine_counter(self.instance("decode")["url"], name, source=source)

    def until(self, holds: Callable[[dict[str, Any]], bool], limit_s: float) -> float:
        """Seconds until the status is as wanted. Raises AssertionError with the last one when it does not come."""
        start = time.monotonic()
        while not holds(status := self.status()):
            assert time.monotonic() - start < limit_s, f"not within {limit_s:g} s; the last status was {status}"
            time.sleep(0.05)
        return time.monotonic() - start

    def until_tested(self, limit_s: float = 120) -> float:
        """Seconds until every instance is ready and every pair has passed its test."""
        return self.until(all_tested, limit_s)

    def stop(self, signum: int = signal.SIGTERM, limit_s: float = 45) -> int:
        """The exit status; with signal 0 only waits for it."""
        if signum:
            self.process.send_signal(signum)
        status = self.process.wait(limit_s)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status

    def stderr(self) -> str:
        return (self.folder / "stderr").read_text(encoding="utf-8", errors="replace")

    def processes(self) -> list[int]:
        """Everything that carries this cluster's marker: engines, supervisors, a Ray it started."""
        return marked(self.cluster)


def all_tested(status: dict[str, Any]) -> bool:
    ready = all(one["state"] == "ready" for one in [*status["instances"], *status["pairs"]])
    return ready and bool(status["pairs"]) and len(status["instances"]) > 1


def get(url: str) -> httpx.Response:
    """Without reading the authorities' certificates, which takes 50 ms of CPU that the engines need."""
    return httpx.get(url, timeout=10, trust_env=False, verify=False)


def engine_counter(url: str, name: str, **labels: str) -> float:
    text = get(f"{url}/metrics").text
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())


def start(folder: Path, config: str, *, tested: bool = True) -> Serving:
    """Returns once the ready line is there, and every pair is `tested`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cluster.yaml").write_text(config, encoding="utf-8")
    port, admin_port = free_port(), free_port()
    command = [*COMMAND, "serve", str(folder / "cluster.yaml"), "--port", str(port), "--admin-port", str(admin_port)]
    with open(folder / "stderr", "wb") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment(folder))
    serving = Serving(folder, process, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}")
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == f"ready {serving.url}\n", serving.stderr()[-4000:]
    if tested:
        serving.until_tested()
    return serving


@contextmanager
def running(folder: Path, config: str) -> Iterator[Serving]:
    """A cluster of one's own, which ends well and leaves nothing."""
    serving = start(folder, config)
    try:
        yield serving
    finally:
        with nothing_left_of(serving.cluster):
            assert serving.stop() == 0, serving.stderr()[-4000:]


@contextmanager
def proxying(folder: Path, config: str) -> Iterator[Serving]:
    """A router alone, once it has tested every pair of the engines that `config` names."""
    (folder / "cluster.yaml").write_text(config, encoding="utf-8")
    port, admin_port = free_port(), free_port()
    command = [*COMMAND, "proxy", str(folder / "cluster.yaml"), "--port", str(port), "--admin-port", str(admin_port)]
    with open(folder / "stderr", "wb") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    serving = Serving(folder, process, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}")
    try:
        until_settled(serving.admin_url, 60)
        yield serving
    finally:
        assert serving.stop() == 0, serving.stderr()[-4000:]


def until_settled(admin_url: str, limit_s: float, instances: int = 2) -> dict[str, Any]:
    """The router's status once every pair of that many instances has had its test."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            status = get(f"{admin_url}/status").json()
            ready = sum(one["state"] == "ready" for one in status["instances"])
            if ready == instances and status["settled"]:
                return status
        except httpx.TransportError:
            status = {}
        assert time.monotonic() < deadline, status
        time.sleep(0.2)


def free_port() -> int:
    """Below the ephemeral range, where an outgoing connection could take it, and above what engines are given.

    Leased until the test process ends, so that nobody gets it twice.
    """
    return PortAllocator(random.Random(), 30000, 32767).lease(1).ports[0]


def cluster_config(engines: str, router: str = "", args: str = "max-model-len: 8192, block-size: 32") -> str:
    """As in the example but for `engines` (pools, or a fleet), and with what `router` says in place of its policy."""
    return f"""
model: {{path: {ROOT / "model"}, served_name: tiny}}
engine: {{device: cpu, args: {{{args}}}, start_limit_s: 300}}
connector: {{name: nixl, kv_load_failure_policy: recompute, lease_s: 30}}
{engines}
router: {{{router}}}
"""


def environment(folder: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    return kept | {"DISAGG_ROUTER_STATE_DIR": str(folder / "state")}


def local_cpu_config() -> str:
    """The example as it is, with its paths made absolute so that it can lie elsewhere."""
    text = (ROOT / "examples" / "local-cpu" / "cluster.yaml").read_text(encoding="utf-8")
    assert "../../model" in text
    return text.replace("../../model", str(ROOT / "model"))


def marked(owner: str) -> list[int]:
    """Pids whose environment says that they belong to `owner`: CLUSTER, CLUSTER/INSTANCE or one incarnation of it."""
    wanted = re.compile(rb"(^|\0)" + MARKER + re.escape(owner.encode()) + rb"(/|\0|$)")
    return [pid for pid, environ in _environments() if wanted.search(environ)]


def _environments() -> Iterator[tuple[int, bytes]]:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                yield int(entry), Path(f"/proc/{entry}/environ").read_bytes()
            except OSError:
                continue


def engine_processes(cluster: str, instance: str) -> list[int]:
    """vLLM's own, of one instance; its supervisor is none of them."""
    lines = {pid: command_line(pid) for pid in marked(f"{cluster}/{instance}")}
    return [pid for pid, line in lines.items() if "supervisor" not in line and "vllm" in line.lower()]


def alive(pids: Iterable[int]) -> list[int]:
    """Those of the pids that still run; a zombie does not."""
    left = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if state != "Z":
            left.append(pid)
    return left


def descendants(root: int) -> list[int]:
    """Every process below `root`, by parent pid."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry))
    found, open_ends = [], [root]
    while open_ends:
        below = children.get(open_ends.pop(), [])
        found += below
        open_ends += below
    return found


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def gone_within(pids: Iterable[int], limit_s: float) -> float:
    """Seconds until none of the pids runs. Raises AssertionError naming those that do."""
    pids, start = list(pids), time.monotonic()
    while left := alive(pids):
        assert time.monotonic() - start < limit_s, {pid: command_line(pid) for pid in left}
        time.sleep(0.05)
    return time.monotonic() - start


@contextmanager
def nothing_left_of(cluster: str) -> Iterator[None]:
    """Fails when something of the cluster is left; kills it all the same."""
    try:
        yield
    finally:
        deadline = time.monotonic() + 10
        while (left := marked(cluster)) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, [command_line(pid) for pid in left]
