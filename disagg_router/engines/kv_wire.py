"""KV events as vLLM 0.32 sends them, and what each means to the prefix index."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from disagg_router.model import Target
from disagg_router.routing.holdings import EngineHash
from disagg_router.routing.prefix_index import PrefixIndex


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """`token_ids` may be empty for other media than GPU; `extra_keys` has an entry per block."""

    block_hashes: list[EngineHash]
    block_size: int
    token_ids: list[int] = []
    parent_block_hash: EngineHash | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    locality: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    pass


class ResetReason(StrEnum):
    """A metric label."""

    STARTED = "started"  # the stream tells everything from here on
    GAP = "gap"  # events were lost for good
    RESTARTED = "restarted"  # another process publishes there


@dataclass(frozen=True, slots=True)
class Reset:
    """Forget what the events so far have told."""

    reason: ResetReason


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared | Reset


@dataclass(frozen=True, slots=True)
class RankEvent:
    """`dp_rank` is the subscription's: what payloads and topics say of it is not to be trusted (C52)."""

    dp_rank: int
    event: KVEvent


def feed(index: PrefixIndex, target: Target, event: KVEvent) -> None:
    """Let `index` know; remote tiers are nobody's holding."""
    match event:
        case BlockStored(locality="REMOTE") | BlockRemoved(locality="REMOTE"):
            pass
        case BlockStored():
            index.stored(
                target,
                event.block_hashes,
                event.parent_block_hash,
                event.token_ids,
                event.block_size,
                medium=event.medium,
                lora=event.lora_name,
                extra_keys=event.extra_keys,
                group=event.group_idx,
                kind=event.kv_cache_spec_kind,
            )
        case BlockRemoved():
            index.removed(target, event.block_hashes, medium=event.medium, group=event.group_idx)
        case AllBlocksCleared():
            index.cleared(target)
        case Reset():
            index.forget(target)
