"""Our own chained block keys over token ids: the same for every engine, whatever its hash algorithm or seed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

# All arithmetic is modulo 2**64. Odd factors: then a single token that differs always makes another key.
_STREAM = np.random.PCG64(0x6B76).random_raw(4097) | np.uint64(1)
_FACTORS, _STEP = _STREAM[:-1], int(_STREAM[-1])
_AT_ONCE = 1 << 16  # blocks
_POWERS = np.cumprod(np.full(_AT_ONCE, _STEP, dtype=np.uint64))
_INVERSES = np.cumprod(np.full(_AT_ONCE, pow(_STEP, -1, 1 << 64), dtype=np.uint64))
LARGEST_BLOCK = len(_FACTORS)


def root(*, salt: str | None, lora: str | None) -> int:
    """The key before block 0. vLLM takes an empty cache_salt for none, so do we."""
    named = ascii((lora, salt or None)).encode("ascii")  # quotes and escapes: no two pairs spell the same
    return int.from_bytes(blake2b(named, digest_size=8).digest(), "big")


def extend(parent: int, token_ids: Sequence[int], block_size: int) -> list[int]:
    """Keys of the full blocks of `token_ids` that follow `parent`; a last partial block has none.

    `key = parent * STEP + sum(FACTOR[i] * token[i])`, unrolled so that numpy does a whole prompt in a few calls: an
    array of 32,768 ids takes a quarter of what a hash call per block does (CPython's tuple hash, the fastest of those).
    The keys are equal in every process, and may change with a release: none is ever stored. They do not resist somebody
    who looks for collisions: all they would win is a wrong guess about caches. Blocks larger than LARGEST_BLOCK, which
    no engine has, get no keys.
    """
    blocks = len(token_ids) // block_size if 0 < block_size <= LARGEST_BLOCK else 0
    if not blocks:
        return []
    sums = _words(token_ids)[: blocks * block_size].reshape(blocks, block_size) @ _FACTORS[:block_size]
    keys: list[int] = []
    for start in range(0, blocks, _AT_ONCE):
        part = sums[start : start + _AT_ONCE]
        made = np.cumsum(part * _INVERSES[: len(part)])
        made += np.uint64(keys[-1] if keys else parent)
        made *= _POWERS[: len(part)]
        keys += made.tolist()
    return keys


def chain(token_ids: Sequence[int], block_size: int, *, salt: str | None = None, lora: str | None = None) -> list[int]:
    """Keys of a prompt's full blocks: each names its block and everything before it, under this salt and adapter."""
    return extend(root(salt=salt, lora=lora), token_ids, block_size)


def _words(token_ids: Sequence[int]) -> Words:
    if isinstance(token_ids, array):  # as our own tokenizer hands them on
        return np.frombuffer(token_ids, dtype=token_ids.typecode).astype(np.uint64)
    try:
        return np.array(token_ids, dtype=np.int64).astype(np.uint64)
    except OverflowError:  # what a client gives for token ids; an engine will refuse it
        return np.array([token & 0xFFFF_FFFF_FFFF_FFFF for token in token_ids], dtype=np.uint64)


def text_blocks(
    extra_keys: Sequence[Sequence[Any] | None] | None, lora: str | None, first: bool, blocks: int
) -> tuple[int, str | None]:
    """How many leading blocks depend on text, adapter and salt alone; and the salt, which only block 0 shows.

    `extra_keys` has an entry per block as vLLM publishes them: adapter name, (multimodal id, offset), salt, embeddings.
    """
    salt = None
    for index, keys in enumerate(extra_keys or ()):
        rest = list(keys or ())
        if lora in rest:
            rest.remove(lora)
        if index == 0 and first and len(rest) == 1 and isinstance(rest[0], str):
            salt = rest.pop()
        if rest:
            return index, salt
    return blocks, salt
