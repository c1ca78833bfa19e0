"""Ports on a node, leased so that two clusters on one host never collide.

A port is free when nobody has it bound and nobody holds the lock on its file. The lock lives as long as a
descriptor of it is open anywhere: the supervisor inherits it, so a lease ends with the supervisor, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
from dataclasses import dataclass

from disagg_router.errors import LaunchError

# Below the kernel's ephemeral range (32768 on Linux), so that no outgoing connection takes a port in between.
FIRST_PORT, LAST_PORT = 20000, 29999
# Not tempfile.gettempdir(): every cluster on the host must look in the same place whatever its TMPDIR.
LOCK_FOLDER = "/tmp/disagg-router-ports"


@dataclass(frozen=True, slots=True)
class PortLease:
    """`fds` are to be handed to whoever keeps the lease alive."""

    ports: tuple[int, ...]
    fds: tuple[int, ...]

    def close(self) -> None:
        """Give up this process's share; the lease lives on in processes that inherited the descriptors."""
        for fd in self.fds:
            os.close(fd)


@dataclass(frozen=True, slots=True)
class PortAllocator:
    """Leases from [first, last], starting at a random place."""

    rng: random.Random
    first: int = FIRST_PORT
    last: int = LAST_PORT
    folder: str = LOCK_FOLDER

    def lease(self, count: int) -> PortLease:
        """That many ports. Raises LaunchError when the range has no room."""
        _make_folder(self.folder)
        start = self.rng.randint(self.first, self.last)
        held: dict[int, int] = {}
        for port in (*range(start, self.last + 1), *range(self.first, start)):
            if len(held) == count:
                break
            fd = self._try(port)
            if fd is not None:
                held[port] = fd
        lease = PortLease(tuple(held), tuple(held.values()))
        if len(held) < count:
            lease.close()
            raise LaunchError(
                f"no {count} free port(s) between {self.first} and {self.last} on {socket.gethostname()}: "
                "stop what holds them"
            )
        return lease

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
