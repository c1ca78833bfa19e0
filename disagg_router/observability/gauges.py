"""Metrics that are read off the router's parts when somebody scrapes; an instance that is gone leaves none behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from disagg_router.model import InstanceId, Target
from disagg_router.routing.fleet import Fleet
from disagg_router.routing.leases import LeaseBook, LeaseKind
from disagg_router.routing.prefix_index import PrefixIndex
from disagg_router.timing import CostSnapshot
from disagg_router.view import Leans, TargetLoad

REFERENCE_TOKENS = 1000  # a prompt whose predicted prefill time stands for a target's speed


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """What else can be read; None leaves its metrics out. Each is called once per scrape, `load` once per target.

    The counters are totals since some start, by names from the code.
    """

    queue_waiting: Callable[[], int] | None = None
    costs: Callable[[], CostSnapshot] | None = None
    load: Callable[[Target], TargetLoad] | None = None
    leans: Callable[[], Leans] | None = None
    kv_events: Callable[[], Mapping[InstanceId, Mapping[str, int]]] | None = None
    tokenizer: Callable[[], Mapping[str, int]] | None = None
    decision_log: Callable[[], Mapping[str, int]] | None = None


class FleetCollector(Collector):
    """Instances, pairs, leases, the prefix index."""

    def __init__(self, fleet: Callable[[], Fleet], leases: LeaseBook, index: PrefixIndex) -> None:
        self._fleet, self._leases, self._index = fleet, leases, index

    def collect(self) -> Iterable[Metric]:
        fleet = self._fleet()
        instances = GaugeMetricFamily(
            "disagg_instance_up", "1 for an instance that takes requests.", labels=["instance", "role", "state"]
        )
        for instance in fleet.instances.values():
            up = instance.state.value == "ready"
            instances.add_metric([instance.id, instance.role.value, instance.state.value], float(up))
        pairs = GaugeMetricFamily("disagg_pair_ready", "1 for a tested pair.", labels=["prefill", "decode", "state"])
        for pair, status in fleet.pairs.items():
            ready = status.state.value == "ready"
            pairs.add_metric([pair.prefill, pair.decode, status.state.value], float(ready))
        held = self._leases.held()
        leases = _by_instance("disagg_leases", "Leases held now.", {key: it.count for key, it in held.items()})
        lease_bytes = _by_instance(
            "disagg_lease_bytes", "KV bytes under lease now.", {key: it.kv_bytes for key, it in held.items()}
        )
        return (instances, pairs, leases, lease_bytes, *self._of_the_index())

    def _of_the_index(self) -> Iterable[Metric]:
        stats = self._index.stats()
        figures = GaugeMetricFamily(
            "disagg_index", "The prefix index: entries now, and counts since the start.", labels=["what"]
        )
        for name in ("entries", "evictions", "stored", "lookups", "hits"):
            figures.add_metric([name], float(getattr(stats, name)))
        dropped = GaugeMetricFamily(
            "disagg_index_dropped", "Blocks that events announced and the index left out.", labels=["reason"]
        )
        for reason, count in stats.dropped.items():
            dropped.add_metric([reason.value], float(count))
        return (figures, dropped)


class ReadingsCollector(Collector):
    """Whatever of `readings` there is."""

    def __init__(self, fleet: Callable[[], Fleet], readings: Readings) -> None:
        self._fleet, self._readings = fleet, readings

    def collect(self) -> Iterator[Metric]:
        read, fleet = self._readings, self._fleet()
        if read.queue_waiting:
            waiting = GaugeMetricFamily("disagg_queue_waiting", "Requests in the queue now.")
            waiting.add_metric([], float(read.queue_waiting()))
            yield waiting
        if read.costs:
            yield from self._of_the_costs(fleet, read.costs())
        if read.leans:
            yield _of_the_leans(fleet, read.leans())
        if read.kv_events:
            events = CounterMetricFamily(
                "disagg_kv_events", "What an engine's KV event stream has been through.", labels=["instance", "what"]
            )
            for instance, counts in read.kv_events().items():
                for what, count in counts.items():
                    events.add_metric([instance, what], float(count))
            yield events
        if read.tokenizer:
            yield _counts("disagg_tokenizer", "What the tokenizer was asked, and how it went.", read.tokenizer())
        if read.decision_log:
            yield _counts("disagg_decision_log", "Lines of the decision log.", read.decision_log())

    def _of_the_costs(self, fleet: Fleet, costs: CostSnapshot) -> Iterator[Metric]:
        """An instance's figure is the mean over its ranks."""
        cost = GaugeMetricFamily(
            "disagg_cost_seconds",
            f"Predicted now: a prefill of {REFERENCE_TOKENS:,} tokens on an idle instance; a decode step beside the"
            " streams that run.",
            labels=["what", "instance"],
        )
        load = self._readings.load or _idle
        for instance in fleet.instances.values():
            targets = instance.targets
            prefill_s = fmean(costs.of(one).prefill_mean_s(REFERENCE_TOKENS, 0) for one in targets)
            streams = {one: load(one).streams for one in targets}
            step_s = fmean(costs.of(one).step_mean_s(it.running, it.context_tokens) for one, it in streams.items())
            cost.add_metric([f"prefill_{REFERENCE_TOKENS}", instance.id], prefill_s)
            cost.add_metric(["decode_step", instance.id], step_s)
        labels = ["prefill", "decode"]
        speed = GaugeMetricFamily("disagg_link_bytes_per_second", "Believed bandwidth of a pair.", labels=labels)
        handoff = GaugeMetricFamily("disagg_link_handoff_seconds", "Believed cost of an empty handoff.", labels=labels)
        for pair in fleet.pairs:
            link = costs.links.get(pair, costs.link)
            speed.add_metric([pair.prefill, pair.decode], link.bytes_per_s)
            handoff.add_metric([pair.prefill, pair.decode], link.handoff_s)
        yield from (cost, speed, handoff)


def _of_the_leans(fleet: Fleet, leans: Leans) -> Metric:
    family = GaugeMetricFamily(
        "disagg_lean", "-1: leans to prefilling, +1: to decoding; mean over the ranks.", labels=["instance"]
    )
    for instance in fleet.instances.values():
        family.add_metric([instance.id], fmean(leans.lean.get(target, 0.0) for target in instance.targets))
    return family


def _by_instance(name: str, text: str, held: Mapping[tuple[LeaseKind, Target], float]) -> Metric:
    """Summed over ranks: two series of the same labels would spoil the whole page."""
    sums: dict[tuple[str, str], float] = {}
    for (kind, target), amount in held.items():
        sums[kind, target.instance] = sums.get((kind, target.instance), 0.0) + amount
    family = GaugeMetricFamily(name, text, labels=["kind", "instance"])
    for labels, amount in sums.items():
        family.add_metric(labels, amount)
    return family


def _counts(name: str, text: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=["what"])
    for what, count in counts.items():
        family.add_metric([what], float(count))
    return family


def _idle(_: Target) -> TargetLoad:
    return TargetLoad()
