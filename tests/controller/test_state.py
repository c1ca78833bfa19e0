"""One controller per cluster, what it leaves behind, and `down`."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg_router.controller.processes import kill_marked, marked, marker
from disagg_router.controller.state import ClusterState, down, read_record, state_folder
from disagg_router.errors import ConfigError
from tests.controller.support import wait_until

_CONTROLLER = """
import signal, sys, time
from pathlib import Path
from disagg_router.controller.state import ClusterState
if sys.argv[3] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with ClusterState(sys.argv[1], Path(sys.argv[2])) as state:
    state.publish(8100)
    time.sleep(600)
"""


@pytest.fixture
def cluster() -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex[:8]}"
    yield name
    kill_marked(name, 5)


def start_leftover(cluster: str) -> subprocess.Popen[bytes]:
    env = {**os.environ, **marker(cluster, "decode-0", "i-1")}
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=env)


def start_controller(cluster: str, folder: Path, kind: str = "obedient") -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", _CONTROLLER, cluster, str(folder), kind])
    assert wait_until(lambda: read_record(folder) is not None, 10)
    return process


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"DISAGG_ROUTER_STATE_DIR": "/var/lib/dr"}, "/var/lib/dr/c"),
        ({"XDG_STATE_HOME": "/home/u/.state"}, "/home/u/.state/disagg-router/c"),
        ({"DISAGG_ROUTER_STATE_DIR": "/var/lib/dr", "XDG_STATE_HOME": "/x"}, "/var/lib/dr/c"),
        ({}, os.path.expanduser("~/.local/state/disagg-router/c")),
    ],
)
def test_state_folder(environ: dict[str, str], folder: str) -> None:
    """Where a cluster's state is."""
    assert state_folder("c", environ) == Path(folder)


def test_a_second_controller_is_refused(cluster: str, tmp_path: Path) -> None:
    """While the first one is alive; it is named."""
    first = start_controller(cluster, tmp_path)
    with pytest.raises(ConfigError, match=str(first.pid)), ClusterState(cluster, tmp_path):
        pytest.fail("claimed twice")
    first.kill()
    first.wait()
    with ClusterState(cluster, tmp_path):
        pass


def test_leftovers_end_before_anything_is_started(cluster: str, tmp_path: Path) -> None:
    """Whatever a killed controller left is gone when the next one has its claim."""
    leftover = start_leftover(cluster)
    assert wait_until(lambda: marked(cluster) == [leftover.pid], 5)
    with ClusterState(cluster, tmp_path):
        assert marked(cluster) == []
    leftover.wait()


def test_down_without_anything(cluster: str, tmp_path: Path) -> None:
    """Nothing to do is no error."""
    assert down(cluster, tmp_path).sentence() == "nothing of this cluster was running here"


@pytest.mark.parametrize(("kind", "stopped"), [("obedient", True), ("stubborn", False)])
def test_down(cluster: str, tmp_path: Path, kind: str, stopped: bool) -> None:
    """The controller is asked first and killed after the limit; leftovers are killed."""
    controller = start_controller(cluster, tmp_path, kind)
    leftover = start_leftover(cluster)
    assert wait_until(lambda: marked(cluster) == [leftover.pid], 5)
    report = down(cluster, tmp_path, limit_s=1)
    assert (report.controller_pid, report.stopped_itself) == (controller.pid, stopped)
    assert (report.killed, report.left) == ((leftover.pid,), ())
    assert read_record(tmp_path) is None
    controller.wait()
    leftover.wait()


def test_another_process_with_the_pid_is_not_the_controller(cluster: str, tmp_path: Path) -> None:
    """A pid alone proves nothing: the start time must fit."""
    (tmp_path / "controller.json").write_text(f'{{"pid": {os.getpid()}, "start_ticks": 1, "port": 1}}')
    assert down(cluster, tmp_path).controller_pid is None
