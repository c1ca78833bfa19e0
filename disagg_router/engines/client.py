"""VllmClient: everything the router says to a vLLM server over HTTP."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec

from disagg_router.engines import exposition
from disagg_router.engines.answers import checked
from disagg_router.engines.connection import UpstreamLimits
from disagg_router.engines.tokenize import tokenize_bodies, truncated
from disagg_router.engines.upstream import Upstream
from disagg_router.errors import UpstreamError, UpstreamTimeout
from disagg_router.interfaces import EngineCall, EngineLoad, EngineReport, EngineResponse
from disagg_router.listening import bracketed
from disagg_router.model import Body, Fingerprint

# Above this the parse is moved off the event loop; it takes some milliseconds per 100 kB.
_INLINE_PARSE_CHARS = 32 * 1024


class VllmClient:
    """interfaces.EngineClient. Generation and tokenizing go over the router's own connections; what only the brain
    asks now and then goes over httpx."""

    def __init__(
        self,
        limits: UpstreamLimits | None = None,
        *,
        tokenize_s: float = 3.0,
        health_s: float = 2.0,
        control_s: float = 10.0,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        limits = limits or UpstreamLimits()
        self._upstream = Upstream(limits, ssl_context)
        self._first_byte_s = limits.first_byte_s
        self._tokenize_s = tokenize_s
        self._health_s = health_s
        self._control_s = control_s
        self._http = httpx.AsyncClient(
            verify=ssl_context or True,
            timeout=control_s,
            limits=httpx.Limits(
                max_connections=128, max_keepalive_connections=64, keepalive_expiry=limits.keep_alive_s
            ),
            trust_env=False,  # a proxy of the environment must not come between the router and its engines
        )

    async def close(self) -> None:
        await self._upstream.close()
        await self._http.aclose()

    @asynccontextmanager
    async def open(self, url: str, call: EngineCall) -> AsyncIterator[EngineResponse]:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + (self._first_byte_s if call.head_limit_s is None else call.head_limit_s)
        async with self._upstream.open(url, call) as response:
            await checked(response, end_s - loop.time())
            yield response

    async def tokenize(self, url: str, body: Body) -> list[int]:
        """The prompt's token ids, as the engine will see them.

        Raises BadRequest when there is no prompt, UpstreamRefused with the engine's own answer when it refuses the
        prompt (it would refuse the generation too), UpstreamError otherwise.
        """
        ids, asked = tokenize_bodies(body)
        try:
            async with asyncio.timeout(self._tokenize_s):
                for each in asked:
                    ids = ids + await self._ids(url, each)
        except TimeoutError as exc:
            raise UpstreamTimeout(f"the engine did not tokenize within {self._tokenize_s:g} s") from exc
        return truncated(body, ids)

    async def healthy(self, url: str) -> bool:
        try:
            async with asyncio.timeout(self._health_s):
                return (await self._http.get(f"{url}/health")).is_success
        except (TimeoutError, httpx.TimeoutException) as exc:
            raise UpstreamTimeout(f"the engine did not answer /health within {self._health_s:g} s") from exc
        except (httpx.HTTPError, httpx.InvalidURL):
            return False

    async def report(self, url: str) -> EngineReport:
        """Only what the engine tells without its development mode; what it does not tell stays None."""
        version, models, metrics, sources = await asyncio.gather(
            self._json(url, "/version"),
            self._json(url, "/v1/models"),
            self._metrics(url),
            self._event_sources(url),
        )
        try:
            cards = [dict(card) for card in models["data"]]
            base = next(card for card in cards if card.get("parent") is None)
            cache = exposition.cache_config(metrics)
            return EngineReport(
                fingerprint=Fingerprint(
                    model=base.get("root"),
                    vllm_version=version["version"],
                    kv_dtype=_known(cache.get("cache_dtype")),
                    block_size=_block_size(cache),
                    kv_layout=_known(cache.get("kv_cache_layout")),
                ),
                served_models=tuple(str(card["id"]) for card in cards),
                model_cards=tuple(cards),
                incarnation=exposition.start_time(metrics),
                dp_size=exposition.engines(metrics),
                kv_events=sources[0],
                kv_replay=sources[1],
                kv_capacity_tokens=exposition.capacity_tokens(cache, exposition.engines(metrics)),
            )
        except (KeyError, TypeError, ValueError, StopIteration) as exc:
            raise UpstreamError("the engine's /version and /v1/models are not those of a vLLM server") from exc

    async def counters(self, url: str) -> Mapping[str, float]:
        text = await self._metrics(url)
        if len(text) <= _INLINE_PARSE_CHARS:
            return exposition.counters(text)
        return await asyncio.to_thread(exposition.counters, text)

    async def load(self, url: str) -> EngineLoad:
        """What its metrics say of its load."""
        return exposition.load(await self._metrics(url))

    async def _ids(self, url: str, asked: Mapping[str, Any]) -> list[int]:
        async with self.open(url, EngineCall("/tokenize", msgspec.json.encode(asked))) as response:
            answer = await response.read()
        try:
            return msgspec.json.decode(answer, type=_Tokens).tokens
        except msgspec.MsgspecError as exc:
            raise UpstreamError("the engine's answer to /tokenize holds no tokens") from exc

    async def _event_sources(self, url: str) -> tuple[str | None, str | None]:
        """Where rank 0 publishes its KV events and replays them, as seen from here; None where it does not.

        The engine names the address it binds, of which only the port means anything to others.
        """
        try:
            source = (await self._json(url, "/kv_event_sources") or {}).get("0") or {}
        except UpstreamError:
            return None, None  # an engine without this route is served all the same, and taken for empty
        host = bracketed(urlsplit(url).hostname or "")
        if not source.get("enable_kv_cache_events"):
            return None, None
        ports = [str(source.get(name) or "").rpartition(":")[2] for name in ("endpoint", "replay_endpoint")]
        events, replay = (f"tcp://{host}:{port}" if port.isdecimal() else None for port in ports)
        return events, replay

    async def _json(self, url: str, path: str) -> Any:  # noqa: ANN401 - JSON
        response = await self._get(url, path)
        try:
            return msgspec.json.decode(response.content)
        except msgspec.MsgspecError as exc:
            raise UpstreamError(f"the engine's answer to {path} is not JSON") from exc

    async def _metrics(self, url: str) -> str:
        return (await self._get(url, "/metrics")).text

    async def _get(self, url: str, path: str) -> httpx.Response:
        try:
            async with asyncio.timeout(self._control_s):
                response = await self._http.get(url + path)
        except (TimeoutError, httpx.TimeoutException) as exc:
            raise UpstreamTimeout(f"the engine did not answer {path} within {self._control_s:g} s") from exc
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise UpstreamError(f"the engine could not be asked for {path}") from exc
        if response.status_code != 200:
            raise UpstreamError(f"the engine answered {response.status_code} to {path}")
        return response


class _Tokens(msgspec.Struct):
    tokens: list[int]


def _known(label: str | None) -> str | None:
    return None if label in (None, "", "None") else label


def _block_size(cache: Mapping[str, str]) -> int | None:
    label = _known(cache.get("block_size"))
    return int(label) if label is not None and cache.get("_block_size_resolved") != "False" else None
