"""`down` on every node of a Ray."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from disagg_router.controller.ray_session import RaySession, first_line
from disagg_router.controller.state import DownReport, NodeReport, down
from disagg_router.errors import LaunchError

_NODE_LIMIT_S = 90.0  # a controller gets 30 s, what is left of it 10 s, and a loaded node takes its time to begin
_PASSES = 3


def down_on_nodes(cluster: str, folder: Path) -> Sequence[NodeReport]:
    """Do on every node of the Ray that RAY_ADDRESS names what `down` does here; only of nodes with something to do.

    Again until a pass finds nothing: a controller that is being stopped may just have started an engine on a node
    that was looked at before. `folder` is the cluster's state folder, the same on every node. Raises ConfigError,
    LaunchError.
    """
    RaySession.connect(cluster, 0)
    try:
        done: list[NodeReport] = []
        for _ in range(_PASSES):
            found = _one_pass(cluster, folder)
            if not found:
                break
            done += found
        return done
    finally:
        ray.shutdown()


def _one_pass(cluster: str, folder: Path) -> list[NodeReport]:
    nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    there = ray.remote(num_cpus=0, max_retries=0)(down)
    asked = [
        there.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(
            cluster, folder
        )
        for node in nodes
    ]
    try:
        reports: list[DownReport] = ray.get(asked, timeout=_NODE_LIMIT_S)
    except RayError as exc:
        raise LaunchError(f"not every node of Ray could be asked: {first_line(exc)}; run it again") from exc
    found = [NodeReport(node["NodeManagerAddress"], report) for node, report in zip(nodes, reports, strict=True)]
    return [one for one in found if one.report.controller_pid is not None or one.report.killed]
