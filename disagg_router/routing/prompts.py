"""Prompt -> token ids -> what each target holds of them."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from disagg_router.body import value_of
from disagg_router.errors import UpstreamError, UpstreamRefused
from disagg_router.interfaces import EngineClient
from disagg_router.model import Body, InferenceRequest, Instance, Target
from disagg_router.routing import token_hashes
from disagg_router.routing.checked_tokenizer import CheckedTokenizer, Kind
from disagg_router.routing.fleet import Fleet
from disagg_router.routing.local_tokenizer import Prompt
from disagg_router.routing.prefix_index import CachedTokens, PrefixIndex
from disagg_router.routing.routed_prefixes import RoutedPrefixes

log = logging.getLogger(__name__)

ENGINES_TO_ASK = 2
GUESSED_BLOCK_SIZE = 16  # vLLM's on GPUs; only for instances that do not say, whose holdings are guessed anyway
_PENDING_BLOCKS = 1_000_000  # of requests read and not yet served: about 40 bytes each

Chains = dict[int, list[int]]  # block size -> keys of the prompt's full blocks


@dataclass(frozen=True, slots=True)
class PromptStats:
    """How requests were counted. `failed`: neither here nor by an engine; `local_failed`: here, so an engine was asked;
    `mismatches`: checks in which the local tokenizer did not give an engine's ids, by kind."""

    local: int
    engine: int
    skipped: int
    failed: int
    local_failed: int
    mismatches: Mapping[Kind, int]
    failed_checks: int


