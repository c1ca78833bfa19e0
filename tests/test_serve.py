"""`serve` over two scripted children: waiting with limits, whose end means what, nothing left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from disagg_router.controller.ports import FIRST_PORT, LAST_PORT
from disagg_router.controller.processes import descendants, kill_marked, marked, marker
from disagg_router.errors import LaunchError
from disagg_router.proxy.admin_client import fetch_status
from disagg_router.serve import ChildEnded, ServePlan, serve
from tests.e2e.serving import command_line, free_port

SCRIPT = str(Path(__file__).with_name("fake_service.py"))


class Service:
    """What `serve` is to run; `plan` says how the children behave."""

    def __init__(self, folder: Path) -> None:
        self.cluster = f"test-{uuid.uuid4().hex[:8]}"
        self._folder = folder
        self._port = free_port()

    def plan(self, router: str = "steady", controller: str = "steady") -> ServePlan:
        return ServePlan(
            cluster_file=str(self._folder / "cluster.yaml"),
            cluster=self.cluster,
            public_url="http://[::1]:8000",
            admin_url=f"http://127.0.0.1:{self._port}",
            admin_token=None,
            proxy_options=(),
            instances=1,
            drain_s=1,
            stop_grace_s=0.5,
            ready_limit_s=20,
            command=(sys.executable, SCRIPT, str(self._port), router, controller, self.cluster),
        )


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    # The limits are what they are for engines; nothing here takes that long to stop.
    monkeypatch.setattr("disagg_router.serve.ENGINES_STOP_S", 0.5)
    monkeypatch.setenv("DISAGG_ROUTER_STATE_DIR", str(tmp_path / "state"))
    one = Service(tmp_path)
    others = set(descendants(os.getpid()))  # what tests before share until the run ends
    yield one
    left = [*marked(one.cluster), *(pid for pid in descendants(os.getpid()) if pid not in others)]
    kill_marked(one.cluster, 5)
    assert left == []


@pytest.fixture
def stranger(service: Service) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the same cluster that another `serve` has started."""
    process = subprocess.Popen(["sleep", "600"], env={**os.environ, **marker(service.cluster, "decode-0", "1")})
    yield process
    process.kill()
    process.wait()


async def until_ready(capsys: pytest.CaptureFixture[str], task: asyncio.Task[None]) -> str:
    """The line on stdout; raises what ended the task before."""
    while not (said := capsys.readouterr().out):
        if task.done():
            task.result()
        await asyncio.sleep(0.05)
    return said


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
async def test_ready_in_spite_of_polls_that_fail_then_a_signal(
    service: Service, capsys: pytest.CaptureFixture[str], signum: int
) -> None:
    """Errors and connections that break are no status, and no reason to give up either."""
    task = asyncio.create_task(serve(service.plan()))
    assert await until_ready(capsys, task) == "ready http://[::1]:8000\n"
    os.kill(os.getpid(), signum)
    await task


async def test_the_controllers_port_cannot_be_taken_by_an_outgoing_connection(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    """The router polls it from the beginning, and a connection from a port to itself succeeds."""
    plan = service.plan()
    task = asyncio.create_task(serve(plan))
    await until_ready(capsys, task)
    (one,) = (await answered(plan))["instances"]
    assert FIRST_PORT <= int(one["url"].rpartition(":")[2]) <= LAST_PORT
    os.kill(os.getpid(), signal.SIGTERM)
    await task


async def answered(plan: ServePlan) -> dict[str, list[dict[str, str]]]:
    while True:
        try:
            return await fetch_status(plan.admin_url)
        except LaunchError:
            await asyncio.sleep(0.05)


async def test_a_router_that_shows_nothing(service: Service) -> None:
    """One sentence after the limit."""
    plan = replace(service.plan(router="mute"), answer_limit_s=0.5)
    with pytest.raises(LaunchError, match=r"^the router did not answer within 0\.5 s; .*: it showed no status$"):
        await serve(plan)


async def test_an_instance_that_does_not_become_ready(service: Service) -> None:
    """The sentence says which, and in which state it is."""
    plan = replace(service.plan(controller="absent"), ready_limit_s=1.5)
    with pytest.raises(LaunchError, match=r"^not everything is ready within 1\.5 s; .*: decode-0 starting$"):
        await serve(plan)


@pytest.mark.parametrize(
    ("router", "controller", "says", "explained"),
    [
        ("SIGKILL", "steady", "the router was killed by SIGKILL", False),
        ("SIGSEGV", "steady", "the router was killed by SIGSEGV", False),
        ("steady", "1", "the controller ended with status 1", True),
        ("steady", "2", "the controller ended with status 2", True),
        ("steady", "3", "the controller ended with status 3", False),
    ],
)
async def test_a_child_that_does_not_last(
    service: Service, router: str, controller: str, says: str, explained: bool
) -> None:
    """The other one is stopped; who died how is said unless the child has done so itself."""
    with pytest.raises(ChildEnded, match=says) as caught:
        await serve(service.plan(router, controller))
    assert caught.value.explained is explained


async def test_another_service_on_the_same_ports_is_not_taken_for_ours_nor_harmed(
    service: Service, stranger: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    """It answers in place of our router, which then finds its port in use. No ready line, and what runs under the
    cluster's name goes on running."""
    with pytest.raises(ChildEnded, match="the router ended with status 2"):
        await serve(service.plan(router="foreign"))
    assert capsys.readouterr().out == ""
    assert stranger.poll() is None


async def test_a_controller_that_claimed_nothing_takes_nothing_with_it(
    service: Service, stranger: subprocess.Popen[bytes]
) -> None:
    """It is killed while it starts; the cluster's processes are another controller's."""
    with pytest.raises(LaunchError, match="not everything is ready"):
        await serve(replace(service.plan(controller="absent"), ready_limit_s=0.5))
    assert stranger.poll() is None


async def test_down_ends_serve_well(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    """It stops the controller, which then ends with 0."""
    task = asyncio.create_task(serve(service.plan()))
    await until_ready(capsys, task)
    os.kill(child("controller"), signal.SIGTERM)
    await task


async def test_a_router_that_somebody_stops_is_missed(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody asked `serve` to end."""
    task = asyncio.create_task(serve(service.plan()))
    await until_ready(capsys, task)
    os.kill(child("proxy"), signal.SIGTERM)
    with pytest.raises(ChildEnded, match="the router was killed by SIGTERM"):
        await task


def child(command: str) -> int:
    return next(pid for pid in descendants(os.getpid()) if f" {command} " in command_line(pid))


async def test_what_a_killed_controller_leaves_is_killed(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    """It gets the engines' grace and a moment, no more; the fixture sees that nothing is left."""
    task = asyncio.create_task(serve(service.plan(controller="stubborn")))
    await until_ready(capsys, task)
    assert len(marked(service.cluster)) == 1
    start_s = time.monotonic()
    os.kill(os.getpid(), signal.SIGTERM)
    await task
    assert 1 <= time.monotonic() - start_s < 6
    assert marked(service.cluster) == []
