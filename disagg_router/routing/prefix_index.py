"""Which target holds which prefix, in which tier, as far as the engines' KV events tell."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from disagg_router.model import Target
from disagg_router.routing import token_hashes
from disagg_router.routing.holdings import GPU, HOST, Block, EngineHash, Holder


class Dropped(StrEnum):
    """Why blocks of an event were left out; a metric label."""

    UNKNOWN_PARENT = "unknown_parent"  # what they follow was itself left out, evicted here, or never heard of
    UNKNOWN_HASH = "unknown_hash"  # announced without tokens, and not known from before
    NOT_TEXT = "not_text"  # they hold images, audio or embeddings, which our keys cannot name
    SPARSE_GROUP = "sparse_group"  # sliding window, mamba, ...: holding a block does not mean holding what precedes it
    BLOCK_SIZE = "block_size"  # not the one of the target's GPU blocks
    MEDIUM = "medium"  # shared stores and remote tiers
    RENAMED = "renamed"  # the target holds this content under another hash, or other content under this one
    MALFORMED = "malformed"  # token, block and key counts do not fit


class CachedTokens(NamedTuple):
    """The longest prefix in GPU memory, and how far host memory carries on from there."""

    gpu_tokens: int
    host_tokens: int


@dataclass(frozen=True, slots=True)
class IndexStats:
    """`entries` are (target, block) couples: what `max_entries` bounds. `stored` > 0 with no `hits` over many
    `lookups` means that keys do not meet."""

    entries: int
    blocks: int
    gappy_targets: int  # whose holdings are no whole prefixes: lookups walk for them
    evictions: int  # entries given up for want of room
    stored: int  # blocks taken over from events, copies included
    lookups: int
    hits: int
    dropped: Mapping[Dropped, int]


class PrefixIndex:
    """Longest cached prefix per target. No I/O, no clock; the same calls give the same answers.

    Exact for the events it was fed, so it never promises more than they said, with these known exceptions: an
    engine that announces reused blocks once more (`kv_cache_report_mode: full` in a request) is believed to hold a
    further copy; under a reloaded adapter of the same name old blocks count as new ones; in a model with sparse
    layer groups the engine may have to recompute although its full-attention blocks are there.
    """

    def __init__(self, max_entries: int) -> None:
        """About 450 bytes per entry when every block is unique, less for shared ones."""
        self._max_entries = max_entries
        self._blocks: dict[int, Block] = {}
        self._leaves: OrderedDict[Block, None] = OrderedDict()  # least recently used first
        self._holders: dict[Target, Holder] = {}
        self._by_bit: dict[int, Holder] = {}
        self._entries = self._evictions = self._stored = self._lookups = self._hits = 0
        self._dropped: Counter[Dropped] = Counter()

    # --- events ---------------------------------------------------------------------------------------------

    def stored(
        self,
        target: Target,
        engine_hashes: Sequence[EngineHash],
        parent_engine_hash: EngineHash | None,
        token_ids: Sequence[int],
        block_size: int,
        *,
        medium: str | None = GPU,
        lora: str | None = None,
        extra_keys: Sequence[Sequence[Any] | None] | None = None,
        group: int | None = None,
        kind: str | None = None,
    ) -> None:
        """`extra_keys` has one entry per block, as vLLM publishes them: adapter, (multimodal id, offset), salt."""
        holder = self._holders.get(target) or self._new_holder(target)
        medium, blocks = medium or GPU, len(engine_hashes)
        if medium not in (GPU, HOST):
            self._dropped[Dropped.MEDIUM] += blocks
        elif not holder.makes_prefixes(group, kind):
            self._dropped[Dropped.SPARSE_GROUP] += blocks
        elif not token_ids:
            for name in engine_hashes:
                if block := holder.blocks.get(name):
                    self._gain(holder, block, name, medium)
                else:
                    self._dropped[Dropped.UNKNOWN_HASH] += 1
        elif block_size < 1 or len(token_ids) != blocks * block_size or len(extra_keys or engine_hashes) != blocks:
            self._dropped[Dropped.MALFORMED] += blocks
        elif block_size != (holder.block_size or (block_size if medium == GPU else None)):
            self._dropped[Dropped.BLOCK_SIZE] += blocks
        else:
            holder.block_size = block_size
            text, salt = token_hashes.text_blocks(extra_keys, lora, parent_engine_hash is None, blocks)
            self._dropped[Dropped.NOT_TEXT] += blocks - text
            parent = None if parent_engine_hash is None else holder.blocks.get(parent_engine_hash)
            if parent is None and parent_engine_hash is not None:
                self._dropped[Dropped.UNKNOWN_PARENT] += text
                return
            start = parent.key if parent else token_hashes.root(salt=salt, lora=lora)
            keys = token_hashes.extend(start, token_ids[: text * block_size], block_size)
            self._extend(holder, parent, list(zip(keys, engine_hashes, strict=False)), medium)

    def removed(
        self, target: Target, engine_hashes: Iterable[EngineHash], *, medium: str | None = GPU, group: int | None = None
    ) -> None:
        holder = self._holders.get(target)
        medium = medium or GPU
        if holder is None or medium not in (GPU, HOST) or not holder.makes_prefixes(group, None):
            return
        for name in engine_hashes:
            block = holder.blocks.get(name)
            if block is None:
                continue
            if medium == HOST:
                holder.lose_host(block)
            elif more := holder.copies.pop(block, 0):
                if more > 1:
                    holder.copies[block] = more - 1
            else:
                holder.lose_gpu(block)
            self._release(holder, block)

    def cleared(self, target: Target) -> None:
        """All tiers: vLLM does not say which one it cleared."""
        if holder := self._holders.get(target):
            self._entries -= len(holder.blocks)
            for block in holder.blocks.values():
                block.gpu &= ~holder.bit
                block.host &= ~holder.bit
                self._prune(block)
            holder.clear()

    def forget(self, target: Target) -> None:
        """The target is gone or is another process: takes as long as it held blocks, no longer."""
        self.cleared(target)
        if holder := self._holders.pop(target, None):
            del self._by_bit[holder.bit]

    # --- lookup ---------------------------------------------------------------------------------------------

    def cached_tokens(self, chain: Sequence[int], block_size: int) -> Mapping[Target, CachedTokens]:
        """For the chain of one prompt (`token_hashes.chain`): every target of that block size that holds a start of it.

        Counts as a use of the prefix found. Costs a bisection per distinct depth; a walk along the chain, shared by
        all of them, for targets that hold its continuation in host memory or whose holdings have gaps.
        """
        self._lookups += 1
        first = self._blocks.get(chain[0]) if chain else None
        if first is None:
            return {}
        whole = gappy = hosting = 0
        for bit in _bits(first.gpu | first.host):
            holder = self._by_bit[bit]
            if holder.orphans:
                gappy |= bit
            else:
                whole |= bit
            if holder.host_blocks:
                hosting |= bit
        gpu = _per_bit([*self._bisect(chain, whole), *self._walk(chain, [(0, gappy)], GPU)])
        carried_on = self._walk(chain, sorted((depth, bit) for bit, depth in gpu.items() if bit & hosting), HOST)
        ends = gpu | _per_bit(carried_on)
        if deepest := max(ends.values(), default=0):
            self._hits += 1
            self._touch(self._blocks[chain[deepest - 1]])
        return {
            self._by_bit[bit].target: CachedTokens(gpu[bit] * block_size, (end - gpu[bit]) * block_size)
            for bit, end in ends.items()
            if end
        }

    def stats(self) -> IndexStats:
        return IndexStats(
            entries=self._entries,
            blocks=len(self._blocks),
            gappy_targets=sum(holder.orphans > 0 for holder in self._holders.values()),
            evictions=self._evictions,
            stored=self._stored,
            lookups=self._lookups,
            hits=self._hits,
            dropped={reason: self._dropped[reason] for reason in Dropped},
        )

    def _bisect(self, chain: Sequence[int], targets: int) -> list[tuple[int, int]]:
        """(depth, targets whose GPU prefix ends there), for targets that hold whole prefixes."""
        ends = []
        open_ranges = [(0, len(chain), targets)]
        while open_ranges:
            low, high, mask = open_ranges.pop()
            if low == high:
                ends.append((low, mask))
                continue
            middle = (low + high + 1) // 2
            block = self._blocks.get(chain[middle - 1])
            deeper = mask & block.gpu if block else 0
            if deeper:
                open_ranges.append((middle, high, deeper))
            if deeper != mask:
                open_ranges.append((low, middle - 1, mask & ~deeper))
        return ends

    def _walk(self, chain: Sequence[int], starts: Sequence[tuple[int, int]], medium: str) -> list[tuple[int, int]]:
        """(depth, targets whose blocks in `medium` end there), each looked at from its own start on; starts ascend."""
        ends = []
        alive = 0
        for place, (start, targets) in enumerate(starts):
            alive |= targets
            stop = starts[place + 1][0] if place + 1 < len(starts) else len(chain)
            for depth, block in enumerate(map(self._blocks.get, chain[start:stop] if alive else ()), start):
                held = 0 if block is None else block.gpu if medium == GPU else block.host
                if alive & held != alive:
                    ends.append((depth, alive & ~held))
                    alive &= held
                    if not alive:
                        break
        return [*ends, (len(chain), alive)]

    # --- bookkeeping ----------------------------------------------------------------------------------------

    def _new_holder(self, target: Target) -> Holder:
        bit = next(bit for slot in range(len(self._by_bit) + 1) if (bit := 1 << slot) not in self._by_bit)
        holder = self._holders[target] = self._by_bit[bit] = Holder(target, bit)
        return holder

    def _extend(
        self, holder: Holder, tail: Block | None, named_keys: Sequence[tuple[int, EngineHash]], medium: str
    ) -> None:
        for done, (key, name) in enumerate(named_keys):
            block = self._blocks.get(key)
            if not holder.may_call(block, name):
                self._dropped[Dropped.RENAMED] += len(named_keys) - done
                break
            tail = block or self._new_block(key, tail, name)
            self._gain(holder, tail, name, medium)
        if tail:
            self._touch(tail)
        self._make_room()

    def _new_block(self, key: int, parent: Block | None, name: EngineHash) -> Block:
        block = self._blocks[key] = Block(key, parent, name)
        self._leaves[block] = None
        if parent:
            parent.children += 1
            self._leaves.pop(parent, None)
        return block

    def _gain(self, holder: Holder, block: Block, name: EngineHash, medium: str) -> None:
        if not (block.gpu | block.host) & holder.bit:
            holder.blocks[name] = block
            self._entries += 1
            if name != block.name:
                holder.renamed[block] = name
        self._stored += 1
        if medium == GPU:
            holder.gain_gpu(block)
        else:
            holder.gain_host(block)

    def _release(self, holder: Holder, block: Block) -> None:
        if not (block.gpu | block.host) & holder.bit:
            del holder.blocks[holder.renamed.pop(block, block.name)]
            self._entries -= 1
            self._prune(block)

    def _prune(self, block: Block | None) -> None:
        """Take out what nobody holds and nothing follows, upwards."""
        while block and not block.gpu and not block.host and not block.children:
            del self._blocks[block.key]
            self._leaves.pop(block, None)
            block = block.parent
            if block:
                block.children -= 1
                if not block.children:
                    self._leaves[block] = None
                    self._leaves.move_to_end(block, last=block.used)
                    block.used = False

    def _touch(self, block: Block) -> None:
        """A leaf is used; what precedes it goes after it anyway."""
        if block.children:
            block.used = True
        else:
            self._leaves.move_to_end(block)

    def _make_room(self) -> None:
        """Blocks that nobody holds are kept for what follows them, and count as well."""
        while max(self._entries, len(self._blocks)) > self._max_entries:
            block, _ = self._leaves.popitem(last=False)
            for bit in _bits(block.gpu | block.host):
                holder = self._by_bit[bit]
                holder.lose_gpu(block)
                holder.lose_host(block)
                self._evictions += 1
                del holder.blocks[holder.renamed.pop(block, block.name)]
                self._entries -= 1
            self._prune(block)


def _bits(mask: int) -> Iterable[int]:
    while mask:
        yield mask & -mask
        mask &= mask - 1


def _per_bit(depths: Iterable[tuple[int, int]]) -> dict[int, int]:
    return {bit: depth for depth, mask in depths for bit in _bits(mask)}
