"""No process of an engine outlives its owner, its supervisor, or a SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg_router.controller.processes import kill_marked, marked, marker
from disagg_router.controller.supervisor import SupervisorOrder, exit_note
from tests.controller.support import wait_until

# A child in its own session that ignores SIGTERM, below an engine that obeys it: the shape of an engine core.
STUBBORN = """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        time.sleep(600)
    time.sleep(600)
print("affinity", sorted(os.sched_getaffinity(0)), flush=True)
time.sleep(600)
"""


class Supervised:
    """A supervisor with an engine, owned by a process that the test may kill."""

    def __init__(self, folder: Path) -> None:
        self.cluster = f"test-{uuid.uuid4().hex[:8]}"
        self.log, self.status = folder / "engine.log", folder / "engine.status"
        self.owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    def start(self, argv: list[str], cpus: list[int] | None = None) -> dict[str, object]:
        env = {**os.environ, **marker(self.cluster, "decode-0", "i-1")}
        order = SupervisorOrder(
            argv=argv,
            env=env,
            owners=[self.owner.pid],
            grace_s=0.3,
            log_path=str(self.log),
            status_path=str(self.status),
            cpus=cpus,
        )
        done = subprocess.run(
            [sys.executable, "-m", "disagg_router.controller.supervisor"],
            input=order.to_json(),
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            check=False,
        )
        answer: dict[str, object] = json.loads(done.stdout)
        return answer

    def start_stubborn(self) -> tuple[int, int]:
        """(supervisor, engine), with all three processes of the engine up."""
        answer = self.start([sys.executable, "-c", STUBBORN])
        assert wait_until(lambda: len(marked(self.cluster)) == 4, 10)
        return int(str(answer["supervisor"])), int(str(answer["engine"]))

    def gone(self, limit_s: float = 10) -> bool:
        return wait_until(lambda: not marked(self.cluster), limit_s)

    def close(self) -> None:
        kill_marked(self.cluster, 5)
        self.owner.kill()
        self.owner.communicate()


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Supervised]:
    one = Supervised(tmp_path)
    yield one
    one.close()


def test_the_owner_dies(supervised: Supervised) -> None:
    """SIGKILL of the owner ends everything below the supervisor, also what left its session and ignores SIGTERM."""
    supervised.start_stubborn()
    supervised.owner.kill()
    assert supervised.gone()
    assert exit_note(str(supervised.status)) == "owner ended"


def test_sigterm(supervised: Supervised) -> None:
    """SIGTERM of the supervisor ends everything after the grace."""
    supervisor, _ = supervised.start_stubborn()
    os.kill(supervisor, signal.SIGTERM)
    assert supervised.gone()
    assert exit_note(str(supervised.status)) == "stopped"


def test_the_engine_dies(supervised: Supervised) -> None:
    """What an engine leaves behind ends with it, and the signal is reported."""
    _, engine = supervised.start_stubborn()
    os.kill(engine, signal.SIGKILL)
    assert supervised.gone()
    assert exit_note(str(supervised.status)) == "killed by SIGKILL"


def test_the_supervisor_dies(supervised: Supervised) -> None:
    """The kernel ends the engine with its supervisor; the marker finds what that leaves."""
    supervisor, engine = supervised.start_stubborn()
    os.kill(supervisor, signal.SIGKILL)
    assert wait_until(lambda: engine not in marked(supervised.cluster), 5)
    assert len(marked(supervised.cluster)) == 2
    assert kill_marked(f"{supervised.cluster}/decode-0/i-1", 5) == []
    assert supervised.gone(0.1)
    assert exit_note(str(supervised.status)) == "its supervisor was killed"


def test_the_exit_code_is_reported(supervised: Supervised) -> None:
    """An engine that gives up by itself is told by its code, and its words are in the log."""
    supervised.start([sys.executable, "-c", "import sys; sys.exit('no such weights')"])
    assert wait_until(supervised.status.exists, 10)
    assert exit_note(str(supervised.status)) == "exited with code 1"
    assert supervised.log.read_text() == "no such weights\n"


def test_a_program_that_does_not_exist(supervised: Supervised) -> None:
    """An engine that cannot be executed is an error at once, not a process that hangs."""
    answer = supervised.start(["/nowhere/python"])
    assert "/nowhere/python" in str(answer["error"])
    assert supervised.gone()


def test_the_affinity_is_set(supervised: Supervised) -> None:
    """The engine and what it starts run on the cores they were given."""
    core = min(os.sched_getaffinity(0))
    supervised.start([sys.executable, "-c", STUBBORN], cpus=[core])
    assert wait_until(lambda: f"affinity [{core}]" in supervised.log.read_text(), 10)


def test_port_locks_are_not_handed_to_the_engine(supervised: Supervised) -> None:
    """The engine has its three standard descriptors and the one that lists them."""
    supervised.start([sys.executable, "-c", "import os; print(sorted(os.listdir('/proc/self/fd')))"])
    assert wait_until(supervised.status.exists, 10)
    assert supervised.log.read_text() == "['0', '1', '2', '3']\n"


def test_markers_match_whole_parts(supervised: Supervised) -> None:
    """A scope ends at a slash: one instance's is not the beginning of another's."""
    supervised.start_stubborn()
    assert marked(f"{supervised.cluster}/decode") == []
    assert marked(supervised.cluster[:-1]) == []
    assert len(marked(f"{supervised.cluster}/decode-0")) == 4


def test_the_supervisor_needs_only_the_standard_library() -> None:
    """It starts once per engine and must be fast."""
    code = "import sys, disagg_router.controller.supervisor; print({'ray', 'fastapi', 'pydantic'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
