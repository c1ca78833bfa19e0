"""What a target and a link are believed to take before anything was measured: off by up to 2x on the GPUs of the table,
by more elsewhere; `online.py` corrects it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from disagg_router.cost.geometry import HFConfig, KVGeometry
from disagg_router.timing import LinkTiming, TargetTiming

CHUNK_TOKENS = 2048  # vLLM's own default on most hardware
DEFAULT_HARDWARE = "h100"


@dataclass(frozen=True, slots=True)
class Priors:
    target: TargetTiming
    link: LinkTiming
    kv_bytes_per_token: float


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What the times scale with. `params` are those a token passes through, `attention_width` is layers * heads * head
    dim."""

    params: float
    attention_width: float
    kv_bytes_per_token: float


LLAMA_8B = ModelSize(7.5e9, 32 * 32 * 128, 131_072)
QWEN_32B = ModelSize(32.0e9, 64 * 64 * 128, 262_144)
LLAMA_70B = ModelSize(69.5e9, 80 * 64 * 128, 327_680)


@dataclass(frozen=True, slots=True)
class _Row:
    """prefill_ms = a + b*u + c*u*(u/2 + h), decode_step_ms = d + e*B + f*context, as in TargetTiming."""

    hardware: str
    size: ModelSize
    tp: int
    a_ms: float
    b_ms: float
    c_ms: float
    d_ms: float
    e_ms: float
    f_ms: float


# Least-squares fits to PyPI aiconfigurator-core 0.12.0 (Apache-2.0), backend vllm: Llama 3.1 8B and 70B, Qwen3 32B.
# Whole iterations composed of operations measured on silicon (vLLM 0.24 on H100 and H200, 0.14 on A100), no host time.
_TABLE = (
    _Row("a100", LLAMA_8B, 1, 7.592843, 0.055015, 2.932e-06, 11.4997649, 0.0343508, 8.43e-05),
    _Row("a100", LLAMA_8B, 2, 4.195914, 0.033227, 1.432e-06, 6.6602063, 0.0214854, 4.41e-05),
    _Row("a100", LLAMA_8B, 4, 5.335736, 0.020597, 7.138e-07, 4.4664503, 0.0177068, 2.21e-05),
    _Row("a100", QWEN_32B, 1, 17.267291, 0.227642, 1.158e-05, 43.8039187, 0.1022318, 1.684e-04),
    _Row("a100", QWEN_32B, 2, 19.525037, 0.124959, 5.816e-06, 24.576724, 0.0900974, 8.77e-05),
    _Row("a100", QWEN_32B, 4, 11.153735, 0.074275, 2.854e-06, 14.5139102, 0.0488796, 4.48e-05),
    _Row("a100", LLAMA_70B, 2, 35.036411, 0.262057, 7.416e-06, 49.8812073, 0.1587384, 1.101e-04),
    _Row("a100", LLAMA_70B, 4, 22.091089, 0.150558, 3.758e-06, 27.6374362, 0.104356, 5.6e-05),
    _Row("a100", LLAMA_70B, 8, 19.442304, 0.095478, 1.972e-06, 17.3743367, 0.0724135, 2.68e-05),
    _Row("h100", LLAMA_8B, 1, 2.314969, 0.019863, 7.54e-07, 6.4145175, 0.0104578, 4.17e-05),
    _Row("h100", LLAMA_8B, 2, 2.114306, 0.0126, 3.65e-07, 3.9837106, 0.0076755, 2.08e-05),
    _Row("h100", LLAMA_8B, 4, 2.323918, 0.008335, 1.774e-07, 2.7267346, 0.0071297, 1.06e-05),
    _Row("h100", QWEN_32B, 1, 7.082144, 0.087625, 3.318e-06, 25.2594576, 0.0305755, 8.39e-05),
    _Row("h100", QWEN_32B, 2, 5.933768, 0.049393, 1.526e-06, 13.6100937, 0.0244338, 4.23e-05),
    _Row("h100", QWEN_32B, 4, 6.854647, 0.029096, 7.65e-07, 8.2958688, 0.0202421, 2.13e-05),
    _Row("h100", LLAMA_70B, 2, 4.538783, 0.106267, 1.888e-06, 27.378552, 0.0333655, 5.22e-05),
    _Row("h100", LLAMA_70B, 4, 6.427998, 0.061092, 8.906e-07, 15.1975587, 0.0324562, 2.65e-05),
    _Row("h100", LLAMA_70B, 8, 6.611498, 0.038508, 4.38e-07, 9.9288702, 0.0268933, 1.34e-05),
    _Row("h200", LLAMA_8B, 1, 1.404539, 0.020156, 7.819e-07, 4.9489444, 0.0116476, 2.95e-05),
    _Row("h200", LLAMA_8B, 2, 1.754378, 0.01238, 3.757e-07, 3.3345207, 0.0081437, 1.47e-05),
    _Row("h200", LLAMA_8B, 4, 2.150449, 0.007997, 1.789e-07, 2.4741321, 0.0071842, 7.4e-06),
    _Row("h200", QWEN_32B, 1, 4.39535, 0.087486, 3.144e-06, 19.0760706, 0.0353301, 5.99e-05),
    _Row("h200", QWEN_32B, 2, 4.760292, 0.048906, 1.575e-06, 10.7642669, 0.024073, 2.97e-05),
    _Row("h200", QWEN_32B, 4, 5.538676, 0.029139, 7.46e-07, 6.9326608, 0.0182081, 1.51e-05),
    _Row("h200", LLAMA_70B, 2, 1.94887, 0.107022, 1.996e-06, 20.9364625, 0.0382865, 3.67e-05),
    _Row("h200", LLAMA_70B, 4, 4.184212, 0.061655, 9.492e-07, 12.1926283, 0.0324323, 1.85e-05),
    _Row("h200", LLAMA_70B, 8, 5.400502, 0.03757, 4.266e-07, 8.1703697, 0.026339, 9.6e-06),
)
# The table has no host time; LLMServingSim's artefact needed 6 ms a step with an older vLLM, 2026's schedules ahead.
_HOST_S = 0.003
# A handoff however small: the same artefact misses 60 to 90 ms per request. The link: NIXL over 100G RoCE (nixlbench).
_GPU_LINK = LinkTiming(handoff_s=0.06, bytes_per_s=12e9)
# Two engines on one CPU host: a 12 MiB pull takes 5 to 8 ms, a decode leg's first byte 80 to 130 ms.
_CPU_LINK = LinkTiming(handoff_s=0.06, bytes_per_s=2e9)


