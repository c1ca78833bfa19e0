"""The engines that can be simulated: shipped ones by name, one's own by its file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from disagg_router.errors import ConfigError
from disagg_router.model import Role
from disagg_router.sim.jobs import Timings
from disagg_router.sim.profile_file import Linear, ProfileFile, read_profile, read_tables
from disagg_router.sim.timings import LinearTimings, StepTables, TableTimings
from disagg_router.timing import TargetTiming

FOLDER = Path(__file__).parent / "tables"
NAMES = (
    "a100-8b-tp1",
    "a100-70b-tp4",
    "h100-8b-tp1",
    "h100-70b-tp4",
    "h200-8b-tp1",
    "h200-70b-tp4",
    "a100-13b-tp1-distserve",
    "a100-13b-tp1-vllm2023",
)
FITTED_FROM_TOKENS = 256  # a shorter prefill takes as long as reading the weights, which no straight line has


@dataclass(frozen=True, slots=True)
class Profile:
    """One engine. `prior` is what a policy would believe that knew it: the fit of the policy's form to these timings,
    host time included. `noise_sd` is relative, of each step."""

    name: str
    timings: Timings
    kv_capacity_tokens: int
    kv_bytes_per_token: float
    gpus: int
    handoff_s: float
    noise_sd: float
    prior: TargetTiming


def load_profiles(text: str) -> Mapping[Role, Profile]:
    """`text`: NAME or FILE for every role, or prefill=A,decode=B[,unified=C]. Raises ConfigError."""
    if "=" not in text:
        profile = load_profile(text)
        return dict.fromkeys(Role, profile)
    found: dict[Role, Profile] = {}
    for part in text.split(","):
        role, _, name = (word.strip() for word in part.partition("="))
        if role not in list(Role):
            raise ConfigError(f"{role!r} is no role: give profiles as prefill=A,decode=B or as one for all")
        if Role(role) in found:
            raise ConfigError(f"{role} has two profiles: keep one of them")
        found[Role(role)] = load_profile(name)
    return found


def load_profile(name_or_file: str) -> Profile:
    """A shipped one, or the one in a YAML file (tables/README.md). Raises ConfigError."""
    if name_or_file in NAMES:
        return _profile(name_or_file, FOLDER / f"{name_or_file}.yaml")
    file = Path(name_or_file)
    if file.suffix not in (".yaml", ".yml") and not file.is_file():
        names = ", ".join(NAMES)
        raise ConfigError(f"there is no profile {name_or_file!r}: give the path of a YAML file or one of {names}")
    return _profile(file.stem, file)


def _profile(name: str, file: Path) -> Profile:
    said = read_profile(file)
    host_s = said.host_ms / 1000
    timings, prior = _timings(said, file.parent, host_s)
    return Profile(
        name,
        timings,
        said.kv_capacity_tokens,
        said.kv_bytes_per_token,
        said.gpus,
        said.handoff_ms / 1000,
        said.noise_sd,
        prior,
    )


def _timings(said: ProfileFile, folder: Path, host_s: float) -> tuple[Timings, TargetTiming]:
    if said.tables is not None:
        tables = read_tables(said.tables, folder)
        return TableTimings(tables, host_s), fitted(tables, host_s)
    assert said.linear is not None
    return _linear(said.linear, host_s)


def _linear(said: Linear, host_s: float) -> tuple[Timings, TargetTiming]:
    large = said.large
    timings = LinearTimings(
        prefill=(said.prefill_a_s, said.prefill_b_s, said.prefill_c_s),
        step=(said.step_d_s, said.step_e_s, said.step_f_s),
        large_step=(large.step_d_s, large.step_e_s, large.step_f_s) if large else None,
        large_from=large.from_streams if large else 0,
        host_s=host_s,
    )
    prior = TargetTiming(
        prefill_a_s=said.prefill_a_s + host_s,
        prefill_b_s=said.prefill_b_s,
        prefill_c_s=said.prefill_c_s,
        step_d_s=said.step_d_s + host_s,
        step_e_s=said.step_e_s,
        step_f_s=said.step_f_s,
    )
    return timings, prior


def fitted(tables: StepTables, host_s: float) -> TargetTiming:
    """The policy's form, by least squares on relative errors."""
    long = [row for row in tables.prefill if row.prompts * row.new_tokens >= FITTED_FROM_TOKENS]
    prefill = long if len(long) >= 3 else tables.prefill
    a_s, b_s, c_s = _least_squares(
        [
            (1, row.prompts * row.new_tokens, row.prompts * row.new_tokens * (row.new_tokens / 2 + row.cached_tokens))
            for row in prefill
        ],
        [row.step_s for row in prefill],
    )
    d_s, e_s, f_s = _least_squares(
        [(1, row.streams, row.streams * row.context_tokens) for row in tables.decode],
        [row.step_s for row in tables.decode],
    )
    return TargetTiming(a_s + host_s, b_s, c_s, d_s + host_s, e_s, f_s)


def _least_squares(features: Sequence[tuple[float, float, float]], times_s: Sequence[float]) -> tuple[float, ...]:
    """Coefficients that come out below zero are zero: a table may have too little of what they stand for."""
    times = np.asarray(times_s)
    found, *_ = np.linalg.lstsq(np.asarray(features) / times[:, None], np.ones(len(times)), rcond=None)
    return tuple(max(0.0, float(value)) for value in found)
