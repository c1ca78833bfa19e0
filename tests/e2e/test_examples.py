"""The ways in, each as its example says."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from disagg_router.controller.cluster import cluster_id
from tests.e2e.serving import ROOT, environment, free_port, marked, nothing_left_of, proxying, until_settled

pytestmark = pytest.mark.engine

EXAMPLES = ROOT / "examples"
JOB_LIMIT_S = 240


def test_the_readmes_curl(cluster):
    """The command as it stands in README.md, port aside."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [command] = re.findall(r"^curl [^\n]*/v1/chat/completions(?:[^\n]*\\\n)*[^\n]*$", readme, re.MULTILINE)
    run = subprocess.run(
        command.replace("http://127.0.0.1:8000", cluster.url),
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0
    assert '"finish_reason":"length"' in run.stdout


def test_static_proxy(cluster, tmp_path):
    """In front of servers that somebody else runs: told by a list, tested before traffic, restarted without them."""
    engines = {role: cluster.instance(role)["url"] for role in ("prefill", "decode")}
    text = (EXAMPLES / "static-proxy" / "proxy.yaml").read_text(encoding="utf-8")
    text = text.replace("http://127.0.0.1:8100", engines["prefill"]).replace("http://127.0.0.1:8200", engines["decode"])
    with proxying(tmp_path, text.replace("my-model", "tiny")) as router:
        pairs = router.status()["pairs"]
        assert [one["state"] for one in pairs] == ["ready"], pairs
        body = {"model": "tiny", "prompt": "z" * 300, "max_tokens": 16, "temperature": 0, "cache_salt": "s"}
        routed = httpx.post(f"{router.url}/v1/completions", json=body, timeout=60)
        alone = httpx.post(f"{engines['decode']}/v1/completions", json=body | {"cache_salt": "t"}, timeout=60)
        assert routed.headers["x-disagg-path"] == "remote_prefill"
        assert routed.json()["choices"][0]["text"] == alone.json()["choices"][0]["text"]


@contextmanager
def ray_head(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """A Ray that is not ours, with a dashboard for jobs: its address and what a client needs in its environment."""
    ports = [free_port() for _ in range(4)]
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    env = environment(folder) | token | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={ports[0]}"]
    command += ["--dashboard-host=127.0.0.1", f"--dashboard-port={ports[1]}", "--num-cpus=4"]
    command += [f"--dashboard-agent-listen-port={ports[2]}", f"--ray-client-server-port={ports[3]}"]
    command += ["--object-store-memory=80000000", f"--temp-dir={folder}/ray"]
    with open(folder / "ray.log", "wb") as log:
        head = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        yield f"http://127.0.0.1:{ports[1]}", env
    finally:
        os.killpg(head.pid, signal.SIGTERM)
        try:
            head.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(head.pid, signal.SIGKILL)
            head.wait(10)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Unix socket paths are short: Ray's temp folder cannot lie under pytest's."""
    with tempfile.TemporaryDirectory(prefix="dr-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def test_ray_job(short_folder):
    """`ray job submit -- disagg-router serve`: answers from a Ray that runs already; `ray job stop` leaves nothing."""
    config = EXAMPLES / "ray-job" / "cluster.yaml"
    port, admin_port = free_port(), free_port()
    serve = ["disagg-router", "serve", str(config), "--port", str(port), "--admin-port", str(admin_port)]
    with ray_head(short_folder) as (address, env), nothing_left_of(cluster_id(config)):

        def job(*words: str) -> str:
            command = [str(Path(sys.executable).with_name("ray")), "job", words[0], "--address", address, *words[1:]]
            run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
            return run.stdout + run.stderr

        deadline = time.monotonic() + JOB_LIMIT_S
        while "Submitted" not in (said := job("submit", "--submission-id", "disagg", "--no-wait", "--", *serve)):
            if "successfully" in said:
                break
            assert time.monotonic() < deadline, said
            time.sleep(1)
        status = until_settled(f"http://127.0.0.1:{admin_port}", JOB_LIMIT_S)
        assert [one["state"] for one in status["pairs"]] == ["ready", "ready"], status  # roles are soft by default
        assert f"ready http://127.0.0.1:{port}" in job("logs", "disagg")
        body = {"model": "tiny", "prompt": "z" * 300, "max_tokens": 16, "temperature": 0}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200
        assert len(marked(cluster_id(config))) >= 6
        job("stop", "disagg")
        deadline = time.monotonic() + 15
        while left := marked(cluster_id(config)):
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{port}/health", timeout=5)
        assert "disagg" in job("list")  # the Ray itself goes on
