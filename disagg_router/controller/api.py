"""The controller's HTTP side: who is in the fleet."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import FastAPI, Query

from disagg_router.controller.feed import FleetFeed
from disagg_router.model import FleetSnapshot

LONG_POLL_S = 25.0


def create_app(feed: FleetFeed, long_poll_s: float = LONG_POLL_S) -> FastAPI:
    """`GET /fleet?after=VERSION` and `GET /health`."""
    app = FastAPI(title="disagg-router controller", docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/fleet")
    async def fleet(after: Annotated[int | None, Query()] = None) -> dict[str, Any]:
        """The whole fleet: at once, or once its version is another than `after`, at the latest after the long poll."""
        return fleet_json(await feed.after(after, long_poll_s))

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    return app


def fleet_json(snapshot: FleetSnapshot) -> dict[str, Any]:
    """Without `kv_replay`, `dp_size` and `kv_capacity_tokens`: a router asks the engine itself for them."""
    told = [asdict(instance) for instance in snapshot.instances]
    for instance in told:
        del instance["kv_replay"], instance["dp_size"], instance["kv_capacity_tokens"]
    return {"version": snapshot.version, "instances": told}
