"""Which engines may exchange KV: fingerprints from command lines, and the table that compares them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from disagg_router.errors import ConfigError
from disagg_router.model import Fingerprint

SPLIT_VERSIONS = ("0.32.",)  # vLLM releases whose handoff has been tested; any other serves local only

# Fields that must be equal on both sides. NIXL's own handshake does not compare block sizes and then answers with
# another prompt's KV, so nothing here is left to it.
_EQUAL_FIELDS = (
    "connector",
    "vllm_version",
    "model",
    "revision",
    "dtype",
    "kv_dtype",
    "block_size",
    "attention_backend",
    "kv_layout",
    "pipeline_parallel",
)


def argument_name(spelt: str) -> str:
    """vLLM takes an argument with or without dashes in front, and with dashes or underscores in it."""
    return spelt.lstrip("-").replace("_", "-")


def fingerprint_from_args(
    args: Mapping[str, Any],
    env: Mapping[str, str],
    *,
    model: str | None,
    revision: str | None,
    connector: str,
) -> Fingerprint:
    """What a vLLM command line says. An argument left out is "auto" (or 1): equal on both sides means equal engines.

    `block_size` stays None unless it is given, since its default depends on the device; the engine reports it.
    Raises ConfigError for a size that is no number.
    """
    given = {argument_name(key): value for key, value in args.items()}

    def text(*names: str) -> str:
        return next((str(given[name]) for name in names if given.get(name) is not None), "auto")

    def number(*names: str) -> int:
        return next((_whole(name, given[name]) for name in names if given.get(name) is not None), 1)

    block_size = given.get("block-size")
    return Fingerprint(
        model=model,
        revision=revision or "default",
        dtype=text("dtype"),
        kv_dtype=text("kv-cache-dtype"),
        block_size=None if block_size is None else _whole("block-size", block_size),
        attention_backend=text("attention-backend"),
        kv_layout=env.get("VLLM_KV_CACHE_LAYOUT", "auto"),
        connector=connector,
        tensor_parallel=number("tensor-parallel-size", "tp"),
        pipeline_parallel=number("pipeline-parallel-size", "pp"),
    )


def _whole(name: str, value: object) -> int:
    try:
        return int(str(value))
    except ValueError as exc:
        raise ConfigError(f"engine argument {name} must be a whole number, not {value!r}") from exc


def merge(declared: Fingerprint, reported: Fingerprint) -> tuple[Fingerprint, tuple[str, ...]]:
    """What is known of an engine from both sources, and a sentence for each field in which they contradict each other.

    "auto" on either side gives way to the other's value. A contradicted field is unknown: nobody can tell which of
    the two is true.
    """
    values: dict[str, Any] = {}
    conflicts: list[str] = []
    for field in dataclasses.fields(Fingerprint):
        ours, theirs = getattr(declared, field.name), getattr(reported, field.name)
        if ours in (None, "auto") or theirs in (None, "auto"):
            values[field.name] = ours if theirs in (None, "auto") and ours is not None else theirs
        elif ours == theirs:
            values[field.name] = ours
        else:
            values[field.name] = None
            conflicts.append(f"{field.name} is declared as {ours} but the engine reports {theirs}")
    return Fingerprint(**values), tuple(conflicts)


def incompatibility(prefill: Fingerprint, decode: Fingerprint) -> str | None:
    """Why this pair must not exchange KV, naming the field and both values; None when it may be self-tested."""
    for name in _EQUAL_FIELDS:
        ours, theirs = getattr(prefill, name), getattr(decode, name)
        if ours is None or theirs is None:
            side = "prefill" if ours is None else "decode"
            return f"{name} of the {side} instance is not known: declare the engine's args"
        if ours != theirs:
            return f"{name} differs: prefill {ours}, decode {theirs}"
    if not str(prefill.vllm_version).startswith(SPLIT_VERSIONS):
        return f"vllm_version {prefill.vllm_version} is not one whose handoff was tested ({SPLIT_VERSIONS[0]}x)"
    return _parallelism(prefill.tensor_parallel, decode.tensor_parallel)


def _parallelism(prefill: int | None, decode: int | None) -> str | None:
    """NIXL lets a decode rank read a part of a prefill rank's heads, not gather several."""
    if prefill is None or decode is None:
        return "tensor_parallel is not known: declare the engine's args"
    if prefill > decode or decode % prefill:
        return f"tensor_parallel of prefill ({prefill}) must divide that of decode ({decode})"
    return None


def same_arithmetic(prefill: Fingerprint, decode: Fingerprint) -> bool:
    """Whether a self-test may ask for exact equality: equal parallelism sums in the same order."""
    return prefill.tensor_parallel == decode.tensor_parallel
