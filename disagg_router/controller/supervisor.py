"""Stands between an actor and its engine, so that no engine process outlives its owner.

    actor -> (short-lived parent) -> supervisor (own session, subreaper, pidfds on its owners) -> engine tree

The double fork matters: Ray SIGKILLs an actor's direct children. Reads a SupervisorOrder as JSON on stdin, answers one
JSON line on stdout ({"supervisor": pid, "engine": pid} or {"error": sentence}), and writes why the engine ended to
`status_path`. Standard library only: it must start fast.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from disagg_router.controller.processes import (
    become_subreaper,
    descendants,
    die_with_parent,
    end_tree,
    reap,
    send,
)

STOPPED = "stopped"
_CANNOT_EXEC = 127
_ORPHAN_GRACE_S = 3.0  # nobody waits for these answers any more


@dataclass(frozen=True, slots=True)
class SupervisorOrder:
    """What to run. The end of any of `owners` (pids) ends the engine within `grace_s` + a moment."""

    argv: list[str]
    env: dict[str, str]
    owners: list[int]
    grace_s: float
    log_path: str
    status_path: str
    cpus: list[int] | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def main() -> None:
    order = SupervisorOrder(**json.loads(sys.stdin.read()))
    owners = [_pidfd(pid) for pid in order.owners]
    if os.fork():
        os._exit(0)
    os.setsid()
    become_subreaper()
    # Ray's workers block SIGINT, and a mask is inherited across exec.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    wakeup = _wakeup_fd()
    engine = _fork_engine(order)
    _answer({"supervisor": os.getpid(), "engine": engine})
    cause, status = _watch(engine, owners, wakeup)
    # The engine ends its own children. Once it is gone they have nobody to tell them.
    for pid in [engine] if status is None else descendants(os.getpid()):
        send(pid, signal.SIGTERM)
    end_tree(os.getpid(), order.grace_s if cause == STOPPED else min(order.grace_s, _ORPHAN_GRACE_S))
    _write_status(order.status_path, cause, status)


def _pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        _give_up(f"process {pid}, which should own the engine, is gone")


def _give_up(reason: str) -> NoReturn:
    _answer({"error": reason})
    os._exit(1)


def _answer(message: dict[str, Any]) -> None:
    """One line, then end of file: the actor reads to the end."""
    os.write(1, (json.dumps(message) + "\n").encode())
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    os.close(null)


def _wakeup_fd() -> int:
    """A descriptor that gets the number of every SIGTERM, SIGINT and SIGCHLD as a byte."""
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(write_fd)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(signum, lambda *_: None)
    return read_fd


def _fork_engine(order: SupervisorOrder) -> int:
    try:
        log = os.open(order.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        _give_up(f"cannot write {order.log_path}: {exc.strerror}")
    failed, report = os.pipe2(os.O_CLOEXEC)
    supervisor = os.getpid()
    engine = os.fork()
    if engine == 0:
        die_with_parent(supervisor)
        _become_engine(order, log, report)
    os.close(report)
    reason = os.read(failed, 4096).decode()  # end of file: exec closed it
    os.close(failed)
    if reason:
        _give_up(reason)
    os.dup2(log, 2)
    os.close(log)
    return engine


def _become_engine(order: SupervisorOrder, log: int, report: int) -> NoReturn:
    try:
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(signum, signal.SIG_DFL)
        if order.cpus:
            os.sched_setaffinity(0, order.cpus)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        # The port locks end with the supervisor, not with a straggler of the engine.
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd > 2:
                with contextlib.suppress(OSError):  # the descriptor that listed the folder
                    os.set_inheritable(fd, False)
        os.execvpe(order.argv[0], order.argv, order.env)
    except (OSError, ValueError) as exc:
        os.write(report, f"cannot start {order.argv[0]}: {exc}".encode())
    os._exit(_CANNOT_EXEC)


def _watch(engine: int, owners: list[int], wakeup: int) -> tuple[str, int | None]:
    """Until the engine ends, an owner ends, or SIGTERM: (why, the engine's wait status if it has ended)."""
    poll = select.poll()
    for fd in (*owners, wakeup):
        poll.register(fd, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        ended = dict(reap())
        if engine in ended:
            return "engine ended", ended[engine]
        if ready & set(owners):
            return "owner ended", None
        if wakeup in ready and {signal.SIGTERM, signal.SIGINT} & set(os.read(wakeup, 4096)):
            return STOPPED, None


def _write_status(path: str, cause: str, status: int | None) -> None:
    code = None if status is None else os.waitstatus_to_exitcode(status)
    scratch = f"{path}.{os.getpid()}"
    with open(scratch, "w", encoding="utf-8") as file:
        json.dump({"cause": cause, "exit_code": code}, file)
    os.replace(scratch, path)


def exit_note(path: str) -> str:
    """What a supervisor's status file says, in one line; a supervisor that was killed left none."""
    try:
        with open(path, encoding="utf-8") as file:
            status = json.load(file)
    except (OSError, ValueError):
        return "its supervisor was killed"
    code = status["exit_code"]
    if code is None:
        return str(status["cause"])
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


if __name__ == "__main__":
    main()
