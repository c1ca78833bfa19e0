"""One folder per cluster: which controller runs it, and its logs."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from disagg_router.controller.processes import is_alive, kill_marked, marked, send, start_ticks
from disagg_router.errors import ConfigError, LaunchError

_STOP_LIMIT_S = 30.0
_KILL_LIMIT_S = 10.0
_POLL_S = 0.1


def state_folder(cluster: str, environ: Mapping[str, str] = os.environ) -> Path:
    """DISAGG_ROUTER_STATE_DIR/<cluster>, else below the XDG state folder."""
    root = environ.get("DISAGG_ROUTER_STATE_DIR")
    if root:
        return Path(root).absolute() / cluster
    state = environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "disagg-router" / cluster


@dataclass(frozen=True, slots=True)
class ControllerRecord:
    """A running controller. The start ticks tell it from a later process with its pid."""

    pid: int
    start_ticks: int
    port: int

    @property
    def alive(self) -> bool:
        return is_alive(self.pid) and start_ticks(self.pid) == self.start_ticks


class ClusterState:
    """The claim of one controller on its cluster; a context, so that it ends whatever happens."""

    def __init__(self, cluster: str, folder: Path) -> None:
        self._cluster = cluster
        self._folder = folder
        self._lock: int | None = None

    @property
    def log_folder(self) -> Path:
        return self._folder / "logs"

    def __enter__(self) -> ClusterState:
        """Claim the cluster, then end what an earlier controller left. Raises ConfigError, LaunchError."""
        try:
            self.log_folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise ConfigError(
                f"cannot write {self._folder} ({exc.strerror}): set DISAGG_ROUTER_STATE_DIR to a folder you may write"
            ) from exc
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            running = read_record(self._folder)
            who = f" (pid {running.pid})" if running else ""
            os.close(self._lock)
            raise ConfigError(
                f"a controller of this cluster file runs already{who}: stop it with `disagg-router down` and the file"
            ) from exc
        left = kill_marked(self._cluster, _KILL_LIMIT_S)
        if left:
            os.close(self._lock)
            raise LaunchError(f"processes {left} of an earlier controller cannot be killed: see why")
        return self

    def publish(self, port: int) -> None:
        """Tell `down` where this controller is."""
        record = {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid()), "port": port}
        scratch = self._record.with_suffix(".new")
        scratch.write_text(json.dumps(record), encoding="utf-8")
        scratch.replace(self._record)

    def __exit__(self, *_: object) -> None:
        self._record.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)

    @property
    def _record(self) -> Path:
        return self._folder / "controller.json"


def read_record(folder: Path) -> ControllerRecord | None:
    """What `publish` wrote; None when there is nothing or nothing readable."""
    try:
        data = json.loads((folder / "controller.json").read_text(encoding="utf-8"))
        return ControllerRecord(int(data["pid"]), int(data["start_ticks"]), int(data["port"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


@dataclass(frozen=True, slots=True)
class DownReport:
    """`controller_pid` is the controller that was asked to stop; `killed` what had to be killed after it."""

    controller_pid: int | None
    stopped_itself: bool
    killed: tuple[int, ...]
    left: tuple[int, ...]

    def sentence(self) -> str:
        if self.controller_pid is None and not self.killed:
            return "nothing of this cluster was running here"
        said: list[str] = []
        if self.controller_pid is not None:
            how = "stopped" if self.stopped_itself else "did not stop in time and was killed"
            said.append(f"controller {self.controller_pid} {how}")
        if self.killed:
            said.append(f"killed {len(self.killed)} process(es) that were left")
        if self.left:
            said.append(f"could not kill {list(self.left)}")
        return "; ".join(said)


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What `down` did on one node of a Ray; `address` is the node's there."""

    address: str
    report: DownReport


def down(cluster: str, folder: Path, limit_s: float = _STOP_LIMIT_S) -> DownReport:
    """Stop this host's controller of the cluster, then kill what the marker proves to be the cluster's."""
    record = read_record(folder)
    pid = record.pid if record and record.alive else None
    stopped = False
    if record and pid is not None:
        send(pid, signal.SIGTERM)
        end_s = time.monotonic() + limit_s
        while record.alive and time.monotonic() < end_s:
            time.sleep(_POLL_S)
        stopped = not record.alive
        if not stopped:
            send(pid, signal.SIGKILL)
    killed = marked(cluster)
    left = kill_marked(cluster, _KILL_LIMIT_S)
    if not left:
        with contextlib.suppress(FileNotFoundError):
            (folder / "controller.json").unlink()
    return DownReport(pid, stopped, tuple(killed), tuple(left))
