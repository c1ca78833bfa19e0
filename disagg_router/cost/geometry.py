"""How many bytes of KV a model keeps: arithmetic on the fields of a Hugging Face config.json, no I/O."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from disagg_router.errors import ConfigError

HFConfig = Mapping[str, Any]  # a parsed config.json, or the part of one that describes the text model


class KVDtype(StrEnum):
    """The element type of the KV cache, which need not be the weights' type."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    FP32 = "fp32"

    @property
    def element_bytes(self) -> int:
        return {"fp8": 1, "fp32": 4}.get(self.value, 2)


class LayerKind(StrEnum):
    """What a layer does with the KV of old tokens."""

    FULL = "full"  # keeps every token
    SLIDING = "sliding"  # keeps the last `sliding_window` tokens
    CHUNKED = "chunked"  # keeps the current `attention_chunk_size` tokens at most
    NO_KV = "no_kv"  # Mamba, linear attention, convolution, MLP, or a layer that reads another layer's KV


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that keep the same: `kv_heads` x `head_elements` elements for each of at most `window_tokens` tokens.

    GQA, MHA, MQA: head_elements = 2 * head_dim, one K and one V vector. MLA: one head of kv_lora_rank +
    qk_rope_head_dim, the latent that K and V are both made from. A window of None never drops a token.
    """

    kind: LayerKind
    layers: int
    kv_heads: int
    head_elements: int
    window_tokens: int | None = None

    def elements_per_token(self, tp: int) -> int:
        """On each rank: the heads are dealt out, and with more ranks than heads each rank holds a whole one."""
        return self.layers * math.ceil(self.kv_heads / tp) * self.head_elements

    def kept_tokens(self, tokens: int) -> int:
        return tokens if self.window_tokens is None else min(tokens, self.window_tokens)

    def kept_blocks(self, tokens: int, block_size: int) -> int:
        """At most: a full window that does not start with a block touches one more (vLLM counts it always)."""
        held = blocks(tokens, block_size)
        return held if self.window_tokens is None else min(held, blocks(self.window_tokens, block_size) + 1)


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """What one sequence keeps in the KV cache, for all ranks or for one of `tp` tensor-parallel ranks.

    The constant state of Mamba and linear-attention layers is counted as zero: config.json does not fix its
    layout, and it does not grow with the prompt. A chunked layer starts anew at each chunk; the figures are
    its upper bound. Where `tp` does not divide the KV heads (vLLM refuses that) they are the fullest rank's.
    """

    groups: tuple[LayerGroup, ...]
    dtype: KVDtype

    def bytes_per_token(self, held_tokens: int = 0) -> int:
        """What one more token adds to a sequence of `held_tokens`: a layer whose window is full adds nothing."""
        return self.bytes_for(held_tokens + 1) - self.bytes_for(held_tokens)

    @property
    def unbounded_bytes_per_token(self) -> int:
        """What one more token adds once every window is full."""
        return self.bytes_per_token(max((group.window_tokens or 0 for group in self.groups), default=0))

    def bytes_for(self, tokens: int) -> int:
        """Every distinct byte of a sequence, counted once, not rounded to blocks."""
        return self.bytes_per_rank(tokens, tp=1)

    def bytes_per_rank(self, tokens: int, tp: int) -> int:
        elements = sum(group.elements_per_token(tp) * group.kept_tokens(tokens) for group in self.groups)
        return elements * self.dtype.element_bytes

    def handoff_bytes(self, tokens: int, decode_tp: int) -> int:
        """What crosses the link in a pull: each decode rank reads all it will hold, also what another one reads."""
        return decode_tp * self.bytes_per_rank(tokens, decode_tp)

    def block_bytes_for(self, tokens: int, block_size: int, tp: int = 1) -> int:
        """`bytes_per_rank` with every layer rounded up to whole blocks: what an engine has to set aside."""
        kept = (group.elements_per_token(tp) * group.kept_blocks(tokens, block_size) for group in self.groups)
        return sum(kept) * block_size * self.dtype.element_bytes

    def unwindowed(self) -> KVGeometry:
        """The same model on an engine without the hybrid KV cache manager: windowed layers keep every token too."""
        return KVGeometry(tuple(dataclasses.replace(group, window_tokens=None) for group in self.groups), self.dtype)


def blocks(tokens: int, block_size: int) -> int:
    return math.ceil(tokens / block_size)


def transfer_floor_s(moved_bytes: int, gbit_per_s: float) -> float:
    """The time the bits take on a link of `gbit_per_s` (decimal) and nothing else. Raises ConfigError."""
    if gbit_per_s <= 0:
        raise ConfigError(f"a link of {gbit_per_s} Gbit/s moves nothing: give a number above 0")
    return moved_bytes * 8 / (gbit_per_s * 1e9)


def describe(geometry: KVGeometry, tokens: int, gbit_per_s: float | None = None) -> dict[str, float | None]:
    """What `disagg-router kv` prints: a sequence's first token, the whole of it, and its way over a link."""
    total_bytes = geometry.bytes_for(tokens)
    floor_s = None if gbit_per_s is None else transfer_floor_s(total_bytes, gbit_per_s)
    return {"bytes_per_token": geometry.bytes_per_token(), "bytes": total_bytes, "transfer_floor_s": floor_s}


