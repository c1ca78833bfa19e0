"""What the grid compares: cells of traffic, hardware, objectives and links, and the fixed configurations to beat."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from disagg_router.model import Role, Slo

MAX_PROMPT_TOKENS = 32_000  # longer prompts than the context of many a deployment are left out, for everybody
SUBJECT_CHUNK_TOKENS = 2048
THRESHOLD_TOKENS = 1000


@dataclass(frozen=True, slots=True)
class Traffic:
    """A trace's file, and the format it has (traces.py)."""

    name: str
    file: str
    format_name: str


@dataclass(frozen=True, slots=True)
class Hardware:
    """`guess_rps`: where a search for the right rate begins."""

    name: str
    profile: str
    instances: int
    slos: tuple[Slo, ...]
    guess_rps: float


@dataclass(frozen=True, slots=True)
class Cell:
    traffic: Traffic
    hardware: Hardware
    slo: Slo
    link_gbyte_per_s: float

    @property
    def name(self) -> str:
        """Such as code/8b-h200/1000-15/12GB."""
        slo = f"{self.slo.ttft_s * 1000:.0f}-{(self.slo.tpot_s or 0) * 1000:.0f}"
        return f"{self.traffic.name}/{self.hardware.name}/{slo}/{self.link_gbyte_per_s:g}GB"


@dataclass(frozen=True, slots=True)
class Contender:
    """`prefill` 0: all instances are unified. Otherwise so many prefill, the others decode."""

    policy: str
    instances: int
    prefill: int = 0
    chunk_tokens: int = SUBJECT_CHUNK_TOKENS

    @property
    def name(self) -> str:
        """Such as threshold 3+5, or always_local 8 chunk 512."""
        pools = f"{self.prefill}+{self.instances - self.prefill}" if self.prefill else f"{self.instances}"
        return f"{self.policy} {pools}" + (
            "" if self.chunk_tokens == SUBJECT_CHUNK_TOKENS else f" chunk {self.chunk_tokens}"
        )

    @property
    def pools(self) -> Mapping[Role, int]:
        if not self.prefill:
            return {Role.UNIFIED: self.instances}
        return {Role.PREFILL: self.prefill, Role.DECODE: self.instances - self.prefill}


TRAFFIC = (
    Traffic("conversation", "mooncake_conversation_trace.jsonl", "mooncake"),
    Traffic("code", "azure2023_code.csv", "azure"),
    Traffic("reasoning", "servegen_deepseek_r1_30min_sample.csv", "servegen"),
    Traffic("sharegpt", "sharegpt_v3_sample_lengths.csv", "sharegpt"),
)
_SLOS_8B = (Slo(1.0, 0.015, 0.1), Slo(0.5, 0.012, 0.1))
_SLOS_70B = (Slo(2.0, 0.06, 0.25), Slo(0.5, 0.03, 0.25))
HARDWARE = (
    Hardware("8b-h200", "h200-8b-tp1", 8, _SLOS_8B, 24.0),
    Hardware("70b-h100", "h100-70b-tp4", 8, _SLOS_70B, 8.0),
    Hardware("small-8b-h100", "h100-8b-tp1", 2, _SLOS_8B, 4.0),
)
LINKS_GBYTE_PER_S = (12.0, 1.0)


def all_cells() -> list[Cell]:
    return [
        Cell(traffic, hardware, slo, link)
        for hardware in HARDWARE
        for traffic in TRAFFIC
        for slo in hardware.slos
        for link in LINKS_GBYTE_PER_S
    ]


def quick_cells() -> list[Cell]:
    """Every traffic on every hardware once; objectives and links take turns, so that each meets each."""
    found = []
    for i, j in itertools.product(range(len(HARDWARE)), range(len(TRAFFIC))):
        hardware = HARDWARE[i]
        slo = hardware.slos[(i + j) % 2]
        link = LINKS_GBYTE_PER_S[(i + i // 2 + j // 2) % 2]
        found.append(Cell(TRAFFIC[j], hardware, slo, link))
    return found


def matching(cells: Sequence[Cell], pattern: str | None) -> list[Cell]:
    """Those with the pattern somewhere in their name; * and ? as in file names."""
    return [cell for cell in cells if pattern is None or fnmatchcase(cell.name, f"*{pattern}*")]


def subject(cell: Cell) -> Contender:
    """What has to hold its own: soft roles, and no ratio given."""
    return Contender("break_even", cell.hardware.instances)


def reference(cell: Cell) -> Contender:
    """Where the search for the right rate begins."""
    return Contender("always_local", cell.hardware.instances)


def baselines(cell: Cell, *, every_split: bool) -> list[Contender]:
    """All fixed configurations of the same instances; without `every_split` those of every other split.

    least_loaded on unified instances isn't one: it does there what always_local does.
    """
    total = cell.hardware.instances
    step = 1 if every_split or total < 4 else 2
    splits = range(step, total, step)
    few = [k for k in splits if k % 2 == 0 or total < 4] if every_split else [total // 2]
    found = [Contender("always_local", total), Contender("always_local", total, chunk_tokens=512)]
    found += [Contender(policy, total, k) for policy in ("always_remote", "threshold", "isl_bounding") for k in splits]
    found += [Contender("ttft_min", total, k) for k in (0, *few)]
    found += [Contender("least_loaded", total, k) for k in few]
    return found