class PromptReader:
    """Fills in a request's `prompt_tokens` and `cached_tokens`.

    A tokenizer that fails costs the request its count, not its answer; `failed` hears of it. The engine to ask is the
    one with the fewest `requests_on` it. `lora_of` names the adapter that a body asks for. A prompt that surely has
    fewer than `count_from_tokens` is left without a count.
    """

    def __init__(
        self,
        *,
        client: EngineClient,
        fleet: Callable[[], Fleet],
        index: PrefixIndex,
        requests_on: Callable[[Target], int],
        failed: Callable[[Target, UpstreamError], None],
        rng: random.Random,
        local: CheckedTokenizer | None = None,
        routed: RoutedPrefixes | None = None,
        lora_of: Callable[[Body], str | None] = lambda _: None,
        count_from_tokens: int = 0,
    ) -> None:
        self._client, self._fleet, self._index = client, fleet, index
        self._requests_on, self._failed, self._rng = requests_on, failed, rng
        self._local, self._routed, self._lora_of = local, routed, lora_of
        self._count_from_tokens = count_from_tokens
        self._pending = _PendingChains(_PENDING_BLOCKS)
        self._by_local = self._by_engine = self._skipped = self._uncounted = self._local_failed = 0

    async def read(self, request: InferenceRequest, body: Body) -> InferenceRequest:
        """Raises UpstreamRefused, with the engine's answer, for a prompt that no engine would take."""
        # The engine reads the prompt its endpoint is for, whatever else stands beside it.
        other = "prompt" if request.endpoint.endswith("/chat/completions") else "messages"
        asked = {key: value for key, value in body.items() if key != other}
        prompt = await self._local.prompt(asked) if self._local else None
        if prompt is not None and self._is_surely_short(prompt):
            self._skipped += 1
            return request
        ids = await self._local_ids(prompt) if prompt is not None else None
        if ids is None:
            ids = await self._engine_ids(asked)
        if ids is None:
            self._uncounted += 1
            return request
        return dataclasses.replace(request, prompt_tokens=len(ids), cached_tokens=self._cached(request.id, ids, body))

    def served(self, request_id: str, targets: Iterable[Target]) -> None:
        """`targets` hold the request's prompt now: those of both legs, once the decode leg has answered."""
        chains = self._pending.pop(request_id)
        if self._routed is None or not chains:
            return
        for target in targets:
            instance = self._fleet().instances.get(target.instance)
            if instance is not None and instance.kv_events is None:
                size = instance.fingerprint.block_size or GUESSED_BLOCK_SIZE
                self._routed.routed(target, chains.get(size, []), size)

    def stats(self) -> PromptStats:
        checked = self._local
        return PromptStats(
            local=self._by_local,
            engine=self._by_engine,
            skipped=self._skipped,
            failed=self._uncounted,
            local_failed=self._local_failed,
            mismatches={kind: checked.mismatches[kind] if checked else 0 for kind in Kind},
            failed_checks=checked.failed_checks if checked else 0,
        )

    def counts(self) -> Mapping[str, int]:
        """`stats` as metrics want it: names from the code."""
        stats = self.stats()
        found = {"local": stats.local, "engine": stats.engine, "skipped": stats.skipped, "failed": stats.failed}
        mismatches = {f"mismatch_{kind.value}": count for kind, count in stats.mismatches.items()}
        return {**found, "local_failed": stats.local_failed, "failed_checks": stats.failed_checks, **mismatches}

    # --- token ids ------------------------------------------------------------------------------------------

    def _is_surely_short(self, prompt: Prompt) -> bool:
        if self._local is None or not self._count_from_tokens:
            return False
        at_most_tokens = self._local.tokenizer.at_most_tokens(prompt)
        return at_most_tokens is not None and at_most_tokens < self._count_from_tokens

    async def _local_ids(self, prompt: Prompt) -> Sequence[int] | None:
        assert self._local is not None
        try:
            ids = await self._local.tokenizer.ids(prompt)
        except Exception:  # the tokenizers library raises Exception itself
            log.exception("our tokenizer failed on a prompt; an engine is asked for it")
            self._local_failed += 1
            return None
        self._by_local += 1
        return ids

    async def _engine_ids(self, asked: Body) -> Sequence[int] | None:
        for instance in self._engines():
            try:
                ids = await self._client.tokenize(instance.url, asked)
            except UpstreamRefused:
                raise
            except UpstreamError as exc:
                self._failed(Target(instance.id), exc)
                continue
            self._by_engine += 1
            return ids
        return None

    def _engines(self) -> list[Instance]:
        """The least busy first: every engine of a model has the same tokenizer."""
        ready = self._fleet().ready()
        self._rng.shuffle(ready)
        return sorted(ready, key=lambda instance: self._requests_on(Target(instance.id)))[:ENGINES_TO_ASK]

    # --- what is cached of them -----------------------------------------------------------------------------

    def _cached(self, request_id: str, ids: Sequence[int], body: Body) -> Mapping[Target, int]:
        """Tokens each target would find in its GPU cache. The last token is always computed: its logits are the
        answer's first token, so an engine that holds a whole prompt computes its last block anew."""
        salt, lora = value_of(body, "cache_salt"), self._lora_of(body)
        ready = self._fleet().ready()
        exact = {size for i in ready if i.kv_events and (size := i.fingerprint.block_size) is not None}
        guessed = {i.fingerprint.block_size or GUESSED_BLOCK_SIZE for i in ready if not i.kv_events}
        cached: dict[Target, int] = {}
        chains: Chains = {}
        for block_size in exact | (guessed if self._routed else set()):
            chain = token_hashes.chain(ids, block_size, salt=salt if isinstance(salt, str) else None, lora=lora)
            held: dict[Target, CachedTokens] = {}
            if self._routed and block_size in guessed:
                held |= self._routed.cached_tokens(chain, block_size)
                chains[block_size] = chain
            if block_size in exact:
                held |= self._index.cached_tokens(chain, block_size)
            usable = (len(ids) - 1) // block_size * block_size
            cached |= {target: tokens for target, kept in held.items() if (tokens := min(kept.gpu_tokens, usable))}
        if chains:
            self._pending.put(request_id, chains)
        return cached


def adapter_of(body: Body, adapters: Collection[str]) -> str | None:
    """The LoRA adapter that the body's `model` names."""
    model = value_of(body, "model")
    return model if isinstance(model, str) and model in adapters else None


class _PendingChains:
    """Of requests that are read and not yet served, the newest `max_blocks`."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._blocks = 0
        self._chains: OrderedDict[str, Chains] = OrderedDict()

    def put(self, request_id: str, chains: Chains) -> None:
        self.pop(request_id)
        self._chains[request_id] = chains
        self._blocks += _blocks(chains)
        while self._blocks > self._max_blocks:
            self._blocks -= _blocks(self._chains.popitem(last=False)[1])

    def pop(self, request_id: str) -> Chains | None:
        if chains := self._chains.pop(request_id, None):
            self._blocks -= _blocks(chains)
        return chains


def _blocks(chains: Chains) -> int:
    return 1 + sum(map(len, chains.values()))