def from_numbers(layers: int, kv_heads: int, head_dim: int, dtype: KVDtype) -> KVGeometry:
    """`layers` equal layers of full attention. Raises ConfigError for a number below 1."""
    if min(layers, kv_heads, head_dim) < 1:
        raise ConfigError(f"layers {layers}, KV heads {kv_heads} and head dim {head_dim} must all be at least 1")
    return KVGeometry((LayerGroup(LayerKind.FULL, layers, kv_heads, 2 * head_dim),), dtype)


def from_config(config: HFConfig, *, dtype: KVDtype) -> KVGeometry:
    """The geometry of a parsed config.json. Raises ConfigError when it does not say enough, or too much."""
    text = _text_part(config)
    for field in _REFUSED:
        if text.get(field):
            raise ConfigError(f"config.json has {field}, whose KV layout is not known here: {_INSTEAD}")
    layers = _number(text, *_LAYERS)
    kinds = _layer_kinds(text, layers)
    if len(kinds) != layers:
        raise ConfigError(f"config.json lists {len(kinds)} layer types for {layers} layers: correct one of them")
    owners = layers - _number(text, "num_kv_shared_layers", default=0)  # Gemma 3n: the last ones own no KV
    counted = Counter(kind if i < owners else LayerKind.NO_KV for i, kind in enumerate(kinds))
    return KVGeometry(tuple(_group(text, kind, count) for kind, count in counted.items()), dtype)


_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_HEAD_DIM = ("attention_head_dim", "head_dim", "hidden_size_per_head", "kv_channels")  # Zamba 2 gives two: the first
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", "kv_n_heads")
_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
_INSTEAD = "use the model's full config.json, or give layers, KV heads and head dim as numbers"
# Layers with shapes of their own, caches beside K and V, or layers that share KV: a guess would be wrong by factors.
_REFUSED = (
    *("block_configs", "per_layer_config", "compress_ratios", "index_head_dim", "use_cla", "is_encoder_decoder"),
    *("hybrid_layer_pattern", "swa_num_key_value_heads", "attention_other_setting", "block_types"),
)
_KINDS = {
    **dict.fromkeys(("full_attention", "attention", "hybrid"), LayerKind.FULL),  # hybrid: attention beside Mamba
    **dict.fromkeys(("sliding_attention", "hybrid_sliding"), LayerKind.SLIDING),
    "chunked_attention": LayerKind.CHUNKED,
    **dict.fromkeys(("linear_attention", "mamba", "mamba2", "conv", "moe", "mlp"), LayerKind.NO_KV),
}
# Hybrids older than `layer_types`: the field, and whether layer i attends given the field's value.
_ATTENDS: Mapping[str, Callable[[HFConfig, Any, int], bool]] = {
    "hybrid_override_pattern": lambda _, pattern, i: pattern[i] == "*",  # Nemotron-H
    "attn_type_list": lambda _, types, i: types[i] == 1,  # MiniMax
    "full_attention_interval": lambda _, interval, i: (i + 1) % interval == 0,  # Qwen3-Next
    "attn_layer_period": lambda text, period, i: i % period == text["attn_layer_offset"],  # Jamba
    **dict.fromkeys(("attn_layer_indices", "full_attn_idxs"), lambda _, indices, i: i in indices),  # Bamba, LFM2
    "linear_attn_config": lambda _, linear, i: i + 1 in linear["full_attn_layers"],  # Kimi Linear
}
# The class defaults of transformers for configs that leave `sliding_window_pattern` out: each n-th layer is full.
_PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "gemma3n_text": 5, "cohere2": 4, "exaone4": 4, "gpt_oss": 2}


