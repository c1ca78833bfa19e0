"""`ray job submit` on several nodes, with stand-ins for the engines: who runs where, and what a lost node costs."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from disagg_router.controller.cluster import cluster_id
from disagg_router.controller.processes import descendants, kill_marked, marked, marker
from disagg_router.controller.state import read_record, state_folder
from tests.controller.ray_nodes import RayNodes, free_port, ray_nodes
from tests.controller.support import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

ENGINE = Path(__file__).with_name("fake_vllm.py")
UP_LIMIT_S = 120.0
MOVED_LIMIT_S = 90.0  # Ray notices a lost node within about 15 s; the rest is for a busy machine

CONFIG = """
model: {{path: {folder}/model, served_name: tiny}}
engine: {{device: cpu, python: {folder}/python, start_limit_s: 60}}
pools:
  prefill: {{instances: 1, labels: {{place: "in(a,b,c)"}}}}
  decode: {{instances: 1, labels: {{place: head}}}}
"""


class Job:
    """One `ray job submit -- disagg-router serve`."""

    def __init__(self, folder: Path, nodes: RayNodes) -> None:
        self.file, self._nodes = folder / "cluster.yaml", nodes
        self.cluster = cluster_id(self.file)
        self.id = f"disagg-{secrets.token_hex(4)}"
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")
        (folder / "python").write_text(f'#!/bin/sh\nexec {sys.executable} {ENGINE} "$@"\n')
        (folder / "python").chmod(0o755)
        self.file.write_text(CONFIG.format(folder=folder))
        self._port, self._admin_port = free_port(), free_port()

    def submit(self, *options: str) -> str:
        serve = ["disagg-router", "serve", str(self.file)]
        serve += ["--port", str(self._port), "--admin-port", str(self._admin_port)]
        return self.ray("submit", "--submission-id", self.id, "--no-wait", *options, "--", *serve)

    def ray(self, word: str, *words: str) -> str:
        command = ["ray", "job", word, "--address", self._nodes.dashboard, *words]
        run = subprocess.run(command, env=self._nodes.env, capture_output=True, text=True, timeout=60, check=False)
        return run.stdout + run.stderr

    def instances(self) -> dict[str, dict[str, Any]]:
        try:
            status = httpx.get(f"http://127.0.0.1:{self._admin_port}/status", timeout=5, trust_env=False).json()
        except httpx.TransportError:
            return {}
        return {one["id"]: one for one in status["instances"]}

    def ready(self) -> set[str]:
        return {id for id, one in self.instances().items() if one["state"] == "ready"}

    def node_of(self, instance: str) -> str | None:
        """By the raylet that the instance's supervisor hangs on."""
        ours = marked(f"{self.cluster}/{instance}")
        supervisor = max(ours, key=lambda pid: len(descendants(pid)), default=0)
        return self._nodes.label_of(watched_by(supervisor)) if supervisor else None

    def complete(self) -> int:
        body = {"model": "tiny", "prompt": "z" * 300, "max_tokens": 4}
        try:
            answer = httpx.post(f"http://127.0.0.1:{self._port}/v1/completions", json=body, timeout=20, trust_env=False)
        except httpx.TransportError:
            return 0
        return answer.status_code

    @contextmanager
    def traffic(self) -> Iterator[Counter[int]]:
        """Requests one after the other meanwhile; how many had which status."""
        seen, over = Counter[int](), threading.Event()

        def send() -> None:
            while not over.wait(0.1):
                seen[self.complete()] += 1

        thread = threading.Thread(target=send)
        thread.start()
        try:
            yield seen
        finally:
            over.set()
            thread.join()


def watched_by(pid: int) -> set[int]:
    """Processes that `pid` holds a pidfd of."""
    try:
        infos = [info.read_text() for info in Path(f"/proc/{pid}/fdinfo").iterdir()]
    except OSError:
        return set()
    return {int(line.split()[1]) for info in infos for line in info.splitlines() if line.startswith("Pid:")}


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """`head`, `a` and `b`."""
    # Unix socket paths are short: Ray's temp folder cannot lie under pytest's.
    with tempfile.TemporaryDirectory(prefix="dr-", ignore_cleanup_errors=True) as name:
        with ray_nodes(Path(name), "head", "a", "b") as started:
            yield started


