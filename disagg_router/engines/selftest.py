"""Self-test of a pair: prompts nobody has seen, prefilled on one engine and decoded on the other."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from disagg_router.errors import PairTestFailed, UpstreamError
from disagg_router.interfaces import Clock, EngineCall, EngineClient, KVConnector
from disagg_router.model import Body, Handoff, Instance

_ENDPOINT = "/v1/completions"
_PROMPTS = 3
_ANSWER_TOKENS = 16
_LOGPROB_TOLERANCE = 0.1
_PULLED = 'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}'
_DEFAULT_BLOCK_TOKENS = 128


class _Choice(msgspec.Struct):
    token_ids: list[int]
    prompt_token_ids: list[int] = []
    logprobs: dict[str, Any] | None = None


class _Completion(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]


async def self_test(
    client: EngineClient,
    connector: KVConnector,
    prefill: Instance,
    decode: Instance,
    *,
    served_name: str,
    salt: str,
    exact: bool,
    clock: Clock,
    leg_limit_s: float = 60.0,
    counter_lag_s: float = 2.0,
) -> None:
    """Return when the pair may carry traffic, raise PairTestFailed with the reason when it may not.

    Reference is the prefill engine alone, greedy, 3 prompts of 16 tokens. `exact` (equal hardware and parallelism):
    all tokens must be equal; else the first token must be and its logprob within 0.1. And the decode engine must have
    pulled the prompts' KV. `salt` makes the prompts, which the decode engine must never have seen: a new one for each
    test. `leg_limit_s` bounds each request, `counter_lag_s` how long the engine's counters may lag behind.
    """
    test = _SelfTest(client, connector, served_name, exact, clock, random.Random(salt), leg_limit_s, counter_lag_s)
    try:
        await test.run(prefill, decode)
    except (UpstreamError, msgspec.MsgspecError) as exc:
        raise PairTestFailed(f"the self-test got no usable answer: {exc}") from exc


@dataclass(frozen=True, slots=True)
class _SelfTest:
    client: EngineClient
    connector: KVConnector
    served_name: str
    exact: bool
    clock: Clock
    rng: random.Random
    leg_limit_s: float
    counter_lag_s: float

    async def run(self, prefill: Instance, decode: Instance) -> None:
        block_tokens = decode.fingerprint.block_size or prefill.fingerprint.block_size or _DEFAULT_BLOCK_TOKENS
        prompts = await self._prompts(prefill, block_tokens)
        pulled_before = await self._pulled(decode)
        for prompt in prompts:
            body = self._body(prompt)
            expected = await self._ask(prefill, body)
            self._compare(expected, await self._through_pair(body, prefill, decode))
        # Connectors that move whole blocks leave the rest of each prompt to the decode engine.
        needed = sum(len(prompt) // block_tokens * block_tokens for prompt in prompts)
        await self._check_pulled(decode, pulled_before, needed)

    async def _prompts(self, prefill: Instance, block_tokens: int) -> list[list[int]]:
        """Random token ids, longer than two blocks and no multiple of one. The ids come from a text, so that they
        are ordinary ones whatever the vocabulary."""
        text = "".join(self.rng.choice("abcdefghijklmnopqrstuvwxyz0123456789 ") for _ in range(200))
        answer = await self._ask(prefill, {**self._body(text), "max_tokens": 1})
        ids = sorted(set(answer.prompt_token_ids))
        if not ids:
            raise PairTestFailed(f"{prefill.id} does not return token ids")
        lengths = [(2 + i) * block_tokens + self.rng.randrange(1, max(2, block_tokens)) for i in range(_PROMPTS)]
        return [self.rng.choices(ids, k=length) for length in lengths]

    def _body(self, prompt: str | list[int]) -> Body:
        body = {
            "model": self.served_name,
            "prompt": prompt,
            "max_tokens": _ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        # Asked for only where they are compared: their first use has cost a CPU engine half a minute.
        return body if self.exact else {**body, "logprobs": 1}

    async def _through_pair(self, body: Body, prefill: Instance, decode: Instance) -> _Choice:
        request_id = f"selftest-{self.rng.getrandbits(64):016x}"
        handoff = self.connector.begin(request_id, prefill, decode)
        if self.connector.concurrent_legs:
            return await self._at_once(body, handoff, prefill, decode)
        answer = await self._post(prefill, self.connector.prefill_body(body, handoff), request_id)
        handoff = self.connector.complete(
            handoff, msgspec.json.decode(answer, type=dict[str, object]), self.clock.now_s()
        )
        # A decode leg that fails keeps the prefill's blocks until the lease ends: it may still be reading them.
        return _choice(await self._post(decode, self.connector.decode_body(body, handoff), request_id, once=True))

    async def _at_once(self, body: Body, handoff: Handoff, prefill: Instance, decode: Instance) -> _Choice:
        leg = self._post(decode, self.connector.decode_body(body, handoff), handoff.request_id, once=True)
        decoding = asyncio.create_task(leg)
        try:
            await self._post(prefill, self.connector.prefill_body(body, handoff), handoff.request_id)
            return _choice(await decoding)
        finally:
            decoding.cancel()
            await asyncio.gather(decoding, return_exceptions=True)

    async def _ask(self, instance: Instance, body: Body) -> _Choice:
        alone = self.connector.local_body(body, load_external=False)
        return _choice(await self._post(instance, alone, f"selftest-{self.rng.getrandbits(64):016x}"))

    async def _post(
        self,
        instance: Instance,
        body: Body,
        request_id: str,
        *,
        once: bool = False,
    ) -> bytes:
        call = EngineCall(
            _ENDPOINT,
            msgspec.json.encode(body),
            (("x-request-id", request_id),),
            once=once,
            head_limit_s=self.leg_limit_s,
        )
        try:
            async with self.client.open(instance.url, call) as response:
                return await response.read()
        except UpstreamError as exc:
            raise PairTestFailed(f"{instance.id} failed in the self-test: {exc}") from exc

    def _compare(self, expected: _Choice, got: _Choice) -> None:
        if self.exact:
            if expected.token_ids != got.token_ids:
                where = _first_difference(expected.token_ids, got.token_ids)
                raise PairTestFailed(f"the answer differs from the prefill engine's own at token {where}")
            return
        if expected.token_ids[:1] != got.token_ids[:1]:
            raise PairTestFailed("the first token differs from the prefill engine's own")
        off = abs(_first_logprob(expected) - _first_logprob(got))
        if off > _LOGPROB_TOLERANCE:
            raise PairTestFailed(f"the first token's logprob is off by {off:.3f} (allowed: {_LOGPROB_TOLERANCE})")

    async def _pulled(self, decode: Instance) -> float:
        counters: Mapping[str, float] = await self.client.counters(decode.url)
        return counters.get(_PULLED, 0.0)

    async def _check_pulled(self, decode: Instance, before: float, needed: int) -> None:
        """The counter is trustworthy: a pull that fails and is recomputed does not count in it."""
        give_up_s = self.clock.now_s() + self.counter_lag_s
        while (grown := await self._pulled(decode) - before) < needed:
            if self.clock.now_s() >= give_up_s:
                raise PairTestFailed(f"no KV was pulled: {decode.id} counts {grown:.0f} tokens where {needed} were due")
            await self.clock.sleep(0.1)


def _choice(answer: bytes) -> _Choice:
    return msgspec.json.decode(answer, type=_Completion).choices[0]


def _first_logprob(choice: _Choice) -> float:
    logprobs = (choice.logprobs or {}).get("token_logprobs") or []
    if not logprobs:
        raise PairTestFailed("an engine returned no logprobs")
    return float(logprobs[0])


def _first_difference(expected: list[int], got: list[int]) -> int:
    same = (a == b for a, b in zip(expected, got, strict=False))
    return next((i for i, equal in enumerate(same) if not equal), min(len(expected), len(got)))
