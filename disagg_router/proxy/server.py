"""Runs the listeners and the brain in one event loop, and takes them down in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from disagg_router.listening import CUT_S, Listener, until_signalled
from disagg_router.memory import spare_collections
from disagg_router.routing.router import Router

log = logging.getLogger(__name__)


async def run_router(
    router: Router,
    brain: Coroutine[Any, Any, None],
    listeners: list[Listener],
    *,
    drain_s: float,
) -> None:
    """Until a signal: then nothing new is taken, what runs may end, and the listeners close.

    Raises whatever ended the brain or a listener before that.
    """
    spare_collections()
    work = [asyncio.create_task(brain), *(asyncio.create_task(listener.run_on_socket()) for listener in listeners)]
    signalled = asyncio.create_task(until_signalled())
    try:
        done, _ = await asyncio.wait([*work, signalled], return_when=asyncio.FIRST_COMPLETED)
        if signalled in done:
            log.info("%s: draining for at most %g s", signalled.result(), drain_s)
            if not await router.drain(drain_s):
                log.warning("%g s are over: what still runs is cut", drain_s)
        for task in done - {signalled}:
            task.result()
    finally:
        signalled.cancel()
        for listener in listeners:
            listener.should_exit = True
        await asyncio.wait(work[1:], timeout=CUT_S + 3)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
