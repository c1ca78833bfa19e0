"""What an engine's /metrics says, in the few forms the router needs. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from disagg_router.errors import UpstreamError
from disagg_router.interfaces import EngineLoad

# These tell apart the engines (data-parallel ranks) and the served name of one server: summed over.
_SUMMED_LABELS = frozenset({"engine", "model_name"})
_KEPT_PREFIXES = ("vllm:", "process_")
# Four fifths of the text, and nobody asks for them: buckets, creation times, and infos that are all labels.
_CONFIG = "vllm:cache_config_info{"
_USAGE = "kv_cache_usage_perc"
_LOAD_NAMES = (
    *("num_requests_running", "num_requests_waiting", _USAGE),
    *("nixl_bytes_transferred_sum", "nixl_xfer_time_seconds_sum"),
)
_DROPPED_SUFFIXES = ("_bucket", "_created", "_info")


def counters(text: str) -> dict[str, float]:
    """`name` or `name{label="value",...}` (labels sorted) -> value, summed over the server's engines."""
    totals: dict[str, float] = defaultdict(float)
    for sample in _samples(_kept_lines(text)):
        labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()) if k not in _SUMMED_LABELS)
        totals[f"{sample.name}{{{labels}}}" if labels else sample.name] += sample.value
    return dict(totals)


def cache_config(text: str) -> dict[str, str]:
    """The labels of vllm:cache_config_info that all engines of the server agree on."""
    return _agreed(line for line in text.splitlines() if line.startswith(_CONFIG))


def load(text: str) -> EngineLoad:
    """Read on every look at every engine, so of the text only the few lines that matter are looked at."""
    totals = dict.fromkeys(_LOAD_NAMES, 0.0)
    config_lines: list[str] = []
    ranks = 0
    for line in text.splitlines():
        if not line.startswith("vllm:"):
            continue
        name = line[5 : line.find("{")]
        if name in totals:
            try:
                totals[name] += float(line[line.rindex(" ") :])
            except ValueError as exc:
                raise UpstreamError("the engine's /metrics is not in the Prometheus text format") from exc
            ranks += name == _USAGE
        elif line.startswith(_CONFIG):
            config_lines.append(line)
    if not all(map(math.isfinite, totals.values())):
        raise UpstreamError("the engine's /metrics holds loads that are no numbers")
    return EngineLoad(
        running=round(totals["num_requests_running"]),
        waiting=round(totals["num_requests_waiting"]),
        kv_usage=totals[_USAGE] / max(1, ranks),
        kv_capacity_tokens=capacity_tokens(_agreed(config_lines), max(1, ranks)),
        pulled_bytes=totals["nixl_bytes_transferred_sum"],
        pull_s=totals["nixl_xfer_time_seconds_sum"],
    )


def engines(text: str) -> int:
    """Data-parallel ranks that the server has, each an engine of its own."""
    return max(1, sum(line.startswith(_CONFIG) for line in text.splitlines()))


def start_time(text: str) -> str | None:
    """When the server's process started, as it says itself; several API server processes do not export it."""
    lines = (line for line in text.splitlines() if line.startswith("process_start_time_seconds "))
    return next((f"{sample.value:.2f}" for sample in _samples(lines)), None)


def _agreed(config_lines: Iterable[str]) -> dict[str, str]:
    engines = [sample.labels for sample in _samples(config_lines)]
    return {k: v for k, v in engines[0].items() if all(e.get(k) == v for e in engines)} if engines else {}


def capacity_tokens(config: dict[str, str], ranks: int) -> int | None:
    """Of all ranks together; the ranks of one server are alike."""
    blocks, block_size = config.get("num_gpu_blocks", ""), config.get("block_size", "")
    return int(blocks) * int(block_size) * ranks if blocks.isdecimal() and block_size.isdecimal() else None


def _kept_lines(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if line.startswith(_KEPT_PREFIXES):
            name = line.partition("{")[0] if "{" in line else line.partition(" ")[0]
            if not name.endswith(_DROPPED_SUFFIXES):
                yield line


def _samples(lines: Iterable[str]) -> Iterator[Sample]:
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            yield from family.samples
    except ValueError as exc:
        raise UpstreamError("the engine's /metrics is not in the Prometheus text format") from exc
