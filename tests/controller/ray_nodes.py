"""A Ray of several raylets on this machine, as `ray start` makes them on several."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from disagg_router.controller.processes import descendants, is_alive, name, send
from tests.controller.support import wait_until

_BIN = Path(sys.executable).parent


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


class RayNodes:
    """`dashboard` is where jobs go; `env` is what a client needs."""

    def __init__(self, folder: Path) -> None:
        self.dashboard = f"http://127.0.0.1:{free_port()}"
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
        state = {"DISAGG_ROUTER_STATE_DIR": str(folder / "state"), "PATH": f"{_BIN}:{os.environ['PATH']}"}
        self.env = {**os.environ, **token, **state}
        self.env.pop("RAY_ADDRESS", None)
        self.address = ""
        self._folder, self._nodes = folder, dict[str, subprocess.Popen[bytes]]()

    def start_head(self, label: str) -> None:
        port = free_port()
        self._start(
            *(label, "--head", f"--port={port}", f"--temp-dir={self._folder}/ray"),
            *("--dashboard-host=127.0.0.1", f"--dashboard-port={self.dashboard.rpartition(':')[2]}"),
            f"--ray-client-server-port={free_port()}",
        )
        log, shown = self._folder / f"{label}.log", re.compile(rf"--address='?([^\s']+:{port})")
        assert wait_until(lambda: shown.search(log.read_text()), 60), log.read_text()
        self.address = shown.findall(log.read_text())[0]

    def start(self, *labels: str) -> None:
        """Each a node of its own, one after the other: of two that start at once in one folder, one may never
        register. They have joined when this returns."""
        for label in labels:
            self._start(label, f"--address={self.address}")
            log = self._folder / f"{label}.log"
            assert wait_until(lambda log=log: "Ray runtime started" in log.read_text(), 90), log.read_text()

    def _start(self, label: str, *words: str) -> None:
        """One raylet labelled place=`label`."""
        command = [str(_BIN / "ray"), "start", "--block", f"--labels=place={label}", "--num-cpus=2", *words]
        # Several raylets of one host: what has a fixed port by default gets another one.
        command += [f"--dashboard-agent-listen-port={free_port()}", "--min-worker-port=0", "--max-worker-port=0"]
        command += ["--object-store-memory=80000000"]
        with open(self._folder / f"{label}.log", "wb") as log:
            self._nodes[label] = subprocess.Popen(
                command, env=self.env, stdout=log, stderr=log, start_new_session=True, cwd=self._folder
            )

    def raylet(self, label: str) -> int:
        below = descendants(self._nodes[label].pid)
        return next((pid for pid in below if name(pid) == "raylet"), 0)

    def label_of(self, pids: set[int]) -> str | None:
        """The node whose raylet is among `pids`."""
        return next(
            (label for label, node in self._nodes.items() if node.poll() is None and self.raylet(label) in pids), None
        )

    def close(self) -> None:
        """Workers first: a raylet that has lost its head waits for it."""
        for node in reversed(self._nodes.values()):
            started = [node.pid, *descendants(node.pid)]
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGTERM)
            wait_until(lambda started=started: not any(map(is_alive, started)), 15)
            for pid in started:
                if is_alive(pid):
                    send(pid, signal.SIGKILL)
            node.wait()


@contextmanager
def ray_nodes(folder: Path, *labels: str) -> Iterator[RayNodes]:
    """The first label is the head's."""
    nodes = RayNodes(folder)
    try:
        nodes.start_head(labels[0])
        nodes.start(*labels[1:])
        yield nodes
    finally:
        nodes.close()
