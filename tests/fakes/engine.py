"""A scripted engine on 127.0.0.1 that speaks what vLLM 0.32.0 was seen to speak (tests/fakes/shapes.py)."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from tests.fakes import shapes
from tests.fakes.shapes import Json, key_shape
from tests.fakes.wire import IdleProtocol, Recorded, Wire

__all__ = ["FakeEngine", "Recorded", "Script", "key_shape"]

_GENERATION = ("/v1/completions", "/v1/chat/completions")


@dataclass(frozen=True, slots=True)
class Script:
    """What to do to one request instead of just serving it. `on` is the start of the paths it waits for."""

    on: str = "/v1/"
    status: int | None = None  # answer with this and `message`
    message: str = "scripted"
    head_delay_s: float = 0.0
    event_delay_s: float = 0.0  # before each event of a stream
    cut_after: int | None = None  # close without a proper end after this many events
    hang_after: int | None = None  # nothing more after this many events
    error_after: tuple[int, Json] | None = None  # this event after so many, then [DONE]
    error_first: int | None = None  # 200, then an error event with this code
    reset: bool = False  # no answer, the connection is reset
    close: bool = False  # no answer, the connection is closed
    hang: bool = False  # no answer, ever
    raw: tuple[bytes, ...] | None = None  # exactly these writes, then close


class FakeEngine:
    """Use as `async with FakeEngine(...) as engine`. Engines that share `fabric` can pull from one another.

    The knobs after the star may be changed while it runs. A handoff used twice, or with another block size, is
    answered with wrong tokens and 200, and bad kv_transfer_params kill the engine: that is what vLLM does.
    """

    def __init__(
        self,
        *,
        engine_id: str = "engine-0",
        served_name: str = "tiny",
        model: str = "/models/tiny",
        block_size: int = 32,
        max_model_len: int = 8192,
        fabric: dict[str, FakeEngine] | None = None,
    ) -> None:
        self.engine_id, self.served_name, self.model = engine_id, served_name, model
        self.block_size, self.max_model_len = block_size, max_model_len
        self.fabric = {} if fabric is None else fabric
        self.requests: list[Recorded] = []
        self.pinned: dict[str, list[int]] = {}  # prefilled, not yet pulled or released
        self.pulled_tokens = 0
        self.connections = 0
        self.healthy = True
        self.events_port: int | None = None
        self.idle_close_s: float | None = 5.0
        self.pull = "works"  # "works" | "recomputes" (nothing is moved) | "corrupts"
        self.logprob_shift = 0.0
        self.started_s = 1_795_976_375.9
        self._scripts: list[Script] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def script(self, *scripts: Script) -> None:
        """Each is applied once, to the first request it fits."""
        self._scripts += scripts

    def generations(self) -> list[Recorded]:
        return [request for request in self.requests if request.path in _GENERATION]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.die()

    async def start(self, port: int = 0) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: IdleProtocol(self._connected), "127.0.0.1", port, backlog=512)
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.fabric[self.engine_id] = self

    async def die(self) -> None:
        """As kill -9 looks from outside: refused from now on, open connections cut. `start` brings it back."""
        self._server.close()
        self.pinned.clear()
        self.fabric.pop(self.engine_id, None)
        tasks = self._tasks - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- connections ---

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.ensure_future(self._connection(Wire(reader, writer), self.connections))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connection(self, wire: Wire, number: int) -> None:
        try:
            while (request := await wire.request(number, self.idle_close_s)) is not None:
                self.requests.append(request)
                if not await wire.watched(self._serve(request, wire), request.gone):
                    if request.gone.is_set() and request.path in _GENERATION:
                        self._let_go(request.body.get("kv_transfer_params") or {})  # its abort tells the prefill
                    return
        finally:
            wire.close()

    async def _serve(self, request: Recorded, wire: Wire) -> bool:
        """Answer; False when the connection must not be used again."""
        script = self._next_script(request.path)
        if script.hang:
            await asyncio.Event().wait()
        if script.reset or script.close:
            wire.close(reset=script.reset)
            return False
        await asyncio.sleep(script.head_delay_s)
        if script.raw is not None:
            for part in script.raw:
                await wire.write(part)
            return False
        if script.status is not None:
            await wire.json(script.status, shapes.error(script.status, script.message))
            return True
        if request.path in _GENERATION:
            return await self._generate(request, script, wire)
        await self._control(request, wire)
        return True

    def _next_script(self, path: str) -> Script:
        for i, script in enumerate(self._scripts):
            if path.startswith(script.on):
                return self._scripts.pop(i)
        return Script()

    # --- endpoints ---

    async def _control(self, request: Recorded, wire: Wire) -> None:
        match request.path:
            case "/health":
                await wire.head(200 if self.healthy else 503, "content-length: 0")
            case "/version":
                await wire.json(200, {"version": "0.32.0"})
            case "/v1/models":
                await wire.json(200, shapes.models(self.served_name, self.model, self.max_model_len))
            case "/kv_event_sources":
                await wire.json(200, shapes.event_sources(self.events_port))
            case "/metrics":
                await wire.body(200, "text/plain; version=1.0.0; charset=utf-8", self._metrics().encode())
            case "/tokenize":
                refused = self._refusal(request.body)
                ids = [] if refused else self._prompt_ids(request.body)
                answer = {"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids, "token_strs": None}
                await (wire.json(*refused) if refused else wire.json(200, answer))
            case _:
                await wire.json(404, {"detail": "Not Found"})

    def _metrics(self) -> str:
        labels = f'engine="0",model_name="{self.served_name}"'
        return "\n".join(
            [
                f"process_start_time_seconds {self.started_s}",
                f'vllm:cache_config_info{{block_size="{self.block_size}",cache_dtype="auto",engine="0",'
                f'num_gpu_blocks="1000"}} 1.0',
                f"vllm:num_requests_running{{{labels}}} 0.0",
                f"vllm:kv_cache_usage_perc{{{labels}}} {len(self.pinned) / 100}",
                f'vllm:prompt_tokens_by_source_total{{{labels},source="external_kv_transfer"}} {self.pulled_tokens}.0',
                f"vllm:nixl_bytes_transferred_sum{{{labels}}} {self.pulled_tokens * 1024}.0",
                "",
            ]
        )

    def _refusal(self, body: Json) -> tuple[int, Json] | None:
        """What vLLM refuses before it computes anything."""
        if body.get("model") not in (None, self.served_name):
            message = f"The model `{body['model']}` does not exist. Valid aliases: {self.served_name}."
            return 404, shapes.error(404, message, "NotFoundError", "model")
        if not body.get("messages") and not body.get("prompt"):
            return 400, shapes.error(400, "Either prompt or messages must be given.", param="prompt")
        if body.get("max_completion_tokens", body.get("max_tokens")) == 0:
            self._let_go(body.get("kv_transfer_params") or {})
            message = "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"
            return 400, shapes.error(400, message, param="max_tokens")
        if len(self._prompt_ids(body)) > self.max_model_len:
            message = f"This model's maximum context length is {self.max_model_len} tokens."
            return 400, shapes.error(400, message, param="input_tokens")
        return None

    def _prompt_ids(self, body: Json) -> list[int]:
        if "messages" in body:
            return shapes.encode_text(shapes.chat_text(body))
        prompt = body["prompt"]
        return shapes.encode_text(prompt) if isinstance(prompt, str) else list(prompt)

    async def _generate(self, request: Recorded, script: Script, wire: Wire) -> bool:
        body = request.body
        if refused := self._refusal(body):
            await wire.json(*refused)
            return True
        prompt_ids, chat = self._prompt_ids(body), "chat" in request.path
        params: Json = body.get("kv_transfer_params") or {}
        if params.get("do_remote_prefill") and self._is_fatal(params, prompt_ids):
            await wire.json(500, shapes.error(500, "EngineCore encountered an issue.", "InternalServerError"))
            await self.die()
            return False
        wanted = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        seen = self._pull(params, prompt_ids) if params.get("do_remote_prefill") else prompt_ids
        request_id = request.headers.get("x-request-id", f"{len(self.requests):016x}")
        answer = shapes.Answer(request_id, chat, body, prompt_ids, shapes.output_ids(seen, wanted), self.logprob_shift)
        if body.get("stream"):
            return await self._stream(answer.events(), script, wire)
        handoff = self._pin(request_id, prompt_ids) if params.get("do_remote_decode") else None
        await wire.json(200, answer.unary(handoff))
        return True

    async def _stream(self, events: list[Json], script: Script, wire: Wire) -> bool:
        await wire.head(200, "content-type: text/event-stream; charset=utf-8", "transfer-encoding: chunked")
        if script.error_first is not None:
            events = [shapes.error(script.error_first, "Internal server error", "InternalServerError")]
        if script.error_after is not None:
            count, error = script.error_after
            events = [*events[:count], error]
        for i, data in enumerate([*map(json.dumps, events), "[DONE]"]):
            if i == script.cut_after:
                return False
            if i == script.hang_after:
                await asyncio.Event().wait()
            await asyncio.sleep(script.event_delay_s)
            await wire.chunk(f"data: {data}\n\n".encode())
        await wire.chunk(b"")
        return True

    # --- KV ---

    def _pin(self, request_id: str, prompt_ids: list[int]) -> Json:
        internal_id = f"cmpl-{request_id}-0-{len(self.requests):08x}"
        self.pinned[internal_id] = prompt_ids
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(1, 1 + math.ceil(len(prompt_ids) / self.block_size)))],
            "remote_engine_id": self.engine_id,
            "remote_request_id": internal_id,
            "remote_host": "localhost",
            "remote_port": 22071,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": len(prompt_ids),
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": 0,
        }

    def _is_fatal(self, params: Json, prompt_ids: list[int]) -> bool:
        """Fewer remote tokens than the prompt has; block counts of another block size are believed."""
        groups = params.get("remote_block_ids") or [[]]
        return not groups[0] or params.get("remote_num_tokens", 0) < len(prompt_ids)

    def _pull(self, params: Json, prompt_ids: list[int]) -> list[int]:
        """The prompt as the KV says it was. An engine that is gone is recomputed; nothing else is noticed."""
        peer = self.fabric.get(params["remote_engine_id"])
        if peer is None or self.pull == "recomputes":
            return prompt_ids
        held = peer.pinned.pop(params["remote_request_id"], None)
        self.pulled_tokens += len(prompt_ids)
        right = held == prompt_ids and peer.block_size == self.block_size and self.pull == "works"
        return prompt_ids if right else [*prompt_ids, 0]

    def _let_go(self, params: Json) -> None:
        peer = self.fabric.get(params.get("remote_engine_id", ""))
        if peer is not None:
            peer.pinned.pop(params.get("remote_request_id", ""), None)
