"""Asks a running router for its status."""

from __future__ import annotations

import os

import httpx

from disagg_router.config import ADMIN_TOKEN_VARIABLE
from disagg_router.errors import LaunchError
from disagg_router.interfaces import JsonObject

ADMIN_URL = "http://127.0.0.1:8001"


async def fetch_status(url: str, token: str | None = None, limit_s: float = 5.0) -> JsonObject:
    """Raises LaunchError when nothing answers there."""
    token = token or os.environ.get(ADMIN_TOKEN_VARIABLE)
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        async with httpx.AsyncClient(timeout=limit_s, trust_env=False) as http:
            answer = await http.get(f"{url.rstrip('/')}/status", headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        raise LaunchError(f"no router answers at {url}: give its admin listener with --admin") from exc
    if answer.status_code == 401:
        raise LaunchError(f"the router at {url} wants its admin token: set {ADMIN_TOKEN_VARIABLE}")
    if answer.status_code != 200:
        raise LaunchError(
            f"{url} answered {answer.status_code} to /status: give a router's admin listener with --admin"
        )
    status: JsonObject = answer.json()
    return status