@pytest.fixture
def job(nodes: RayNodes, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    """Submitted, with the options of a test that gives some, and everything of it ready."""
    options = getattr(request, "param", ())
    one = Job(tmp_path, nodes)
    try:
        assert wait_until(lambda: "submitted successfully" in one.submit(*options), UP_LIMIT_S)
        assert wait_until(lambda: one.ready() == {"prefill-0", "decode-0"}, UP_LIMIT_S), one.ray("logs", one.id)
        yield one
    finally:
        kill_marked(one.cluster, 10)


DOWN = """
import sys
from pathlib import Path
from disagg_router.controller.ray_down import down_on_nodes
for node in down_on_nodes(sys.argv[1], Path(sys.argv[2])):
    print(node.report.sentence())
"""


@pytest.mark.parametrize("job", [("--entrypoint-label-selector", '{"place": "b"}')], indirect=True, ids=["on-b"])
def test_down_reaches_every_node(job: Job, nodes: RayNodes) -> None:
    """The driver runs on the node that was asked for; `down` from elsewhere ends it, then what it may have left
    behind; a further look finds nothing."""

    def down() -> str:
        folder = str(state_folder(job.cluster, nodes.env))
        command = [sys.executable, "-c", DOWN, job.cluster, folder]
        env = {**nodes.env, "RAY_ADDRESS": nodes.address}
        run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert run.returncode == 0, run.stderr
        return run.stdout

    assert job.complete() == 200
    controller = read_record(state_folder(job.cluster, nodes.env))
    assert controller is not None
    assert controller.pid in descendants(nodes.raylet("b"))
    said = down()
    assert "controller" in said
    assert "stopped" in said
    assert wait_until(lambda: not marked(job.cluster), 5)
    assert wait_until(lambda: "succeeded" in job.ray("status", job.id), 30), job.ray("status", job.id)
    with subprocess.Popen(["sleep", "600"], env={**os.environ, **marker(job.cluster, "decode-0", "1")}) as left:
        assert "killed 1 process(es)" in down()
        assert left.wait(5) == -signal.SIGKILL
    assert down() == ""


def test_a_node_is_lost(job: Job, nodes: RayNodes) -> None:
    """An instance runs where its labels say, moves to another such node, and waits where there is none; every request
    meanwhile is answered. `ray job stop` leaves nothing on any node."""
    assert job.node_of("decode-0") == "head"
    first = job.node_of("prefill-0")
    assert first in ("a", "b")
    second = "b" if first == "a" else "a"
    with job.traffic() as statuses:
        start = time.monotonic()
        os.kill(nodes.raylet(first), signal.SIGKILL)
        assert wait_until(lambda: job.node_of("prefill-0") == second, MOVED_LIMIT_S)
        assert wait_until(lambda: job.ready() == {"prefill-0", "decode-0"}, MOVED_LIMIT_S)
        print(f"moved after {time.monotonic() - start:.1f} s")
        os.kill(nodes.raylet(second), signal.SIGKILL)
        assert wait_until(lambda: job.ready() == {"decode-0"}, MOVED_LIMIT_S)
        start = time.monotonic()
        nodes.start("c")
        assert wait_until(lambda: job.ready() == {"prefill-0", "decode-0"}, MOVED_LIMIT_S + 60)
        print(f"on the new node after {time.monotonic() - start:.1f} s")
        assert job.node_of("prefill-0") == "c"
    print(f"answers meanwhile: {dict(statuses)}")
    assert set(statuses) == {200}
    job.ray("stop", job.id)
    assert wait_until(lambda: not marked(job.cluster), 15)
    assert job.complete() == 0
