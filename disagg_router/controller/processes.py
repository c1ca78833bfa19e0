"""What /proc and pidfds tell about processes, and ways to end them for certain. Standard library only.

A process is ours when its environment says so: DISAGG_ROUTER_INSTANCE=cluster/instance/incarnation is inherited
by whatever an engine starts, however it detaches itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Iterable, Iterator

MARKER = "DISAGG_ROUTER_INSTANCE"
# Else setproctitle, which vLLM and Ray use, writes the title over the environment that the marker is read from.
KEEP_ENVIRON = {"SPT_NOENV": "1"}

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05


def marker(cluster: str, instance: str, incarnation: str) -> dict[str, str]:
    """The environment entries by which a process and its descendants are found again."""
    return {MARKER: f"{cluster}/{instance}/{incarnation}", **KEEP_ENVIRON}


def descendants(root: int) -> list[int]:
    """Every live process below `root`, parents before children; zombies left out."""
    children: dict[int, list[int]] = {}
    for pid in _pids():
        stat = _stat(pid)
        if stat and stat[0] != "Z":
            children.setdefault(int(stat[1]), []).append(pid)
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def marked(scope: str) -> list[int]:
    """Live processes marked as part of `scope`, this process not among them.

    `scope` is a cluster, cluster/instance or cluster/instance/incarnation.
    """
    wanted = f"{MARKER}={scope}/".encode()
    found = (pid for pid in _pids() if any((entry + b"/").startswith(wanted) for entry in _read(pid, "environ")))
    return [pid for pid in found if pid != os.getpid() and is_alive(pid)]


def kill_marked(scope: str, limit_s: float) -> list[int]:
    """SIGKILL all that `marked` finds until it finds none; returns those that are left after `limit_s`.

    Scanned again because a process may fork between the look and the kill.
    """
    end_s = time.monotonic() + limit_s
    while left := marked(scope):
        for pid in left:
            send(pid, signal.SIGKILL)
        if time.monotonic() >= end_s:
            return left
        time.sleep(_POLL_S)
    return []


def wait_unmarked(scope: str, limit_s: float) -> None:
    """Wait until nothing is marked as part of `scope`, at most `limit_s`."""
    end_s = time.monotonic() + limit_s
    while marked(scope) and time.monotonic() < end_s:
        time.sleep(_POLL_S)


def is_alive(pid: int) -> bool:
    """False for a zombie: it holds nothing but its number."""
    stat = _stat(pid)
    return stat is not None and stat[0] not in ("Z", "X")


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot: with the pid it names a process for good."""
    stat = _stat(pid)
    return int(stat[19]) if stat else None


def name(pid: int) -> str:
    """The kernel's short name of the process; empty when it is gone."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def find(short_name: str, argument: str) -> list[int]:
    """Processes with this short name and this word on their command line."""
    return [pid for pid in _pids() if name(pid) == short_name and argument.encode() in _read(pid, "cmdline")]


def send(pid: int, signum: int) -> None:
    """Send a signal; a process that is gone already is fine."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def wait_exit(pid: int, limit_s: float | None) -> bool:
    """Wait for any process, child or not; False when it outlives `limit_s`."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()  # not select(): a busy process has descriptors above 1023
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(None if limit_s is None else limit_s * 1000))
    finally:
        os.close(pidfd)


def die_with_parent(expected_ppid: int, signum: int = signal.SIGKILL) -> None:
    """Ask the kernel to send `signum` to this process when the thread that forked it ends.

    To be called first thing in the child. Exits at once when the parent is gone already.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != expected_ppid:
        os._exit(1)


def become_subreaper() -> None:
    """Orphaned descendants become children of this process instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_tree(root: int, grace_s: float) -> None:
    """Wait `grace_s` for everything below `root` to end by itself, then SIGKILL until nothing is left.

    `root` is a subreaper, so that whatever detaches itself stays below it. Reaps its children when it is this one.
    """
    end_s = time.monotonic() + grace_s
    while descendants(root) and time.monotonic() < end_s:
        reap()
        time.sleep(_POLL_S)
    while left := descendants(root):
        for pid in left:
            send(pid, signal.SIGKILL)
        reap()
        time.sleep(_POLL_S)


def reap() -> Iterable[tuple[int, int]]:
    """(pid, wait status) of every child that has ended."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, status))


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        sys.exit(f"prctl({option}) failed: {os.strerror(ctypes.get_errno())}")


def _pids() -> Iterator[int]:
    return (int(entry) for entry in os.listdir("/proc") if entry.isdigit())


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the third (state, ppid, ...) on; the second may hold anything."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def _read(pid: int, entry: str) -> list[bytes]:
    """The NUL-separated strings of /proc/PID/`entry`; empty when the process is gone or another user's."""
    try:
        with open(f"/proc/{pid}/{entry}", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []
