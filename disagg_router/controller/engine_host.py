"""What runs on an engine's node: port lease, supervisor, clean-up. Becomes an actor in ray_launcher."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from disagg_router.controller.ports import PortAllocator, PortLease
from disagg_router.controller.processes import kill_marked, marker, name, send, wait_exit
from disagg_router.controller.spec import overlay_env
from disagg_router.controller.supervisor import SupervisorOrder, exit_note
from disagg_router.errors import LaunchError
from disagg_router.model import EngineAddress, EngineCommand, InstanceSpec

_KILL_LIMIT_S = 8.0
_SPAWN_LIMIT_S = 20.0
_LOG_LINES = 40


@dataclass(frozen=True, slots=True)
class HostSettings:
    """`log_folder` is the same path on every node; `grace_s` is how long an engine may take to stop."""

    log_folder: str
    grace_s: float


@dataclass(frozen=True, slots=True)
class HostEnd:
    """How an incarnation ended: why, in one line, and what its log said last."""

    note: str
    log_tail: tuple[str, ...]


class EngineHost:
    """One incarnation of one instance, on the node it was given."""

    def __init__(self, spec: InstanceSpec, incarnation: str, settings: HostSettings) -> None:
        self._spec = spec
        self._incarnation = incarnation
        self._settings = settings
        self._lease: PortLease | None = None
        self._supervisor: int | None = None
        self._ended = threading.Event()
        self._note = ""

    def reserve(self, host: str) -> EngineAddress:
        """Ports on `host`. Whatever an earlier incarnation of this instance left on the node is ended first.

        Raises LaunchError.
        """
        left = kill_marked(f"{self._spec.cluster}/{self._spec.id}", _KILL_LIMIT_S)
        if left:
            raise LaunchError(f"processes {left} of an earlier {self._spec.id} on {host} cannot be killed: see why")
        self._lease = PortAllocator(random.Random()).lease(4)
        return EngineAddress(host, *self._lease.ports)

    def spawn(self, command: EngineCommand) -> None:
        """Start the engine under a supervisor. Raises LaunchError; nothing is left running then."""
        env = overlay_env(os.environ, command.env)
        if not shutil.which(command.argv[0], path=env.get("PATH")):
            raise LaunchError(
                f"engine.python {command.argv[0]} is not an executable on {socket.gethostname()}: correct it"
            )
        marks = marker(self._spec.cluster, self._spec.id, self._incarnation)
        order = SupervisorOrder(
            argv=list(command.argv),
            env={**env, **marks},
            owners=_owners(),
            grace_s=self._settings.grace_s,
            log_path=str(self._rotated_log()),
            status_path=str(self._status_path),
            cpus=_cores(self._spec),
        )
        self._supervisor = self._start_supervisor(order, {**os.environ, **marks})
        threading.Thread(target=self._watch, args=(self._supervisor,), daemon=True).start()

    def wait_ended(self) -> HostEnd:
        """Blocks until every process of the incarnation is gone."""
        self._ended.wait()
        return HostEnd(self._note, tuple(self.log_tail(_LOG_LINES)))

    def stop(self) -> None:
        """SIGTERM, the grace, SIGKILL; returns when nothing is left."""
        if self._supervisor is None:
            return
        if not self._ended.is_set():
            send(self._supervisor, signal.SIGTERM)
        if not self._ended.wait(self._settings.grace_s + _KILL_LIMIT_S):
            send(self._supervisor, signal.SIGKILL)
            self._ended.wait(_KILL_LIMIT_S)

    def log_tail(self, lines: int) -> list[str]:
        return log_tail(log_path(self._settings.log_folder, self._spec.id), lines)

    def _start_supervisor(self, order: SupervisorOrder, env: dict[str, str]) -> int:
        lease = self._lease
        if lease is None:
            raise LaunchError(f"no ports were reserved for {self._spec.id}: this is a fault of the controller")
        try:
            answer = subprocess.run(
                [sys.executable, "-m", "disagg_router.controller.supervisor"],
                input=order.to_json(),
                stdout=subprocess.PIPE,
                text=True,
                env=env,
                pass_fds=lease.fds,  # the supervisor now keeps the ports
                start_new_session=True,
                timeout=_SPAWN_LIMIT_S,
                check=False,
            ).stdout
        except (OSError, subprocess.TimeoutExpired) as exc:
            raise LaunchError(f"cannot start a supervisor on {socket.gethostname()}: {exc}") from exc
        finally:
            lease.close()
            self._lease = None
        message = json.loads(answer) if answer else {"error": "its supervisor ended without a word"}
        if "error" in message:
            raise LaunchError(f"{self._spec.id} did not start: {message['error']}")
        return int(message["supervisor"])

    def _watch(self, supervisor: int) -> None:
        wait_exit(supervisor, None)
        left = kill_marked(f"{self._spec.cluster}/{self._spec.id}/{self._incarnation}", _KILL_LIMIT_S)
        self._note = exit_note(str(self._status_path)) + (f"; cannot be killed: {left}" if left else "")
        self._status_path.unlink(missing_ok=True)
        self._ended.set()

    @property
    def _status_path(self) -> Path:
        return Path(self._settings.log_folder) / f"{self._spec.id}.status"

    def _rotated_log(self) -> Path:
        """An empty place for the log; the earlier incarnation's is kept beside it."""
        path = log_path(self._settings.log_folder, self._spec.id)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                path.replace(path.with_suffix(".previous.log"))
            self._status_path.unlink(missing_ok=True)  # left when an actor was killed
        except OSError as exc:
            raise LaunchError(
                f"cannot write logs to {path.parent} on {socket.gethostname()} ({exc.strerror}): "
                "set DISAGG_ROUTER_STATE_DIR to a folder that every node can write"
            ) from exc
        return path


def log_path(folder: str, instance: str) -> Path:
    return Path(folder) / f"{instance}.log"


def log_tail(path: Path, lines: int) -> list[str]:
    """The last lines of a log; empty when there is none."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return [line.rstrip() for line in deque(file, lines)]
    except OSError:
        return []


def reachable_host(node_ip: str, peer_ips: Sequence[str]) -> str:
    """The address by which a node's peers reach it: its Ray address, unless that is loopback and there are others.

    A UDP connect sends nothing; it makes the kernel choose the address that faces the peer.
    """
    others = [ip for ip in peer_ips if not ip.startswith("127.")]
    if not node_ip.startswith("127.") or not others:
        return node_ip
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((others[0], 9))
        return str(probe.getsockname()[0])


def _owners() -> list[int]:
    """This process, and its raylet: a worker notices the end of its raylet only seconds later."""
    parent = os.getppid()
    return [os.getpid(), parent] if name(parent) == "raylet" else [os.getpid()]


def _cores(spec: InstanceSpec) -> list[int] | None:
    if spec.cpus is None or isinstance(spec.cpus, tuple):
        return list(spec.cpus) if spec.cpus else None
    allowed = sorted(os.sched_getaffinity(0))
    return [allowed[spec.index % len(allowed)]]
