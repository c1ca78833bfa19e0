"""Ports on a node, leased so that two clusters on one host never collide.

A port is free when nobody has it bound and nobody holds the lock on its file. The lock lives as long as a
descriptor of it is open anywhere: the supervisor inherits it, so a lease ends with the supervisor, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from disagg_router.errors import LaunchError

# Below the kernel's ephemeral range (32768 on Linux), so that no outgoing connection takes a port in between.
FIRST_PORT, LAST_PORT = 20000, 29999
# Not tempfile.gettempdir(): every cluster on the host must look in the same place whatever its TMPDIR.
LOCK_FOLDER = "/tmp/disagg-router-ports"


@dataclass(frozen=True, slots=True)
class PortLease:
    """`ports` holds the first of each run asked for; `fds` are to be handed to whoever keeps the lease alive."""

    ports: tuple[int, ...]
    fds: tuple[int, ...]

    def close(self) -> None:
        """Give up this process's share; the lease lives on in processes that inherited the descriptors."""
        _close(self.fds)


@dataclass(frozen=True, slots=True)
class PortAllocator:
    """Leases from [first, last], starting at a random place."""

    rng: random.Random
    first: int = FIRST_PORT
    last: int = LAST_PORT
    folder: str = LOCK_FOLDER

    def lease(self, spans: Sequence[int]) -> PortLease:
        """One run of consecutive ports for each span. Raises LaunchError when the range has no room."""
        _make_folder(self.folder)
        start = self.rng.randint(self.first, self.last)
        candidates = iter((*range(start, self.last + 1), *range(self.first, start)))
        fds: list[int] = []
        try:
            ports = tuple(self._run(span, candidates, fds) for span in spans)
        except BaseException:
            _close(fds)
            raise
        return PortLease(ports, tuple(fds))

    def _run(self, span: int, candidates: Iterator[int], held: list[int]) -> int:
        """The first of `span` consecutive ports; their locks are added to `held`."""
        run: list[int] = []
        first = self.first
        for port in candidates:
            fd = self._try(port)
            if fd is None or (run and port != first + len(run)):
                _close(run)  # also when the candidates wrapped around: a run has no gap
                run.clear()
            if fd is None:
                continue
            first = first if run else port
            run.append(fd)
            if len(run) == span:
                held += run
                return first
        _close(run)
        raise LaunchError(
            f"no {span} free port(s) in a row between {self.first} and {self.last} on {socket.gethostname()}: "
            "stop what holds them"
        )

    def _try(self, port: int) -> int | None:
        # O_NOFOLLOW: the folder is open to all users of the host.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(os.path.join(self.folder, str(port)), flags, 0o666)
        except PermissionError:  # another user's lock file
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        if _bindable(port):
            return fd
        os.close(fd)
        return None


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _bindable(port: int) -> bool:
    """Whether no socket of this host has the port, whatever address it is bound to."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _make_folder(folder: str) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
        if os.stat(folder).st_uid == os.getuid():
            os.chmod(folder, 0o1777)  # other users' clusters lock here too; makedirs obeys the umask
    except OSError as exc:
        raise LaunchError(f"cannot use {folder} for port locks ({exc.strerror}): make it a writable folder") from exc
