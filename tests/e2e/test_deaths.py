"""SIGKILL, process by process, on real engines: what is gone when, and when it serves again."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.serving import (
    Serving,
    alive,
    all_tested,
    command_line,
    descendants,
    gone_within,
    marked,
    nothing_left_of,
)

pytestmark = pytest.mark.engine

GONE_LIMIT_S = 10.0
NOTHING_LEFT_LIMIT_S = 15.0
BACK_LIMIT_S = 120.0


def supervisor_of(engine: int) -> int:
    """The engine's parent."""
    return int(Path(f"/proc/{engine}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[1])


def actor_of(engine: int) -> int:
    """The Ray worker that the supervisor watches: it holds a pidfd on it."""
    infos = [info.read_text(encoding="ascii") for info in Path(f"/proc/{supervisor_of(engine)}/fdinfo").iterdir()]
    watched = [int(line.split()[1]) for info in infos for line in info.splitlines() if line.startswith("Pid:")]
    return next(pid for pid in watched if command_line(pid).startswith("ray::"))


def itself(engine: int) -> int:
    return engine


VICTIMS = {"engine": itself, "supervisor": supervisor_of, "actor worker": actor_of}


def api_server(cluster: Serving, role: str) -> int:
    """The engine's first process, found by the port in its command line."""
    port = cluster.instance(role)["url"].rsplit(":", 1)[1]
    lines = {pid: command_line(pid) for pid in marked(f"{cluster.cluster}/{role}-0")}
    return next(pid for pid, line in lines.items() if f"--port {port} " in line)


def remote(cluster: Serving) -> httpx.Response:
    body = {"model": "tiny", "prompt": "y" * 300, "max_tokens": 4, "temperature": 0}
    return httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60, trust_env=False)


@pytest.mark.parametrize("victim", VICTIMS)
def test_an_instance_comes_back_whichever_process_dies(cluster, victim, death_table):
    """The old engine's processes are gone in 10 s; a new, tested one serves without a restart of the router."""
    role = "decode" if victim == "engine" else "prefill"
    engine, old = api_server(cluster, role), cluster.instance(role)
    processes = [pid for pid in marked(f"{cluster.cluster}/{role}-0/{old['incarnation']}") if alive([pid])]
    assert len(processes) >= 3  # supervisor, API server, engine core
    os.kill(VICTIMS[victim](engine), signal.SIGKILL)
    killed = time.monotonic()
    if role == "decode":
        # Under threshold nothing else may decode: /ready says so within a health interval (1 s) and 2 s.
        cluster.until(lambda status: not status["ready"], 3.0)
        refused = httpx.get(f"{cluster.url}/ready", timeout=5, trust_env=False)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_decode_instance")
        assert remote(cluster).json()["error"]["code"] == "no_decode_instance"
    else:
        assert remote(cluster).status_code == 200  # served local, or by the last answer of what is dying
    gone_s = gone_within(processes, GONE_LIMIT_S)

    def back(status):
        now = next(one for one in status["instances"] if one["role"] == role)
        return now["incarnation"] != old["incarnation"] and all_tested(status)

    cluster.until(back, BACK_LIMIT_S)
    death_table.append((victim, f"{role} engine", f"{gone_s:.1f}", f"{time.monotonic() - killed:.1f}"))
    assert remote(cluster).headers["x-disagg-path"] == "remote_prefill"
    assert cluster.process.poll() is None


@pytest.mark.parametrize("victim", ["raylet", "serve"])
def test_nothing_is_left_when_ray_or_serve_dies(cluster, victim, death_table):
    """Engines, router, and the Ray that we started: all gone in 15 s."""
    root = cluster.process.pid
    below = descendants(root)
    ours = sorted({*below, *cluster.processes(), *(pid for one in cluster.processes() for pid in descendants(one))})
    raylet = [pid for pid in ours if command_line(pid).split(" ")[0].endswith("/raylet")]
    assert len(raylet) == 1
    with nothing_left_of(cluster.cluster):
        os.kill(raylet[0] if victim == "raylet" else root, signal.SIGKILL)
        gone_s = gone_within([root, *ours], NOTHING_LEFT_LIMIT_S)
        assert cluster.processes() == []
    status = cluster.stop(0)
    assert status == (1 if victim == "raylet" else -signal.SIGKILL)
    if victim == "raylet":
        assert "error: the Ray that this controller hangs on is gone" in cluster.stderr()
    death_table.append((victim, "everything", f"{gone_s:.1f}", "-"))
