"""Port leases, between allocators and between processes."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from disagg_router.controller.ports import PortAllocator, PortLease
from disagg_router.errors import LaunchError


@pytest.fixture
def leases() -> Iterator[list[PortLease]]:
    """Whatever a test puts here is given up after it."""
    held: list[PortLease] = []
    yield held
    for lease in held:
        lease.close()


def allocator(folder: Path, first: int = 27000, last: int = 27029, seed: int = 0) -> PortAllocator:
    return PortAllocator(random.Random(seed), first, last, str(folder))


def test_two_allocators_do_not_collide(tmp_path: Path, leases: list[PortLease]) -> None:
    """Two clusters that start at the same place get different ports."""
    for _ in range(3):
        leases.append(allocator(tmp_path).lease(4))
    ports = [port for lease in leases for port in lease.ports]
    assert len(set(ports)) == 12


def test_ports_are_below_the_ephemeral_range(leases: list[PortLease]) -> None:
    """Else any outgoing connection may hold one, and one to a port where nobody listens may connect to itself."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    leases.append(PortAllocator(random.Random()).lease(4))
    assert max(leases[0].ports) < first


def test_a_bound_port_is_left_alone(tmp_path: Path, leases: list[PortLease]) -> None:
    """A port that another program listens on is not leased, whatever address it is bound to."""
    with closing(socket.create_server(("127.0.0.1", 27000))):
        leases.append(allocator(tmp_path, 27000, 27001).lease(1))
    assert leases[0].ports == (27001,)


def test_a_full_range_is_an_error(tmp_path: Path, leases: list[PortLease]) -> None:
    """No room is a LaunchError, and what was taken on the way is free again."""
    with pytest.raises(LaunchError, match="free port"):
        allocator(tmp_path, 27000, 27002).lease(4)
    leases.append(allocator(tmp_path, 27000, 27002).lease(3))


def test_the_lease_lives_as_long_as_a_process_that_inherited_it(tmp_path: Path, leases: list[PortLease]) -> None:
    """The one who leased may go: the lock ends with its last holder."""
    lease = allocator(tmp_path, 27000, 27000).lease(1)
    holder = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=lease.fds)
    lease.close()
    with pytest.raises(LaunchError):
        allocator(tmp_path, 27000, 27000).lease(1)
    holder.communicate(b"\n")
    leases.append(allocator(tmp_path, 27000, 27000).lease(1))
