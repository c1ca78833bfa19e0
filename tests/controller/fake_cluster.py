"""A controller process whose engines are stand-ins: fake_cluster.py CLUSTER INSTANCES MODE PORT [PYTHON]."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import httpx

from disagg_router.config import ClusterConfig
from disagg_router.controller.cluster import instance_specs
from disagg_router.controller.engine_host import HostSettings
from disagg_router.controller.ray_launcher import RayLauncher
from disagg_router.controller.ray_session import RaySession
from disagg_router.controller.run import ControllerParts, run_controller
from disagg_router.errors import DisaggError
from disagg_router.model import EngineAddress, EngineCommand, Fingerprint, InstanceSpec

_ENGINE = str(Path(__file__).with_name("fake_engine.py"))


class _Clock:
    def now_s(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


async def _healthy(url: str) -> bool:
    async with httpx.AsyncClient(timeout=2) as client:
        try:
            return (await client.get(f"{url}/health")).status_code == 200
        except httpx.HTTPError:
            return False


def main() -> None:
    cluster, instances, mode, port, *python = sys.argv[1:]
    config = ClusterConfig.model_validate(
        {
            "model": {"path": "stand-in", "served_name": "stand-in"},
            "engine": {"device": "cpu", "python": python[0] if python else None, "stop_grace_s": 2},
            "pools": {
                "decode": {"instances": int(instances), "labels": {"disk": "fast"} if mode == "unplaceable" else {}}
            },
        }
    )

    def build(spec: InstanceSpec, address: EngineAddress, incarnation: str) -> EngineCommand:
        return EngineCommand((spec.python, _ENGINE, address.host, str(address.http_port), mode), {})

    def connect(cluster: str, instances: int, settings: HostSettings) -> RayLauncher:
        return RayLauncher(RaySession.connect(cluster, instances), build, settings, placement_limit_s=3)

    parts = ControllerParts(connect, build, _healthy, lambda _: Fingerprint(), _Clock())
    specs = instance_specs(config, cluster)
    try:
        asyncio.run(run_controller(config, cluster, specs, parts, host="127.0.0.1", port=int(port)))
    except DisaggError as exc:
        sys.exit(str(exc))


if __name__ == "__main__":
    main()
