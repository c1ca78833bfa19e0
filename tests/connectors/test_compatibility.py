"""Which engines may exchange KV."""

from __future__ import annotations

import dataclasses

import pytest

from disagg_router.connectors.compatibility import fingerprint_from_args, incompatibility, merge, same_arithmetic
from disagg_router.errors import ConfigError
from disagg_router.model import Fingerprint
from tests.builders import FINGERPRINT


def changed(**fields) -> Fingerprint:
    return dataclasses.replace(FINGERPRINT, **fields)


def test_equal_engines_may():
    """Subject to the self-test."""
    assert incompatibility(FINGERPRINT, FINGERPRINT) is None


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("model", "/other/model"),
        ("revision", "v2"),
        ("vllm_version", "0.32.1"),
        ("dtype", "float16"),
        ("kv_dtype", "fp8"),
        ("block_size", 16),
        ("attention_backend", "FLASHINFER"),
        ("kv_layout", "HND"),
        ("connector", "nixl:push"),
        ("pipeline_parallel", 2),
    ],
)
def test_c21_a_difference_is_refused_by_name_with_both_values(field, other):
    """At registration, not at the first request."""
    reason = incompatibility(FINGERPRINT, changed(**{field: other}))
    assert reason == f"{field} differs: prefill {getattr(FINGERPRINT, field)}, decode {other}"


def test_what_is_not_known_is_refused():
    """Unknown means local only."""
    assert str(incompatibility(changed(dtype=None), FINGERPRINT)).startswith(
        "dtype of the prefill instance is not known"
    )
    assert str(incompatibility(FINGERPRINT, changed(block_size=None))).startswith("block_size of the decode instance")


def test_another_vllm_release_is_refused_with_a_named_reason():
    """Even when both sides run it: its handoff has not been tested."""
    newer = changed(vllm_version="0.33.0")
    assert "vllm_version 0.33.0" in str(incompatibility(newer, newer))


@pytest.mark.parametrize(
    ("prefill", "decode", "allowed", "exact"),
    [
        (1, 1, True, True),
        (4, 4, True, True),
        (2, 4, True, False),
        (1, 8, True, False),
        (4, 2, False, False),
        (2, 3, False, False),
    ],
)
def test_tensor_parallel_table(prefill, decode, allowed, exact):
    """A decode rank can read a part of a prefill rank's heads, not gather several."""
    p, d = changed(tensor_parallel=prefill), changed(tensor_parallel=decode)
    assert (incompatibility(p, d) is None) == allowed
    assert same_arithmetic(p, d) == exact


def test_a_fingerprint_is_read_off_the_command_line():
    """With or without dashes, underscores or not; what is left out is `auto`, except the block size."""
    args = {"block_size": 32, "--dtype": "bfloat16", "tensor-parallel-size": 4, "kv-cache-dtype": "fp8"}
    found = fingerprint_from_args(
        args, {"VLLM_KV_CACHE_LAYOUT": "HND"}, model="m", revision=None, connector="nixl:pull"
    )
    assert found == Fingerprint(
        model="m", revision="default", dtype="bfloat16", kv_dtype="fp8", block_size=32, attention_backend="auto",
        kv_layout="HND", connector="nixl:pull", tensor_parallel=4, pipeline_parallel=1,
    )  # fmt: skip
    bare = fingerprint_from_args({}, {}, model="m", revision="r", connector="nixl:pull")
    assert (bare.block_size, bare.dtype, bare.revision) == (None, "auto", "r")


def test_the_engine_fills_the_gaps_and_contradictions_are_named():
    """Neither side is believed over the other."""
    declared = Fingerprint(model="m", dtype="auto", block_size=32, connector="nixl:pull")
    merged, conflicts = merge(declared, Fingerprint(vllm_version="0.32.0", dtype=None, block_size=32))
    assert conflicts == ()
    assert (merged.vllm_version, merged.dtype, merged.block_size) == ("0.32.0", "auto", 32)
    merged, conflicts = merge(declared, Fingerprint(block_size=128))
    assert conflicts == ("block_size is declared as 32 but the engine reports 128",)
    assert (merged.block_size, merged.model) == (None, "m")


def test_a_size_that_is_no_number_is_a_mistake_of_the_file():
    """One sentence, not a traceback: a live fleet file may hold it."""
    with pytest.raises(ConfigError, match="block-size must be a whole number, not \\[32\\]"):
        fingerprint_from_args({"block-size": [32]}, {}, model="m", revision=None, connector="nixl:pull")
