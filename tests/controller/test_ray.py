"""The controller on a real Ray with stand-ins for the engines: who dies, and what is left.

Runs in seconds what the tests with real engines can afford only once.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from disagg_router.controller.processes import descendants, is_alive, kill_marked, marked, name
from tests.controller.support import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.long]

_SCRIPT = str(Path(__file__).with_name("fake_cluster.py"))
_HEAD = str(Path(__file__).with_name("ray_head.py"))
_UP_LIMIT_S = 90.0


class Cluster:
    """A controller process and what it started."""

    def __init__(self, folder: Path) -> None:
        self.name = f"test-{uuid.uuid4().hex[:8]}"
        self._folder = folder
        self._environ = {**os.environ, "DISAGG_ROUTER_STATE_DIR": str(folder)}
        self._environ.pop("RAY_ADDRESS", None)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.process: subprocess.Popen[str] | None = None

    def start(self, mode: str = "ok", environ: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        python = ["/nowhere/python"] if mode == "bad-python" else []
        self.process = subprocess.Popen(
            [sys.executable, _SCRIPT, self.name, "1", mode, str(self._port), *python],
            env={**self._environ, **(environ or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self._folder,
        )
        return self.process

    def ready(self) -> bool:
        return wait_until(lambda: self.first().get("state") == "ready", _UP_LIMIT_S)

    def first(self) -> dict[str, Any]:
        """The first instance as the controller publishes it; empty while there is none."""
        try:
            instances = httpx.get(f"http://127.0.0.1:{self._port}/fleet", timeout=5).json()["instances"]
        except httpx.HTTPError:
            return {}
        return instances[0] if instances else {}

    def engine_processes(self) -> list[int]:
        return marked(f"{self.name}/decode-0/{self.first()['incarnation']}")

    def process_named(self, short_name: str) -> int:
        return next(pid for pid in marked(self.name) if name(pid).startswith(short_name))

    def supervisor(self) -> int:
        """The one of the instance's processes that all the others are below."""
        return max(self.engine_processes(), key=lambda pid: len(descendants(pid)))

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
        kill_marked(self.name, 10)


@pytest.fixture(scope="module")
def ray_address() -> Iterator[dict[str, str]]:
    """What joins a Ray that runs already and wants a token."""
    cluster = f"test-{uuid.uuid4().hex[:8]}"
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex * 2}
    head = subprocess.Popen(
        [sys.executable, _HEAD, cluster],
        env={**os.environ, **token},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert head.stdout is not None
    yield {"RAY_ADDRESS": head.stdout.readline().strip(), **token}
    head.communicate()
    kill_marked(cluster, 10)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    one = Cluster(tmp_path)
    yield one
    one.close()


def actor_worker(cluster: Cluster) -> int:
    """The process that owns the supervisor: it holds the supervisor's pidfd."""
    supervisor = cluster.supervisor()
    workers = (pid for pid in all_named("ray::_Host") if supervisor in watched_by(pid))
    return next(workers)


def all_named(short_name: str) -> list[int]:
    return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and name(int(pid)) == short_name]


def watched_by(pid: int) -> set[int]:
    """Processes that `pid` holds a pidfd of."""
    infos = [info.read_text() for info in Path(f"/proc/{pid}/fdinfo").iterdir()]
    return {int(line.split()[1]) for info in infos for line in info.splitlines() if line.startswith("Pid:")}


def test_an_instance_survives_the_death_of_any_of_its_processes(cluster: Cluster, ray_address: dict[str, str]) -> None:
    """After SIGKILL of each: the old incarnation's processes are gone in 10 s and a new one serves."""
    victims: dict[str, Callable[[], int]] = {
        "engine": lambda: descendants(cluster.supervisor())[0],
        "supervisor": cluster.supervisor,
        "actor worker": lambda: actor_worker(cluster),
    }
    cluster.start(environ=ray_address)
    assert cluster.ready()
    for victim, pid_of in victims.items():
        before, incarnation = cluster.engine_processes(), cluster.first()["incarnation"]
        assert len(before) == 3, victim
        os.kill(pid_of(), signal.SIGKILL)
        assert wait_until(lambda before=before: not any(map(is_alive, before)), 10), victim
        assert wait_until(lambda incarnation=incarnation: cluster.first().get("incarnation") != incarnation, 30), victim
        assert cluster.ready(), victim


@pytest.mark.parametrize(("signum", "exit_code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 0)])
def test_nothing_outlives_a_controller_that_joined_ray(
    cluster: Cluster, ray_address: dict[str, str], signum: int, exit_code: int
) -> None:
    """Its engines are gone within 15 s; the Ray it joined goes on."""
    process = cluster.start(environ=ray_address)
    assert cluster.ready()
    ours = marked(cluster.name)
    os.kill(process.pid, signum)
    assert wait_until(lambda: not any(map(is_alive, ours)) and not marked(cluster.name), 15)
    assert process.wait(10) == exit_code


@pytest.mark.parametrize("victim", ["raylet", "gcs_server"])
def test_a_ray_of_our_own_ends_with_any_part_of_it(cluster: Cluster, victim: str) -> None:
    """Nothing of ours is alive 15 s later, the controller says why, and stdout has none of Ray's words."""
    process = cluster.start()
    assert cluster.ready()
    ours = marked(cluster.name)
    os.kill(cluster.process_named(victim), signal.SIGKILL)
    assert wait_until(lambda: not any(map(is_alive, ours)) and not marked(cluster.name), 15)
    printed, errors = process.communicate(timeout=10)
    assert process.returncode == 1
    assert "is gone: start again" in errors
    assert printed == ""


@pytest.mark.parametrize(
    ("mode", "sentence"),
    [
        ("die", "decode-0 ended while loading (exited with code 1); its log ends with:\n  loading weights\n"),
        ("bad-python", "engine.python /nowhere/python is not an executable"),
        ("unplaceable", "it asks for 1 CPU, 0 GPU on a node labelled {'disk': 'fast'}"),
    ],
)
def test_an_engine_that_cannot_start(cluster: Cluster, ray_address: dict[str, str], mode: str, sentence: str) -> None:
    """One sentence, and nothing left."""
    _, errors = cluster.start(mode, ray_address).communicate(timeout=60)
    assert sentence in errors
    assert marked(cluster.name) == []


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("127.0.0.1:1", "no Ray 2.60.0 answers at RAY_ADDRESS=127.0.0.1:1"),
        ("ray://127.0.0.1:10001", "RAY_ADDRESS ray://127.0.0.1:10001 is not HOST:PORT"),
    ],
)
def test_a_ray_address_that_does_not_answer(cluster: Cluster, address: str, sentence: str) -> None:
    """Said within 20 s, where ray.init alone would try for minutes."""
    _, errors = cluster.start(environ={"RAY_ADDRESS": address}).communicate(timeout=20)
    assert sentence in errors
    assert marked(cluster.name) == []
