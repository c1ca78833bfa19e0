"""What a simulation is made of: arrivals, what became of them, and the knobs of the fleet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from disagg_router.model import InstanceId, Path, Role, Slo


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a workload.

    `blocks` are the content ids of its prompt's and its answer's blocks of the workload's block size, the last one
    partial: two requests share a prefix as far as their ids are equal. Ids are below 2**31.
    """

    number: int
    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class Workload:
    """Arrivals in order of time."""

    name: str
    block_tokens: int
    arrivals: Sequence[Arrival]


class End(StrEnum):
    DONE = "done"
    REFUSED = "refused"  # by admission or a full queue, at once or after waiting
    FAILED = "failed"  # anything else; a simulation that has one is wrong


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one arrival. Times are virtual, in seconds; TPOT is 0 and not gated for a one-token answer."""

    number: int
    at_s: float
    end: End
    prompt_tokens: int
    output_tokens: int
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    max_gap_s: float = 0.0
    done_s: float = 0.0  # when its last token came
    path: Path | None = None
    queued_s: float = 0.0  # in the router's fair queue

    def good(self, slo: Slo) -> bool:
        in_time = self.end is End.DONE and self.ttft_s <= slo.ttft_s and self.max_gap_s <= slo.max_gap_s
        return in_time and (self.output_tokens < 2 or self.tpot_s <= slo.tpot_s)


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """`pools`: how many instances of each role. `chunk_tokens` None: prefills go first and whole, decodes wait (vLLM
    without chunked prefill). `link_bytes_per_s` is of each instance, for each direction."""

    pools: Mapping[Role, int]
    chunk_tokens: int | None = 2048
    link_bytes_per_s: float = 12e9

    @property
    def instances(self) -> int:
        return sum(self.pools.values())


def instance_ids(plan: FleetPlan) -> list[tuple[InstanceId, Role]]:
    return [(InstanceId(f"{role.value}-{i}"), role) for role, count in plan.pools.items() for i in range(count)]
