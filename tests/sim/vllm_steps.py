"""Runs vLLM's own scheduler, without a model: stdin says what is asked of it, stdout which tokens each step computes.

A process of its own: it takes seconds to import, warns, and is not in every environment.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from typing import Any

MODEL_LENGTH_TOKENS = 8192


def scheduler(asked: dict[str, Any]) -> Any:
    config, core = import_module("vllm.config"), import_module("vllm.v1.kv_cache_interface")
    block_tokens, blocks = asked["block_tokens"], asked["blocks"] + 1  # vLLM keeps one for itself
    cache = config.CacheConfig(block_size=block_tokens, enable_prefix_caching=True)
    cache.num_gpu_blocks = blocks
    whole = config.VllmConfig(
        model_config=config.ModelConfig(model=asked["model"], dtype="float32", max_model_len=MODEL_LENGTH_TOKENS),
        scheduler_config=config.SchedulerConfig(
            max_num_seqs=asked["max_running"],
            max_num_batched_tokens=asked["chunk_tokens"],
            max_model_len=MODEL_LENGTH_TOKENS,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        cache_config=cache,
        device_config=config.DeviceConfig("cpu"),
    )
    float32 = import_module("torch").float32
    layer = core.FullAttentionSpec(block_size=block_tokens, num_kv_heads=1, head_size=1, dtype=float32)
    return import_module("vllm.v1.core.sched.scheduler").Scheduler(
        vllm_config=whole,
        kv_cache_config=core.KVCacheConfig(blocks, [], [core.KVCacheGroupSpec(["layer"], layer)]),
        structured_output_manager=import_module("vllm.v1.structured_output").StructuredOutputManager(whole),
        block_size=block_tokens,
        log_stats=True,
    )


def steps(asked: dict[str, Any]) -> list[dict[str, int]]:
    """Of each step the tokens by request. A request has the step in which it comes, that in which its client goes or
    null, its prompt's length, and all its tokens, the answer's included."""
    hashing, requests = import_module("vllm.v1.core.kv_cache_utils"), import_module("vllm.v1.request")
    sha256 = import_module("vllm.utils.hashing").get_hash_fn_by_name("sha256")
    hashing.init_none_hash(sha256)
    hasher = hashing.get_request_block_hasher(asked["block_tokens"], sha256)
    params, outputs = import_module("vllm.sampling_params"), import_module("vllm.v1.outputs")
    engine, live, found = scheduler(asked), {}, []
    to_come = list(asked["requests"])
    while to_come or live:
        for one in [one for one in to_come if one["comes"] <= len(found)]:
            to_come.remove(one)
            prompt, tokens = one["prompt"], one["tokens"]
            limit = params.SamplingParams(max_tokens=len(tokens) - prompt, ignore_eos=True)
            request = requests.Request(one["id"], tokens[:prompt], limit, None, block_hasher=hasher)
            live[one["id"]] = request, one
            engine.add_request(request)
        for id_ in [id_ for id_, (_, one) in live.items() if one["goes"] == len(found)]:
            engine.finish_requests(id_, requests.RequestStatus.FINISHED_ABORTED)
            del live[id_]
        output = engine.schedule()
        ids = list(output.num_scheduled_tokens)
        found.append(dict(output.num_scheduled_tokens))
        sampled = [_next(*live[id_]) for id_ in ids]
        places = {id_: place for place, id_ in enumerate(ids)}
        engine.update_from_output(output, outputs.ModelRunnerOutput(ids, places, sampled))
        live = {id_: each for id_, each in live.items() if not each[0].is_finished()}
    return found


def _next(request: Any, one: dict[str, Any]) -> list[int]:
    """The next token, unless its prompt is not through yet."""
    return [one["tokens"][request.num_tokens]] if request.num_computed_tokens >= request.num_tokens else []


if __name__ == "__main__":
    os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    said = [steps(asked) for asked in json.load(sys.stdin)]
    print("\n" + json.dumps(said))
