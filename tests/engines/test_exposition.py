"""Reading /metrics; the text is an excerpt of what vLLM 0.32.0 wrote."""

from __future__ import annotations

import pytest

from disagg_router.engines import exposition
from disagg_router.errors import UpstreamError
from disagg_router.interfaces import EngineLoad

RECORDED = """\
# HELP python_info Python platform information
# TYPE python_info gauge
python_info{implementation="CPython",major="3",minor="11",patchlevel="7",version="3.11.7"} 1.0
# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.7959763758e+09
# HELP vllm:nixl_bytes_transferred Histogram of bytes transferred per NIXL Xfer.
# TYPE vllm:nixl_bytes_transferred histogram
vllm:nixl_bytes_transferred_bucket{engine="0",le="2048.0",model_name="tiny"} 0.0
vllm:nixl_bytes_transferred_bucket{engine="0",le="+Inf",model_name="tiny"} 2.0
vllm:nixl_bytes_transferred_count{engine="0",model_name="tiny"} 2.0
vllm:nixl_bytes_transferred_sum{engine="0",model_name="tiny"} 1.048576e+06
# HELP vllm:nixl_bytes_transferred_created Histogram of bytes transferred per NIXL Xfer.
# TYPE vllm:nixl_bytes_transferred_created gauge
vllm:nixl_bytes_transferred_created{engine="0",model_name="tiny"} 1.7959764094086711e+09
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.009009009009009028
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{_block_size_resolved="True",block_size="32",cache_dtype="auto",engine="0",\
kv_cache_dtype_skip_layers="[]",kv_cache_layout="None",num_gpu_blocks="1000",prefix_caching_hash_algo="sha256"} 1.0
# HELP vllm:prompt_tokens_by_source_total Number of prompt tokens by source.
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_compute"} 512.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_cache_hit"} 288.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="external_kv_transfer"} 100.0
"""
SECOND_ENGINE = """\
vllm:prompt_tokens_by_source_total{engine="1",model_name="tiny",source="external_kv_transfer"} 11.0
vllm:cache_config_info{_block_size_resolved="True",block_size="64",cache_dtype="auto",engine="1"} 1.0
"""


def test_counters_are_named_by_what_is_left_of_their_labels() -> None:
    """Engine and model labels go, buckets, creation times and infos are left out."""
    assert exposition.counters(RECORDED) == {
        "process_start_time_seconds": 1795976375.8,
        "vllm:kv_cache_usage_perc": 0.009009009009009028,
        "vllm:nixl_bytes_transferred_count": 2,
        "vllm:nixl_bytes_transferred_sum": 1_048_576,
        'vllm:prompt_tokens_by_source_total{source="local_compute"}': 512,
        'vllm:prompt_tokens_by_source_total{source="local_cache_hit"}': 288,
        'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}': 100,
    }


def test_the_load_is_what_routing_needs() -> None:
    """Requests, KV and what was pulled; capacity is blocks times their size."""
    waiting = 'vllm:num_requests_waiting{engine="0",model_name="tiny"} 3.0\n'
    running = 'vllm:num_requests_running{engine="0",model_name="tiny"} 2.0\n'
    pulled = 'vllm:nixl_xfer_time_seconds_sum{engine="0",model_name="tiny"} 0.25\n'
    assert exposition.load(RECORDED + waiting + running + pulled) == EngineLoad(
        running=2,
        waiting=3,
        kv_usage=0.009009009009009028,
        kv_capacity_tokens=32_000,
        pulled_bytes=1_048_576,
        pull_s=0.25,
    )


def test_the_load_of_a_server_with_two_engines_is_their_sum_and_their_mean_usage() -> None:
    """They are alike, so the one's capacity is the other's."""
    second = RECORDED.replace('engine="0"', 'engine="1"').replace("0.009009009009009028", "0.5")
    load = exposition.load(RECORDED + second)
    assert (load.kv_capacity_tokens, load.pulled_bytes) == (64_000, 2_097_152)
    assert load.kv_usage == pytest.approx(0.2545, abs=1e-4)
    assert exposition.engines(RECORDED + second) == 2


def test_a_load_that_is_no_number_is_an_error_of_the_engine() -> None:
    """Not of ours."""
    with pytest.raises(UpstreamError):
        exposition.load('vllm:num_requests_running{engine="0"} many\n')


def test_counters_are_summed_over_engines() -> None:
    """A server with several data-parallel ranks counts as one."""
    counters = exposition.counters(RECORDED + SECOND_ENGINE)
    assert counters['vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}'] == 111


def test_only_what_all_engines_agree_on_is_known() -> None:
    """Ranks that differ in a setting leave it unknown."""
    assert exposition.cache_config(RECORDED)["block_size"] == "32"
    both = exposition.cache_config(RECORDED + SECOND_ENGINE)
    assert both["cache_dtype"] == "auto"
    assert "block_size" not in both
    assert exposition.cache_config("") == {}


def test_the_start_time_tells_one_process_from_another() -> None:
    """To a hundredth of a second; None where the server does not export it."""
    assert exposition.start_time(RECORDED) == "1795976375.80"
    assert exposition.start_time("") is None


def test_what_is_no_exposition_is_the_engines_fault() -> None:
    """A line the parser cannot read becomes an UpstreamError."""
    with pytest.raises(UpstreamError, match="Prometheus"):
        exposition.counters('vllm:broken{a="b" x\n')
