"""An EngineClient without a network: what the router asks is recorded, what it gets is scripted."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from disagg_router.errors import UpstreamError, UpstreamRefused, UpstreamUnreachable
from disagg_router.interfaces import EngineCall, EngineLoad, EngineReport
from disagg_router.model import Body, Fingerprint

REPORT = EngineReport(
    fingerprint=Fingerprint(model="./model", vllm_version="0.32.0", block_size=32),
    served_models=("tiny",),
    model_cards=({"id": "tiny", "object": "model", "max_model_len": 8192},),
    incarnation=None,
)
IDLE = EngineLoad(running=0, waiting=0, kv_usage=0.0, kv_capacity_tokens=None)


@dataclass
class Asked:
    """One recorded request: which engine, what body, whether it may be repeated."""

    engine: str
    call: EngineCall
    body: dict[str, Any]
    sent: bool = False

    @property
    def kind(self) -> str:
        params = self.body.get("kv_transfer_params") or {}
        if params.get("do_remote_decode"):
            return "prefill"
        if params.get("do_remote_prefill"):
            return "release" if self.body.get("max_tokens") == 0 else "decode"
        return "local"


@dataclass
class FakeResponse:
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=lambda: {"content-type": "application/json"})
    body: bytes = b"{}"

    async def chunks(self) -> AsyncIterator[bytes]:
        yield self.body

    async def read(self) -> bytes:
        return self.body


def _name(url: str) -> str:
    return url.removeprefix("http://").partition(":")[0]


@dataclass
class Connecting:
    """A step: no byte is sent for so long."""

    seconds: float


class FakeClient:
    """`script[url]` is a list of steps, one per request to that engine; past its end the engine behaves well.

    A step is an exception to raise, a float (seconds to hang after it was sent, then well),
    Connecting, or None (well).
    """

    def __init__(self, tokens: int = 100) -> None:
        self.asked: list[Asked] = []
        self.script: dict[str, list[Any]] = defaultdict(list)
        self.tokens: int | UpstreamError = tokens
        self.tokenized = 0
        self.health: dict[str, bool | Exception] = {}
        self.reports: dict[str, EngineReport | Exception] = {}
        self.loads: dict[str, EngineLoad | Exception] = {}
        self.open_now = 0
        self.answered = asyncio.Event()  # set after every prefill answer

    def kinds(self) -> list[tuple[str, str]]:
        return [(one.kind, one.engine) for one in self.asked]

    @asynccontextmanager
    async def open(self, url: str, call: EngineCall) -> AsyncIterator[FakeResponse]:
        name = _name(url)
        one = Asked(name, call, msgspec.json.decode(call.body))
        self.asked.append(one)
        self.open_now += 1
        try:
            yield await self._answer(one)
        finally:
            self.open_now -= 1

    async def _answer(self, one: Asked) -> FakeResponse:
        step = self.script[one.engine].pop(0) if self.script[one.engine] else None
        if isinstance(step, UpstreamUnreachable):
            raise step
        if isinstance(step, Connecting):
            await asyncio.sleep(step.seconds)
        one.call.on_sent()
        one.sent = True
        if isinstance(step, Exception):
            raise step
        if isinstance(step, float):
            await asyncio.sleep(step)
        if one.kind == "release":
            raise UpstreamRefused(400, "application/json", b"{}")
        if one.kind == "prefill":
            self.answered.set()
            return FakeResponse(body=msgspec.json.encode({"kv_transfer_params": self._params(one.engine)}))
        return FakeResponse(body=b'{"from": "%b"}' % one.engine.encode())

    def _params(self, engine: str) -> dict[str, Any]:
        tokens = self.tokens if isinstance(self.tokens, int) else 100
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": f"{engine}-first",
            "remote_num_tokens": tokens,
            "remote_block_ids": [list(range(math.ceil(tokens / 32)))],
        }

    async def tokenize(self, url: str, body: Body) -> list[int]:
        self.tokenized += 1
        if isinstance(self.tokens, UpstreamError):
            raise self.tokens
        return list(range(self.tokens))

    async def healthy(self, url: str) -> bool:
        answer = self.health.get(_name(url), True)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def report(self, url: str) -> EngineReport:
        answer = self.reports.get(_name(url), REPORT)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def counters(self, url: str) -> Mapping[str, float]:
        return {}

    async def load(self, url: str) -> EngineLoad:
        answer = self.loads.get(_name(url), IDLE)
        if isinstance(answer, Exception):
            raise answer
        return answer