def _layer_kinds(text: HFConfig, layers: int) -> list[LayerKind]:
    named = text.get("layer_types") or text.get("layers_block_type")
    hybrid = next((field for field in _ATTENDS if text.get(field)), None)
    try:
        if named:
            return [_KINDS[name] for name in named]
        if hybrid:
            attends = _ATTENDS[hybrid]
            return [LayerKind.FULL if attends(text, text[hybrid], i) else LayerKind.NO_KV for i in range(layers)]
        return [_windowed_kind(text, i) for i in range(layers)]
    except (IndexError, KeyError, TypeError) as exc:
        field = "layer_types" if named else hybrid or "an attention pattern"
        raise ConfigError(f"config.json has {field} that cannot be read ({exc!r}): {_INSTEAD}") from exc


def _windowed_kind(text: HFConfig, layer: int) -> LayerKind:
    if text.get("attention_chunk_size"):  # Llama 4: layers without RoPE are the full ones
        rope = text.get("no_rope_layers")  # 1 = with RoPE, in spite of the name
        local = rope[layer] if rope else (layer + 1) % _number(text, "no_rope_layer_interval", default=4)
        return LayerKind.CHUNKED if local else LayerKind.FULL
    first_windowed = text.get("max_window_layers")  # Qwen 2 and 3, where windows are off unless switched on
    if not text.get("sliding_window") or not text.get("use_sliding_window", first_windowed is None):
        return LayerKind.FULL
    pattern = text.get("sliding_window_pattern") or _PATTERNS.get(text.get("model_type", ""))
    if isinstance(pattern, str):  # EXAONE 4: LLLG
        local = pattern[layer % len(pattern)] == "L"
    elif pattern:
        local = (layer + 1) % _number(text, "sliding_window_pattern", default=pattern) != 0
    else:
        local = layer >= (first_windowed or 0)
    return LayerKind.SLIDING if local else LayerKind.FULL


def _group(text: HFConfig, kind: LayerKind, layers: int) -> LayerGroup:
    if kind is LayerKind.NO_KV:
        return LayerGroup(kind, layers, kv_heads=0, head_elements=0)
    window_field = {LayerKind.SLIDING: "sliding_window", LayerKind.CHUNKED: "attention_chunk_size"}.get(kind)
    window_tokens = _number(text, window_field) if window_field else None
    if text.get("kv_lora_rank"):  # MLA
        latent = _number(text, "kv_lora_rank") + _number(text, "qk_rope_head_dim")
        return LayerGroup(kind, layers, kv_heads=1, head_elements=latent, window_tokens=window_tokens)
    kv_heads, head_dim = _kv_heads(text), _number(text, *_HEAD_DIM, default=0)
    if kind is LayerKind.FULL:  # Gemma 4 gives its global layers another shape
        head_dim = _number(text, "global_head_dim", default=head_dim)
        if text.get("attention_k_eq_v"):
            kv_heads = _number(text, "num_global_key_value_heads", default=kv_heads)
    head_dim = head_dim or _number(text, "hidden_size", "n_embd", "d_model") // _number(text, *_HEADS)
    return LayerGroup(kind, layers, kv_heads, 2 * head_dim, window_tokens)


def _kv_heads(text: HFConfig) -> int:
    if text.get("multi_query") and not text.get("new_decoder_architecture"):  # Falcon, GPT-BigCode
        return 1
    return _number({**text, **(text.get("attn_config") or {})}, *_KV_HEADS, *_HEADS)


def _text_part(config: HFConfig) -> HFConfig:
    """The nested config of a multimodal model's text decoder, or the config itself."""
    nested = (_text_part(config[name]) for name in _TEXT_PARTS if isinstance(config.get(name), Mapping))
    return next((text for text in nested if any(text.get(field) for field in _LAYERS)), config)


def _number(text: HFConfig, *fields: str, default: int | None = None) -> int:
    """The first of `fields` that is given; null and 0 both mean not given, as they do to vLLM."""
    field = next((field for field in fields if text.get(field)), None)
    if field is None and default is None:
        raise ConfigError(f"config.json does not give {fields[0]}: {_INSTEAD}")
    value = default if field is None else text[field]
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"config.json has {field} {value!r} where a whole number above 0 belongs: {_INSTEAD}")
    return value
