"""KV geometry: worked values, published models by hand arithmetic, and what must hold for every model."""

from __future__ import annotations

from collections import Counter

import pytest

from disagg_router.cost.geometry import (
    KVDtype,
    LayerKind,
    blocks,
    describe,
    from_config,
    from_numbers,
    transfer_floor_s,
)
from disagg_router.errors import ConfigError

BF16, FP8 = KVDtype.BF16, KVDtype.FP8
GIB = 2**30

# Only the fields of each published config.json that the geometry reads.
LLAMA_8B = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
LLAMA_70B = {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192}
LLAMA_2_7B = {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}
TINY = {  # the tests' own ./model
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"head_dim": 32, "hidden_size": 128},
}
DEEPSEEK_V3 = {
    **{"num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "hidden_size": 7168},
    **{"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
}
GEMMA_3_27B = {
    "model_type": "gemma3",
    "text_config": {
        **{"model_type": "gemma3_text", "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16},
        **{"head_dim": 128, "hidden_size": 5376, "sliding_window": 1024, "sliding_window_pattern": 6},
    },
    "vision_config": {"num_hidden_layers": 27, "num_attention_heads": 16, "hidden_size": 1152},
}
GEMMA_2_9B = {  # names no pattern: every second layer is full by the class's own rule
    **{"model_type": "gemma2", "num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8},
    **{"head_dim": 256, "hidden_size": 3584, "sliding_window": 4096},
}
MISTRAL_7B = {**LLAMA_8B, "model_type": "mistral", "sliding_window": 4096}
GPT_OSS_120B = {
    **{"model_type": "gpt_oss", "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8},
    **{"head_dim": 64, "hidden_size": 2880, "sliding_window": 128},
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}
FALCON_7B = {
    **{"num_hidden_layers": 32, "num_attention_heads": 71, "hidden_size": 4544},
    **{"multi_query": True, "new_decoder_architecture": False},
}
FALCON_40B = {  # the flag is still there and means nothing any more
    **{"num_hidden_layers": 60, "num_attention_heads": 128, "num_kv_heads": 8, "hidden_size": 8192},
    **{"multi_query": True, "new_decoder_architecture": True},
}
DBRX = {"n_layers": 40, "n_heads": 48, "d_model": 6144, "attn_config": {"kv_n_heads": 8}}
QWEN_2_5_7B = {
    **{"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584},
    **{"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28},
}
QWEN3_NEXT = {
    **{"num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256},
    **{"hidden_size": 2048, "full_attention_interval": 4},
}
JAMBA = {
    **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096},
    **{"attn_layer_period": 8, "attn_layer_offset": 4, "sliding_window": None},
}
ZAMBA_2 = {  # transformers' defaults: attention works on twice the hidden size
    **{"num_hidden_layers": 54, "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_size": 2560},
    **{"head_dim": 80, "attention_head_dim": 160, "layers_block_type": (["mamba"] * 5 + ["hybrid"]) * 9},
}
LLAMA_4_SCOUT = {
    "text_config": {
        **{"num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128},
        **{"hidden_size": 5120, "attention_chunk_size": 8192, "no_rope_layers": []},
    }
}
GEMMA_3N_E4B = {
    "text_config": {
        **{"model_type": "gemma3n_text", "num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 2},
        **{"head_dim": 256, "hidden_size": 2048, "sliding_window": 512, "num_kv_shared_layers": 15},
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    }
}
MODELS = {name: config for name, config in globals().items() if name.isupper() and isinstance(config, dict)}


@pytest.mark.parametrize(
    ("name", "first_token", "windows_full", "at_32768_tokens"),
    [
        ("LLAMA_8B", 32 * 8 * 2 * 128 * 2, 131_072, 4 * GIB),
        ("LLAMA_70B", 80 * 8 * 2 * 128 * 2, 327_680, 10 * GIB),
        ("LLAMA_2_7B", 32 * 32 * 2 * 128 * 2, 524_288, 16 * GIB),
        ("TINY", 2 * 2 * 2 * 32 * 2, 512, 16 * 2**20),
        ("DEEPSEEK_V3", 61 * 576 * 2, 70_272, 2_302_672_896),
        ("GEMMA_3_27B", 62 * 8_192, 10 * 8_192, 10 * 8_192 * 32_768 + 52 * 8_192 * 1_024),
        ("GEMMA_2_9B", 42 * 8_192, 21 * 8_192, 21 * 8_192 * (32_768 + 4_096)),
        ("MISTRAL_7B", 131_072, 0, 131_072 * 4_096),
        ("GPT_OSS_120B", 36 * 2_048, 18 * 2_048, 18 * 2_048 * (32_768 + 128)),
        ("FALCON_7B", 32 * 1 * 2 * 64 * 2, 8_192, 8_192 * 32_768),
        ("FALCON_40B", 60 * 8 * 2 * 64 * 2, 122_880, 122_880 * 32_768),
        ("DBRX", 40 * 8 * 2 * 128 * 2, 163_840, 163_840 * 32_768),
        ("QWEN_2_5_7B", 28 * 4 * 2 * 128 * 2, 57_344, 57_344 * 32_768),
        ("QWEN3_NEXT", 12 * 2 * 2 * 256 * 2, 24_576, 24_576 * 32_768),
        ("JAMBA", 4 * 8 * 2 * 128 * 2, 16_384, 16_384 * 32_768),
        ("ZAMBA_2", 9 * 32 * 2 * 160 * 2, 184_320, 184_320 * 32_768),
        ("LLAMA_4_SCOUT", 48 * 4_096, 12 * 4_096, 12 * 4_096 * 32_768 + 36 * 4_096 * 8_192),
        ("GEMMA_3N_E4B", 20 * 2_048, 4 * 2_048, 4 * 2_048 * 32_768 + 16 * 2_048 * 512),
    ],
)
def test_published_models(name, first_token, windows_full, at_32768_tokens):
    """bf16, unsharded: the first token, one more when every window is full, and 32,768 tokens."""
    geometry = from_config(MODELS[name], dtype=BF16)
    assert geometry.bytes_per_token() == first_token
    assert geometry.unbounded_bytes_per_token == windows_full
    assert geometry.bytes_for(32_768) == at_32768_tokens


def test_worked_values():
    """The figures every document of this project quotes."""
    big, small = from_numbers(80, 8, 128, BF16), from_numbers(32, 8, 128, BF16)
    assert big.bytes_per_token() == 327_680
    assert (big.bytes_for(8_192), big.bytes_for(32_768)) == (2.5 * GIB, 10 * GIB)
    assert round(small.bytes_for(32_768) / 1e9, 2) == 4.29
    assert transfer_floor_s(big.bytes_for(8_192), 100) == pytest.approx(0.215, abs=0.0005)
    assert big == from_config(LLAMA_70B, dtype=BF16)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("LLAMA_8B", {LayerKind.FULL: 32}),
        ("MISTRAL_7B", {LayerKind.SLIDING: 32}),
        ("GEMMA_3_27B", {LayerKind.SLIDING: 52, LayerKind.FULL: 10}),
        ("QWEN3_NEXT", {LayerKind.NO_KV: 36, LayerKind.FULL: 12}),
        ("LLAMA_4_SCOUT", {LayerKind.CHUNKED: 36, LayerKind.FULL: 12}),
        ("GEMMA_3N_E4B", {LayerKind.SLIDING: 16, LayerKind.FULL: 4, LayerKind.NO_KV: 15}),
    ],
)
def test_layers_are_grouped_by_what_they_keep(name, kinds):
    """One group a kind; together they are all layers."""
    assert {group.kind: group.layers for group in from_config(MODELS[name], dtype=BF16).groups} == kinds


FOUR_LAYERS = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512}
WINDOW = {"sliding_window": 16}


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({"hybrid_override_pattern": "M-*M"}, {"full": 1, "no_kv": 3}),
        ({"attn_type_list": [0, 1, 0, 1]}, {"full": 2, "no_kv": 2}),
        ({"attn_layer_indices": [3]}, {"full": 1, "no_kv": 3}),
        ({"full_attn_idxs": [1, 2, 3]}, {"full": 3, "no_kv": 1}),
        ({"linear_attn_config": {"full_attn_layers": [4]}}, {"full": 1, "no_kv": 3}),
        ({"layers_block_type": ["mamba", "hybrid", "mamba", "attention"]}, {"full": 2, "no_kv": 2}),
        ({"layer_types": ["conv", "full_attention", "linear_attention", "mamba"]}, {"full": 1, "no_kv": 3}),
        ({**WINDOW, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}, {"sliding": 3, "full": 1}),
        ({**WINDOW, "sliding_window_pattern": "LLG"}, {"sliding": 3, "full": 1}),
        ({**WINDOW, "sliding_window_pattern": 1}, {"full": 4}),
        ({**WINDOW, "max_window_layers": 3, "use_sliding_window": True}, {"full": 3, "sliding": 1}),
        ({**WINDOW, "max_window_layers": 3}, {"full": 4}),
        ({"sliding_window": None}, {"full": 4}),
        ({"sliding_window": 0, "model_type": "gemma2"}, {"full": 4}),
        ({"attention_chunk_size": 16, "no_rope_layers": [1, 0, 1, 0]}, {"chunked": 2, "full": 2}),
        ({"num_kv_shared_layers": 1}, {"full": 3, "no_kv": 1}),
    ],
)
def test_the_fields_that_say_which_layer_keeps_what(fields, kinds):
    """Each family's own spelling, on four layers."""
    groups = from_config({**FOUR_LAYERS, **fields}, dtype=BF16).groups
    assert Counter({group.kind.value: group.layers for group in groups}) == kinds


def test_global_layers_of_another_shape():
    """Gemma 4: global_head_dim, and num_global_key_value_heads where attention_k_eq_v says so."""
    fields = {**FOUR_LAYERS, **WINDOW, "head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 1}
    types = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
    plain = from_config({**fields, **types}, dtype=BF16)
    shared = from_config({**fields, **types, "attention_k_eq_v": True}, dtype=BF16)
    assert plain.bytes_per_token() == (3 * 2 * 256 + 2 * 512) * 2 * 2
    assert shared.bytes_per_token() == (3 * 2 * 256 + 1 * 512) * 2 * 2


@pytest.mark.parametrize(
    ("name", "tp", "per_rank", "handed_off"),
    [
        ("LLAMA_70B", 1, 327_680, 327_680),
        ("LLAMA_70B", 4, 81_920, 327_680),
        ("LLAMA_70B", 8, 40_960, 327_680),
        ("LLAMA_70B", 16, 40_960, 655_360),  # two ranks a head
        ("FALCON_7B", 4, 8_192, 32_768),
        ("DEEPSEEK_V3", 8, 70_272, 562_176),  # every rank holds the whole latent
        ("GEMMA_3_27B", 4, 126_976, 507_904),
        ("QWEN3_NEXT", 4, 12_288, 49_152),  # layers without KV stay without
    ],
)
def test_tensor_parallel_ranks(name, tp, per_rank, handed_off):
    """Heads are dealt out until there is one a rank, then they are replicated; distinct bytes never change."""
    geometry = from_config(MODELS[name], dtype=BF16)
    assert geometry.bytes_per_rank(1_000, tp) == per_rank * 1_000
    assert geometry.handoff_bytes(1_000, tp) == handed_off * 1_000
    assert geometry.bytes_for(1_000) <= geometry.handoff_bytes(1_000, tp)


@pytest.mark.parametrize(
    ("tokens", "block_size", "full_blocks", "window_blocks"),
    [
        (0, 16, 0, 0),
        (1, 16, 1, 1),
        (16, 16, 1, 1),
        (17, 16, 2, 2),
        (128, 16, 8, 8),
        (200, 16, 13, 9),  # 128 tokens fill 8 blocks, or touch 9
        (32_768, 16, 2_048, 9),
        (32_768, 128, 256, 2),
    ],
)
def test_blocks(tokens, block_size, full_blocks, window_blocks):
    """gpt-oss, 18 layers of each kind at 2,048 bytes a token: rounding is up, and a window costs one block more."""
    geometry = from_config(GPT_OSS_120B, dtype=BF16)
    assert blocks(tokens, block_size) == full_blocks
    rounded_bytes = 18 * 2_048 * block_size * (full_blocks + window_blocks)
    assert geometry.block_bytes_for(tokens, block_size) == rounded_bytes
    assert geometry.block_bytes_for(tokens, block_size, tp=8) * 8 == rounded_bytes


def test_without_the_hybrid_cache_manager_windows_keep_everything():
    """Then every attention layer costs what a full one does."""
    geometry = from_config(GEMMA_3_27B, dtype=BF16).unwindowed()
    assert geometry.unbounded_bytes_per_token == geometry.bytes_per_token() == 507_904
    assert geometry.bytes_for(32_768) == 507_904 * 32_768


@pytest.mark.parametrize("name", MODELS)
def test_what_holds_for_every_model(name):
    """Monotone in tokens, the sum of its tokens, never more than unwindowed or rounded; fp8 half, fp32 double."""
    by_dtype = {dtype: from_config(MODELS[name], dtype=dtype) for dtype in KVDtype}
    geometry = by_dtype[BF16]
    assert geometry.bytes_for(0) == geometry.block_bytes_for(0, 16) == 0
    assert sum(geometry.bytes_per_token(held) for held in range(600)) == geometry.bytes_for(600)
    lengths = [0, 1, 127, 128, 129, 1_023, 1_024, 1_025, 4_096, 8_193, 131_072]
    for measure in (
        geometry.bytes_for,
        lambda tokens: geometry.block_bytes_for(tokens, 16),
        lambda tokens: geometry.bytes_per_rank(tokens, 4),
    ):
        found = [measure(tokens) for tokens in lengths]
        assert found == sorted(found)
    for tokens in lengths:
        exact = geometry.bytes_for(tokens)
        assert exact <= min(geometry.unwindowed().bytes_for(tokens), geometry.block_bytes_for(tokens, 16))
        assert exact == 2 * by_dtype[FP8].bytes_for(tokens) == by_dtype[KVDtype.FP16].bytes_for(tokens)
        assert 2 * exact == by_dtype[KVDtype.FP32].bytes_for(tokens)


def test_describe_is_what_the_command_prints():
    """The contract's three keys; no link, no floor."""
    geometry = from_numbers(80, 8, 128, FP8)
    assert describe(geometry, 8_192) == {
        "bytes_per_token": 163_840,
        "bytes": 1.25 * GIB,
        "transfer_floor_s": None,
    }
    assert describe(geometry, 8_192, 100)["transfer_floor_s"] == pytest.approx(0.10737, abs=1e-5)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({}, "num_hidden_layers"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers '32'"),
        ({**FOUR_LAYERS, "num_hidden_layers": True}, "num_hidden_layers True"),
        ({**FOUR_LAYERS, "num_hidden_layers": -4}, "num_hidden_layers -4"),
        ({"num_hidden_layers": 4}, "num_key_value_heads"),
        ({"num_hidden_layers": 4, "num_attention_heads": 8}, "hidden_size"),
        ({**FOUR_LAYERS, "head_dim": 64.5}, "head_dim 64.5"),
        ({**DEEPSEEK_V3, "qk_rope_head_dim": None}, "qk_rope_head_dim"),
        ({**FOUR_LAYERS, "layer_types": ["full_attention"] * 3}, "3 layer types for 4 layers"),
        ({**FOUR_LAYERS, "layer_types": ["new_attention"] * 4}, "new_attention"),
        ({**FOUR_LAYERS, "layer_types": 4}, "layer_types"),
        ({**FOUR_LAYERS, "layer_types": ["sliding_attention"] * 4}, "sliding_window"),
        ({**FOUR_LAYERS, "sliding_window": [16]}, "sliding_window [16]"),
        ({**FOUR_LAYERS, **WINDOW, "sliding_window_pattern": [1]}, "sliding_window_pattern [1]"),
        ({**FOUR_LAYERS, "attn_layer_period": 2}, "attn_layer_period"),
        ({**FOUR_LAYERS, "hybrid_override_pattern": "M*"}, "hybrid_override_pattern"),
        ({**FOUR_LAYERS, "attention_chunk_size": 16, "no_rope_layers": [1]}, "attention pattern"),
        ({**FOUR_LAYERS, "block_configs": [{}]}, "block_configs"),
        ({**DEEPSEEK_V3, "index_head_dim": 128}, "index_head_dim"),
        ({"text_config": {"num_hidden_layers": 4}}, "num_key_value_heads"),
    ],
)
def test_a_config_that_does_not_say_enough(config, named):
    """One sentence that names the field and says what to do; never a guess."""
    with pytest.raises(ConfigError) as raised:
        from_config(config, dtype=BF16)
    assert named in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("layers", "kv_heads", "head_dim"), [(0, 8, 128), (80, 0, 128), (80, 8, -1)])
def test_numbers_below_one(layers, kv_heads, head_dim):
    """They are wrong use, not an empty cache."""
    with pytest.raises(ConfigError, match="at least 1"):
        from_numbers(layers, kv_heads, head_dim, BF16)


@pytest.mark.parametrize("gbit_per_s", [0, -1])
def test_a_link_that_moves_nothing(gbit_per_s):
    """A floor of infinity would be no JSON."""
    with pytest.raises(ConfigError, match="above 0"):
        transfer_floor_s(1, gbit_per_s)
