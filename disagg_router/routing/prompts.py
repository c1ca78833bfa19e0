"""Prompt -> token ids -> what each target holds of them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping

from disagg_router.body import value_of
from disagg_router.errors import UpstreamError, UpstreamRefused
from disagg_router.interfaces import EngineClient
from disagg_router.model import Body, InferenceRequest, Instance, Target
from disagg_router.routing import token_hashes
from disagg_router.routing.fleet import Fleet
from disagg_router.routing.leases import LeaseBook
from disagg_router.routing.prefix_index import PrefixIndex

ENGINES_TO_ASK = 2


class PromptReader:
    """Fills in a request's `prompt_tokens` and `cached_tokens`.

    A tokenizer that fails costs the request its count, not its answer; `failed` hears of it.
    """

    def __init__(
        self,
        *,
        client: EngineClient,
        fleet: Callable[[], Fleet],
        index: PrefixIndex,
        leases: LeaseBook,
        failed: Callable[[Target, UpstreamError], None],
        rng: random.Random,
    ) -> None:
        self._client, self._fleet, self._index = client, fleet, index
        self._leases, self._failed, self._rng = leases, failed, rng

    async def read(self, request: InferenceRequest, body: Body) -> InferenceRequest:
        """Raises UpstreamRefused, with the engine's answer, for a prompt that no engine would take."""
        # The engine reads the prompt its endpoint is for, whatever else stands beside it.
        other = "prompt" if request.endpoint.endswith("/chat/completions") else "messages"
        asked = {key: value for key, value in body.items() if key != other}
        for instance in self._tokenizers():
            try:
                ids = await self._client.tokenize(instance.url, asked)
            except UpstreamRefused:
                raise
            except UpstreamError as exc:
                self._failed(Target(instance.id), exc)
                continue
            return dataclasses.replace(request, prompt_tokens=len(ids), cached_tokens=self._cached(ids, body))
        return request

    def _cached(self, ids: list[int], body: Body) -> Mapping[Target, int]:
        """Tokens each target would find in its GPU cache. The last token is always computed: its logits are the
        answer's first token, so an engine that holds a whole prompt computes its last block anew."""
        salt = value_of(body, "cache_salt")
        sizes = {size for instance in self._fleet().ready() if (size := instance.fingerprint.block_size) is not None}
        cached: dict[Target, int] = {}
        for block_size in sizes:
            usable = (len(ids) - 1) // block_size * block_size
            chain = token_hashes.chain(ids, block_size, salt=salt if isinstance(salt, str) else None)
            for target, held in self._index.cached_tokens(chain, block_size).items():
                if tokens := min(held.gpu_tokens, usable):
                    cached[target] = tokens
        return cached

    def _tokenizers(self) -> list[Instance]:
        """The least busy first: every engine of a model has the same tokenizer."""

        def busy(instance: Instance) -> int:
            return self._leases.load(Target(instance.id)).requests

        ready = self._fleet().ready()
        self._rng.shuffle(ready)
        return sorted(ready, key=busy)[:ENGINES_TO_ASK]
