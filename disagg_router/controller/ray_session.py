"""The connection to Ray: joining one that runs, or starting one of our own."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ray

from disagg_router.controller.processes import descendants, find, marker, name
from disagg_router.errors import ConfigError, LaunchError

_CONNECT_LIMIT_S = 3.0
_PROBE_LIMIT_S = 15.0
_OBJECT_STORE_BYTES = 80 * 2**20  # Ray's least; only small messages go through it


@dataclass(frozen=True, slots=True)
class RaySession:
    """A connection to Ray. `lifelines`: processes of this host that it hangs on."""

    own: bool
    lifelines: tuple[int, ...]

    @staticmethod
    def connect(cluster: str, cpus: int, environ: Mapping[str, str] = os.environ) -> RaySession:
        """Join the Ray that RAY_ADDRESS names, else start one for `cpus` instances.

        Blocks for seconds. To be called in the main thread: the kernel ends the Ray processes together with the
        thread that started them. Raises ConfigError, LaunchError.
        """
        address = environ.get("RAY_ADDRESS", "")
        if address and address != "local":
            _probe(address)
            _init({"address": address})
            return RaySession(own=False, lifelines=tuple(_local_raylet()))
        with _environ(marker(cluster, "ray", str(os.getpid())) | _own_ray_env()):
            _init(
                {
                    "address": "local",
                    "num_cpus": max(cpus, os.cpu_count() or 1),
                    "include_dashboard": False,
                    "object_store_memory": _OBJECT_STORE_BYTES,
                }
            )
        head = [pid for pid in descendants(os.getpid()) if name(pid) == "gcs_server"]
        return RaySession(own=True, lifelines=(*_local_raylet(), *head))


def first_line(exc: Exception) -> str:
    """What a foreign exception says, without the pages that Ray brings along."""
    return next(iter(str(exc).strip().splitlines()), type(exc).__name__)


def _init(options: Mapping[str, Any]) -> None:
    try:
        ray.init(**options, logging_level=logging.ERROR, log_to_driver=False)
    except Exception as exc:  # ray.init raises bare RuntimeError, ValueError, ConnectionError and more
        raise LaunchError(f"Ray could not be used: {first_line(exc)}") from exc


def _probe(address: str) -> None:
    """ray.init on a wrong address blocks for minutes, or ends the process; a child finds out in its place."""
    if "://" in address:
        raise ConfigError(f"RAY_ADDRESS {address} is not HOST:PORT of a Ray head: Ray Client addresses are not served")
    if not (_listens(address) and _is_ray(address)):
        raise LaunchError(
            f"no Ray {ray.__version__} answers at RAY_ADDRESS={address}: correct it, or unset it to have one started"
        )


def _listens(address: str) -> bool:
    """Cheaper than asking Ray: a refused connection needs no Ray to be understood."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():  # "auto": only Ray knows where
        return True
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_LIMIT_S):
            return True
    except OSError:
        return False


def _is_ray(address: str) -> bool:
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        return subprocess.run(command, capture_output=True, timeout=_PROBE_LIMIT_S, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _local_raylet() -> list[int]:
    return find("raylet", f"--node_id={ray.get_runtime_context().get_node_id()}")


def _own_ray_env() -> dict[str, str]:
    """Ray listens on every interface whatever it is told, and asks for a token unless the operator switched that
    off. A token of its own keeps it from writing one into the home folder."""
    ours = {
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # engines inherit it, and Ray's 15 would put them behind everything else
    }
    return {key: os.environ.get(key, value) for key, value in ours.items()}


@contextlib.contextmanager
def _environ(entries: Mapping[str, str]) -> Iterator[None]:
    """Environment entries for Ray's processes; taken back afterwards with whatever ray.init adds."""
    before = dict(os.environ)
    os.environ.update(entries)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
