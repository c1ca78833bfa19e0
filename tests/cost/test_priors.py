"""Priors: the table's own values by hand, what scales with what, and what is taken where nothing is known."""

from __future__ import annotations

import pytest

from disagg_router.cost.geometry import KVDtype, from_config
from disagg_router.cost.priors import LLAMA_8B, LLAMA_70B, QWEN_32B, ModelSize, model_size, priors
from disagg_router.timing import TargetTiming

HOST_S = 0.003
# The fields of each published config.json that count.
CONFIG_8B = {
    **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096},
    **{"intermediate_size": 14336, "vocab_size": 128256},
}
CONFIG_70B = {
    **{"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192},
    **{"intermediate_size": 28672, "vocab_size": 128256},
}
CONFIG_32B = {
    **{"num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 5120},
    **{"head_dim": 128, "intermediate_size": 25600, "vocab_size": 151936},
}
QWEN3_30B_A3B = {
    **{"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "hidden_size": 2048},
    **{"head_dim": 128, "intermediate_size": 6144, "vocab_size": 151936},
    **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
}


def ms(a: float, b: float, c: float, d: float, e: float, f: float) -> TargetTiming:
    """A row of the table, in milliseconds, with the host's time added."""
    return TargetTiming(HOST_S + a / 1e3, b / 1e3, c / 1e3, HOST_S + d / 1e3, e / 1e3, f / 1e3)


@pytest.mark.parametrize(
    ("config", "size"),
    [
        pytest.param(CONFIG_8B, LLAMA_8B, id="8B"),
        pytest.param(CONFIG_70B, LLAMA_70B, id="70B"),
        pytest.param(CONFIG_32B, QWEN_32B, id="32B"),
        pytest.param({"text_config": CONFIG_32B, "vision_config": {"num_hidden_layers": 27}}, QWEN_32B, id="nested"),
    ],
)
def test_published_configs_have_their_published_size(config: dict[str, object], size: ModelSize) -> None:
    """Parameters that a token passes through, from the shapes alone; the input embedding is a look-up."""
    found = model_size(config, from_config(config, dtype=KVDtype.BF16))
    assert found.params == pytest.approx(size.params, rel=0.01)
    assert found.attention_width == size.attention_width
    assert found.kv_bytes_per_token == size.kv_bytes_per_token


def test_of_a_mixture_only_the_experts_a_token_uses_count() -> None:
    """The "A3B" in the name of Qwen3 30B-A3B."""
    assert model_size(QWEN3_30B_A3B, None).params == pytest.approx(3.3e9, rel=0.1)


@pytest.mark.parametrize(
    ("config", "hardware", "tp", "timing"),
    [
        pytest.param(
            *(CONFIG_8B, "NVIDIA H100 80GB HBM3", 1),
            ms(2.314969, 0.019863, 7.54e-07, 6.4145175, 0.0104578, 4.17e-05),
            id="8B on an H100",
        ),
        pytest.param(
            *(CONFIG_70B, "a100_sxm", 8),
            ms(19.442304, 0.095478, 1.972e-06, 17.3743367, 0.0724135, 2.68e-05),
            id="70B on eight A100",
        ),
        pytest.param(
            *(CONFIG_70B, "h200", 16),
            ms(5.400502 / 2, 0.03757 / 2, 4.266e-07 / 2, 8.1703697 / 2, 0.026339 / 2, 9.6e-06 / 2),
            id="twice as many ranks as the table has: half of each",
        ),
        pytest.param(
            *(None, None, 1),
            ms(2.314969, 0.019863, 7.54e-07, 6.4145175, 0.0104578, 4.17e-05),
            id="nothing known: an 8B on an H100",
        ),
        pytest.param(
            *({"num_hidden_layers": 32}, "B300", 1),
            ms(2.314969, 0.019863, 7.54e-07, 6.4145175, 0.0104578, 4.17e-05),
            id="a config that does not say enough, hardware that is not in the table",
        ),
    ],
)
def test_gpu_times_are_the_tables(
    config: dict[str, object] | None, hardware: str | None, tp: int, timing: TargetTiming
) -> None:
    """Rows of profiles/aic_vllm_fits.csv, plus 3 ms of host time a step."""
    geometry = from_config(config, dtype=KVDtype.BF16) if config and "hidden_size" in config else None
    found = priors(config, geometry, hardware=hardware, tp=tp).target
    for name in ("prefill_a_s", "prefill_b_s", "prefill_c_s", "step_d_s", "step_e_s", "step_f_s"):
        assert getattr(found, name) == pytest.approx(getattr(timing, name), rel=0.01), name


def test_kv_bytes_come_from_the_geometry() -> None:
    """The fp8 cache of an 8B has half the bytes, so its reads take half as long; nothing else changes."""
    bf16 = priors(CONFIG_8B, from_config(CONFIG_8B, dtype=KVDtype.BF16))
    fp8 = priors(CONFIG_8B, from_config(CONFIG_8B, dtype=KVDtype.FP8))
    assert (bf16.kv_bytes_per_token, fp8.kv_bytes_per_token) == (131_072, 65_536)
    assert fp8.target.step_f_s == bf16.target.step_f_s / 2
    assert fp8.target.prefill_b_s == bf16.target.prefill_b_s


def test_cpu_has_a_row_of_its_own() -> None:
    """A guess, and slower than any GPU: 15 GFLOP per token of an 8B at 100 GFLOP/s."""
    cpu = priors(CONFIG_8B, None, device="cpu", chunk_tokens=256)
    assert cpu.target.prefill_b_s == pytest.approx(0.15, rel=0.01)
    assert cpu.target.chunk_tokens == 256
    assert cpu.link.bytes_per_s < priors(CONFIG_8B, None).link.bytes_per_s == 12e9
