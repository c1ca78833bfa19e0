"""One instance under observation: is it up, which incarnation is it, what is it made of."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable

from disagg_router.connectors.compatibility import merge
from disagg_router.errors import UpstreamError, UpstreamTimeout
from disagg_router.interfaces import Clock, EngineClient, EngineReport, JsonObject
from disagg_router.model import Instance, InstanceState

log = logging.getLogger(__name__)

SILENT_PROBES = 3  # a busy engine may miss a probe; a refused connection counts at once


class InstanceWatch:
    """Probes one instance and keeps `seen`: the declared instance with what was found out laid over it.

    A new start shows as another incarnation of the fleet source's, where that names them, or of `report`: a source may
    hear late that a process was restarted in its place. Where neither tells, having been away stands for it.
    """

    def __init__(
        self,
        declared: Instance,
        *,
        client: EngineClient,
        served_name: str,
        interval_s: float,
        clock: Clock,
        changed: Callable[[], None],
    ) -> None:
        self._declared = declared
        self._client, self._served_name = client, served_name
        self._interval_s, self._clock, self._changed = interval_s, clock, changed
        self._report: EngineReport | None = None  # set while the instance is up
        self._was_up = False
        self._arrivals = 0
        self._silent = 0
        self._poke = asyncio.Event()
        self.seen = self._describe()

    @property
    def model_cards(self) -> tuple[JsonObject, ...]:
        return self._report.model_cards if self._report else ()

    def declare(self, declared: Instance) -> None:
        """Take over what the fleet source now says. Another incarnation has to prove itself again."""
        if declared == self._declared:
            return
        if (declared.incarnation, declared.url) != (self._declared.incarnation, self._declared.url):
            self._report = None
        self._declared = declared
        self._publish()
        self.poke()

    def poke(self) -> None:
        """Probe now: a request has just failed there."""
        self._poke.set()

    async def run(self) -> None:
        while True:
            self._poke.clear()  # before the probe: what is reported while it runs asks for another
            try:
                await self._probe()
            except Exception:
                # One engine that answers in a way nobody foresaw must not end the watch over all the others.
                log.exception("%s could not be probed", self._declared.id)
                self._report = None
            self._publish()
            pause = asyncio.ensure_future(self._clock.sleep(self._interval_s))
            poked = asyncio.ensure_future(self._poke.wait())
            try:
                await asyncio.wait({pause, poked}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                pause.cancel()
                poked.cancel()

    async def _probe(self) -> None:
        declared = self._declared
        try:
            up = await self._client.healthy(declared.url)
            self._silent = 0
        except UpstreamTimeout:
            self._silent += 1
            up = self._report is not None and self._silent < SILENT_PROBES
        report = self._report
        if up and report is None:
            report = await self._arrived(declared)
        if self._declared is declared:  # else the source has replaced it while we asked
            self._report = report if up else None

    async def _arrived(self, declared: Instance) -> EngineReport | None:
        try:
            report = await self._client.report(declared.url)
        except UpstreamError as exc:
            log.warning("%s is healthy but does not describe itself: %s", declared.id, exc)
            return None
        if self._served_name not in report.served_models:
            log.warning("%s does not serve %s: it is left out", declared.id, self._served_name)
            return None
        for conflict in merge(declared.fingerprint, report.fingerprint)[1]:
            log.warning("%s: %s; it serves local only", declared.id, conflict)
        self._arrivals += 1
        self._was_up = True
        return report

    def _publish(self) -> None:
        now = self._describe()
        if now == self.seen:
            return
        if now.state is not self.seen.state:
            log.info("%s is %s", now.id, now.state)
        self.seen = now
        self._changed()

    def _describe(self) -> Instance:
        declared, report = self._declared, self._report
        if declared.state in (InstanceState.FAILED, InstanceState.DRAINING):
            return declared
        if report is None:
            absent = InstanceState.UNREACHABLE if self._was_up else InstanceState.STARTING
            return dataclasses.replace(declared, state=absent)
        fingerprint, _ = merge(declared.fingerprint, report.fingerprint)
        told = "/".join(filter(None, (declared.incarnation, report.incarnation)))
        return dataclasses.replace(
            declared,
            state=InstanceState.READY,
            fingerprint=fingerprint,
            incarnation=told or f"arrival-{self._arrivals}",
            dp_size=report.dp_size,
            kv_events=report.kv_events,
            kv_replay=report.kv_replay,
            kv_capacity_tokens=report.kv_capacity_tokens,
        )