def priors(
    config: HFConfig | None,
    geometry: KVGeometry | None,
    *,
    device: str = "cuda",
    hardware: str | None = None,
    tp: int = 1,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Priors:
    """`config`: a parsed config.json; without one, or where it does not say enough, the model is taken for an 8B.
    `hardware`: any name that holds h100, h200 or a100; another one, or none, is taken for an H100."""
    size = model_size(config, geometry)
    timing = _cpu(size, chunk_tokens) if device == "cpu" else _gpu(size, hardware, tp, chunk_tokens)
    return Priors(timing, _CPU_LINK if device == "cpu" else _GPU_LINK, size.kv_bytes_per_token)


def _gpu(size: ModelSize, hardware: str | None, tp: int, chunk_tokens: int) -> TargetTiming:
    """The nearest row of the table, scaled: matrices with parameters, attention with its width, reads with KV bytes."""
    known = {row.hardware for row in _TABLE}
    name = next((name for name in sorted(known) if name in (hardware or "").lower()), DEFAULT_HARDWARE)

    def distance(row: _Row) -> float:
        return abs(math.log(size.params / row.size.params)) + abs(math.log(tp / row.tp))

    row = min((row for row in _TABLE if row.hardware == name), key=distance)
    ranks = row.tp / tp
    params = ranks * size.params / row.size.params
    width = ranks * size.attention_width / row.size.attention_width
    kv = ranks * size.kv_bytes_per_token / row.size.kv_bytes_per_token
    return TargetTiming(
        prefill_a_s=_HOST_S + row.a_ms * params / 1000,
        prefill_b_s=row.b_ms * params / 1000,
        prefill_c_s=row.c_ms * width / 1000,
        step_d_s=_HOST_S + row.d_ms * params / 1000,
        step_e_s=row.e_ms * params / 1000,
        step_f_s=row.f_ms * kv / 1000,
        chunk_tokens=chunk_tokens,
    )


def _cpu(size: ModelSize, chunk_tokens: int) -> TargetTiming:
    """A guess for a few cores: 100 GFLOP/s, 20 GB/s, bf16 weights; the constants are what a tiny model costs there."""
    flops, memory = 1e11, 2e10
    return TargetTiming(
        prefill_a_s=0.008,
        prefill_b_s=5e-5 + 2 * size.params / flops,
        prefill_c_s=4 * size.attention_width / flops,
        step_d_s=0.005 + 2 * size.params / memory,
        step_e_s=3e-4 + 2 * size.params / flops,
        step_f_s=size.kv_bytes_per_token / memory,
        chunk_tokens=chunk_tokens,
    )


def model_size(config: HFConfig | None, geometry: KVGeometry | None) -> ModelSize:
    """By the fields of a Llama-like or mixture-of-experts config; nested ones of multimodal models are looked into."""
    kv_bytes = geometry.bytes_per_token() if geometry else 0
    params, width = _text_size(_text_part(config or {}))
    if not params:
        return ModelSize(LLAMA_8B.params, LLAMA_8B.attention_width, kv_bytes or LLAMA_8B.kv_bytes_per_token)
    return ModelSize(params, width, kv_bytes or LLAMA_8B.kv_bytes_per_token * params / LLAMA_8B.params)


def _text_part(config: HFConfig) -> HFConfig:
    nested = [part for part in config.values() if isinstance(part, Mapping) and _number(part, "num_hidden_layers")]
    return config if _number(config, "num_hidden_layers") or not nested else max(nested, key=_widest)


def _widest(config: HFConfig) -> float:
    return _number(config, "vocab_size")


def _text_size(text: HFConfig) -> tuple[float, float]:
    """Parameters that a token passes through, and attention width; zeros where the config does not say."""
    layers, hidden = _number(text, "num_hidden_layers"), _number(text, "hidden_size")
    heads = _number(text, "num_attention_heads")
    if not (layers and hidden and heads):
        return 0.0, 0.0
    width = heads * (_number(text, "head_dim") or hidden / heads)
    kv_width = width / heads * (_number(text, "num_key_value_heads") or heads)
    inner = _number(text, "intermediate_size") or 4 * hidden
    experts = _number(text, "num_experts_per_tok")
    if experts:
        inner = experts * (_number(text, "moe_intermediate_size") or inner)
    layer = 2 * hidden * (width + kv_width) + 3 * hidden * inner
    return layers * layer + _number(text, "vocab_size") * hidden, layers * width


def _number(text: Mapping[str, Any], field: str) -> float:
    value = text.get(field)
    return float(value) if isinstance(value, int) and value > 0 else 0.0
