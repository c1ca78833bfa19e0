"""What an engine's /metrics says, in the few forms the router needs. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from disagg_router.errors import UpstreamError

# These tell apart the engines (data-parallel ranks) and the served name of one server: summed over.
_SUMMED_LABELS = frozenset({"engine", "model_name"})
_KEPT_PREFIXES = ("vllm:", "process_")
# Four fifths of the text, and nobody asks for them: buckets, creation times, and infos that are all labels.
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
    lines = (line for line in text.splitlines() if line.startswith("vllm:cache_config_info{"))
    engines = [sample.labels for sample in _samples(lines)]
    return {k: v for k, v in engines[0].items() if all(e.get(k) == v for e in engines)} if engines else {}


def start_time(text: str) -> str | None:
    """When the server's process started, as it says itself; several API server processes do not export it."""
    lines = (line for line in text.splitlines() if line.startswith("process_start_time_seconds "))
    return next((f"{sample.value:.2f}" for sample in _samples(lines)), None)


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
