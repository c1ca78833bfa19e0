"""SIGKILL, process by process, on real engines: what is gone when, and when it serves again."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
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
    local_cpu_config,
    marked,
    nothing_left_of,
    start,
)

pytestmark = pytest.mark.engine

GONE_LIMIT_S = 10.0
NOTHING_LEFT_LIMIT_S = 15.0
BACK_LIMIT_S = 120.0
READY_LIMIT_S = 3.0  # a health interval (1 s) and 2 s


def supervisor_of(engine: int) -> int:
    """The engine's parent."""
    return int(Path(f"/proc/{engine}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[1])


def actor_of(engine: int) -> int:
    """The Ray worker that the supervisor watches: it holds a pidfd on it."""
    infos = [info.read_text(encoding="ascii") for info in Path(f"/proc/{supervisor_of(engine)}/fdinfo").iterdir()]
    watched = [int(line.split()[1]) for info in infos for line in info.splitlines() if line.startswith("Pid:")]
    return next(pid for pid in watched if command_line(pid).startswith("ray::"))


def api_server(cluster: Serving, role: str) -> int:
    """The engine's first process, found by the port in its command line."""
    port = cluster.instance(role)["url"].rsplit(":", 1)[1]
    lines = {pid: command_line(pid) for pid in marked(f"{cluster.cluster}/{role}-0")}
    return next(pid for pid, line in lines.items() if f"--port {port} " in line)


def remote(cluster: Serving) -> httpx.Response:
    """A long prompt that nobody holds yet."""
    body = {"model": "tiny", "prompt": f"{time.monotonic()} " + "y" * 300, "max_tokens": 4, "temperature": 0}
    return httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60, trust_env=False)


@dataclass(frozen=True)
class Incarnation:
    """One engine as it was before something of it was killed."""

    role: str
    name: str
    api_server: int
    processes: tuple[int, ...]


def incarnation_of(cluster: Serving, role: str) -> Incarnation:
    name = cluster.instance(role)["incarnation"].partition("/")[0]  # the launcher's; the engine's own follows
    processes = alive(marked(f"{cluster.cluster}/{role}-0/{name}"))
    assert len(processes) >= 3  # supervisor, API server, engine core
    return Incarnation(role, name, api_server(cluster, role), tuple(processes))


def comes_back(cluster: Serving, old: Incarnation, killed_s: float, limit_s: float = BACK_LIMIT_S) -> float:
    """Seconds since the kill until another incarnation is up and tested."""

    def back(status: dict) -> bool:
        now = next(one for one in status["instances"] if one["role"] == old.role)
        return now["incarnation"].partition("/")[0] != old.name and all_tested(status)

    cluster.until(back, limit_s)
    assert remote(cluster).headers["x-disagg-path"] == "remote_prefill"
    assert cluster.process.poll() is None
    return time.monotonic() - killed_s


def test_the_decode_engine_comes_back(cluster, death_table):
    """Under threshold nothing else may decode: /ready says so in time, and the router needs no restart."""
    old = incarnation_of(cluster, "decode")
    os.kill(old.api_server, signal.SIGKILL)
    killed_s = time.monotonic()
    cluster.until(lambda status: not status["ready"], READY_LIMIT_S)
    refused = httpx.get(f"{cluster.url}/ready", timeout=5, trust_env=False)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_decode_instance")
    assert remote(cluster).json()["error"]["code"] == "no_decode_instance"
    gone_s = gone_within(old.processes, GONE_LIMIT_S)
    back_s = comes_back(cluster, old, killed_s)
    death_table.append(("engine", "the old engine's processes", f"{gone_s:.1f}", f"{back_s:.1f}"))


def test_engines_come_back_when_a_supervisor_and_an_actor_die(cluster, death_table):
    """The prefill's supervisor and the decode's actor worker, at the same moment."""
    prefill, decode = incarnation_of(cluster, "prefill"), incarnation_of(cluster, "decode")
    victims = {supervisor_of(prefill.api_server): prefill, actor_of(decode.api_server): decode}
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    killed_s = time.monotonic()
    gone = {old.role: gone_within(old.processes, GONE_LIMIT_S) for old in victims.values()}
    for name, old in (("supervisor", prefill), ("actor worker", decode)):
        back_s = comes_back(cluster, old, killed_s)
        death_table.append((name, "the old engine's processes", f"{gone[old.role]:.1f}", f"{back_s:.1f}"))


def everything_of(serving: Serving) -> list[int]:
    """`serve` itself, what is below it, and what carries its marker with all below that."""
    marked_ours = serving.processes()
    below = [pid for root in [serving.process.pid, *marked_ours] for pid in descendants(root)]
    return sorted({serving.process.pid, *marked_ours, *below})


def killed(serving: Serving, victim: int) -> float:
    """Seconds from the SIGKILL until nothing of it is left."""
    ours = everything_of(serving)
    with nothing_left_of(serving.cluster):
        os.kill(victim, signal.SIGKILL)
        gone_s = gone_within(ours, NOTHING_LEFT_LIMIT_S)
        assert serving.processes() == []
    return gone_s


def test_nothing_is_left_when_the_raylet_dies(cluster, death_table):
    """Engines, router, and the Ray that we started: all gone in 15 s, with a sentence."""
    [raylet] = [pid for pid in everything_of(cluster) if command_line(pid).split(" ")[0].endswith("/raylet")]
    gone_s = killed(cluster, raylet)
    assert cluster.stop(0) == 1
    assert "error: the Ray that this controller hangs on is gone" in cluster.stderr()
    death_table.append(("raylet", "everything", f"{gone_s:.1f}", "-"))


def test_nothing_is_left_when_serve_dies(tmp_path, death_table):
    """Its children die with it, the engines with theirs, and the Ray that we started."""
    alone = local_cpu_config().replace("  prefill: {instances: 1}\n", "")
    serving = start(tmp_path, alone, tested=False)
    engines = [pid for pid in everything_of(serving) if "vllm" in command_line(pid).lower()]
    assert len(engines) >= 2  # API server and engine core
    gone_s = killed(serving, serving.process.pid)
    assert serving.stop(0) == -signal.SIGKILL
    death_table.append(("serve", "everything", f"{gone_s:.1f}", "-"))
