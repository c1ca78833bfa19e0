"""An EngineClient whose engines are simulated: every leg is a job on an instance, speaking what vLLM speaks."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import msgspec
import numpy as np

from disagg_router.errors import UpstreamError, UpstreamRefused
from disagg_router.interfaces import EngineCall, EngineLoad, EngineReport
from disagg_router.model import Body, InstanceId
from disagg_router.routing.token_hashes import chain
from disagg_router.sim.instance import Pull, SimInstance
from disagg_router.sim.jobs import Job
from disagg_router.sim.model import Arrival, Workload

JSON = {"content-type": "application/json"}


class _Params(msgspec.Struct):
    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_engine_id: str = ""
    number: int = -1


class _Asked(msgspec.Struct):
    """Of a body what a simulated engine looks at. `prompt` is the arrival's number."""

    prompt: int | list[int] = -1
    max_tokens: int = 0
    kv_transfer_params: _Params | None = None


class SimResponse:
    """Of a prefill leg its handoff; of a decode leg nothing but the job, whose tokens nobody writes out."""

    status = 200
    headers: Mapping[str, str] = JSON

    def __init__(self, job: Job, answer: bytes = b"{}") -> None:
        self.job, self._answer = job, answer

    async def chunks(self) -> AsyncIterator[bytes]:
        yield await self.read()

    async def read(self) -> bytes:
        return self._answer


class SimClient:
    """`engines` by url, which is the instance's id as well. A load is as of `load_age_s` ago when it is told."""

    def __init__(self, engines: Mapping[InstanceId, SimInstance], workload: Workload, load_age_s: float = 0.0) -> None:
        self._load_age_s = load_age_s
        self._engines: Mapping[str, SimInstance] = {str(id_): engine for id_, engine in engines.items()}
        self._workload = workload
        self._decoder = msgspec.json.Decoder(_Asked)
        self._legs = 0
        self._keys: dict[int, tuple[Sequence[int], Sequence[int]]] = {}  # of arrivals under way

    @asynccontextmanager
    async def open(self, url: str, call: EngineCall) -> AsyncIterator[SimResponse]:
        asked, engine = self._decoder.decode(call.body), self._engines[url]
        call.on_sent()
        params = asked.kv_transfer_params or _Params()
        if asked.max_tokens == 0:
            self._engines[params.remote_engine_id].release(params.number)
            raise UpstreamRefused(400, "application/json", b"{}")
        assert isinstance(asked.prompt, int)
        job = self._job(self._workload.arrivals[asked.prompt], asked.max_tokens, pinned=params.do_remote_decode)
        pull = Pull(self._engines[params.remote_engine_id], params.number) if params.do_remote_prefill else None
        try:
            engine.submit(job, pull)
            await job.first
            yield SimResponse(job, self._handoff(url, job) if job.pinned else b"{}")
        except RuntimeError as exc:
            raise UpstreamError(str(exc)) from exc
        finally:
            if not job.done.done():
                engine.abort(job)

    def ended(self, number: int) -> None:
        """Nobody asks for this arrival again."""
        self._keys.pop(number, None)

    async def tokenize(self, url: str, body: Body) -> Sequence[int]:
        arrival = self._workload.arrivals[int(body["prompt"])]
        return tokens_of(arrival.blocks, self._workload.block_tokens)[: arrival.prompt_tokens]

    async def healthy(self, url: str) -> bool:
        return True

    async def report(self, url: str) -> EngineReport:
        raise NotImplementedError("a simulated fleet is known from the start")

    async def counters(self, url: str) -> Mapping[str, float]:
        return {}

    async def load(self, url: str) -> EngineLoad:
        load = self._engines[url].load()
        if self._load_age_s:
            await asyncio.sleep(self._load_age_s)
        return load

    def _job(self, arrival: Arrival, output_tokens: int, *, pinned: bool) -> Job:
        self._legs += 1
        blocks, keys = self._content(arrival)
        return Job(
            self._legs,
            prompt_tokens=arrival.prompt_tokens,
            output_tokens=output_tokens,
            blocks=blocks,
            keys=keys,
            pinned=pinned,
        )

    def _content(self, arrival: Arrival) -> tuple[Sequence[int], Sequence[int]]:
        """Content ids and keys of its full blocks, the answer's included; kept while it is under way."""
        known = self._keys.get(arrival.number)
        if known is None:
            size = self._workload.block_tokens
            full = (arrival.prompt_tokens + arrival.output_tokens) // size
            blocks = arrival.blocks[:full]
            known = self._keys[arrival.number] = blocks, chain(tokens_of(blocks, size), size)
        return known

    def _handoff(self, url: str, job: Job) -> bytes:
        blocks = math.ceil(job.prompt_tokens / self._workload.block_tokens)
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": url,
            "remote_num_tokens": job.prompt_tokens,
            "remote_block_ids": [[0] * blocks],
            "number": job.number,
        }
        return msgspec.json.encode({"kv_transfer_params": params})


def tokens_of(blocks: Sequence[int], block_tokens: int) -> array[int]:
    """Token ids that are equal exactly where the content is: each block's id, once for every token of it."""
    found = array("I")
    found.frombytes(np.repeat(np.asarray(blocks, dtype=np.uint32), block_tokens).tobytes())
    return found
