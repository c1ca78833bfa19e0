"""A profile's YAML file, and the tables it names (format: tables/README.md)."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from disagg_router.errors import ConfigError
from disagg_router.sim.timings import DecodeRow, MixedRow, PrefillRow, StepTables
from disagg_router.yaml_file import read_yaml

WHICH_ROWS = "profile"  # the column of a CSV with several machines' rows
_Row = TypeVar("_Row", PrefillRow, DecodeRow, MixedRow)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class LargeSteps(_Strict):
    """Decode steps of `from_streams` streams and more."""

    from_streams: PositiveInt
    step_d_s: NonNegativeFloat
    step_e_s: NonNegativeFloat
    step_f_s: NonNegativeFloat


class Linear(_Strict):
    """TargetTiming's coefficients."""

    prefill_a_s: NonNegativeFloat
    prefill_b_s: PositiveFloat
    prefill_c_s: NonNegativeFloat
    step_d_s: PositiveFloat
    step_e_s: NonNegativeFloat
    step_f_s: NonNegativeFloat
    large: LargeSteps | None = None


class Tables(_Strict):
    """Paths from the file's folder. `rows`: of CSVs with a column `profile`, its value in the rows meant."""

    prefill: Path
    decode: Path
    mixed: Path | None = None
    rows: str | None = None


class ProfileFile(_Strict):
    linear: Linear | None = None
    tables: Tables | None = None
    kv_capacity_tokens: PositiveInt
    kv_bytes_per_token: PositiveFloat
    gpus: PositiveInt = 1
    host_ms: NonNegativeFloat = 0.0
    handoff_ms: NonNegativeFloat = 0.0
    noise_sd: Annotated[float, Field(ge=0, lt=1)] = 0.0

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.linear is None) == (self.tables is None):
            raise ValueError("must hold exactly one of linear, tables")
        return self


def read_profile(file: Path) -> ProfileFile:
    """Raises ConfigError."""
    return read_yaml(file, ProfileFile, "profile")


def read_tables(named: Tables, folder: Path) -> StepTables:
    """Raises ConfigError."""
    prefill, decode = folder / named.prefill, folder / named.decode
    tables = StepTables(
        _rows(prefill, PrefillRow, named.rows),
        _rows(decode, DecodeRow, named.rows),
        _rows(folder / named.mixed, MixedRow, named.rows) if named.mixed is not None else (),
    )
    cold = {(row.prompts, row.new_tokens) for row in tables.prefill if not row.cached_tokens}
    if sum(prompts == 1 for prompts, _ in cold) < 2:
        raise ConfigError(f"{prefill} must hold rows of one prompt without cached tokens for at least two new_tokens")
    if not any(prompts == 2 and (1, 2 * new) in cold for prompts, new in cold):
        raise ConfigError(f"{prefill} must hold a row of two prompts of half the new_tokens of a row of one")
    if not any(row.cached_tokens and row.prompts == 1 and (1, row.new_tokens) in cold for row in tables.prefill):
        raise ConfigError(f"{prefill} must hold a row with cached_tokens beside one of the same new_tokens without")
    contexts = Counter(row.streams for row in tables.decode)
    if not contexts or min(contexts.values()) < 2:
        raise ConfigError(f"{decode} must hold at least two context_tokens for each number of streams")
    return tables


def _rows(file: Path, make: type[_Row], which: str | None) -> list[_Row]:
    """`make`'s fields are the file's columns, the last one in milliseconds as step_ms."""
    counted: tuple[str, ...] = make._fields[:-1]
    found: list[_Row] = []
    seen: set[tuple[int, ...]] = set()
    for line, record in _records(file, [*counted, "step_ms"], which):
        try:
            counts: tuple[int, ...] = tuple(int(record[name]) for name in counted)
            step_ms = float(record["step_ms"])
        except (TypeError, ValueError) as exc:
            raise ConfigError(f"{file}, line {line}: {exc}; give whole counts and a time in milliseconds") from exc
        if min(counts[:2]) < 1 or min(counts) < 0 or not 0 < step_ms < math.inf:
            raise ConfigError(f"{file}, line {line}: {counted[0]} and {counted[1]} must be 1 or more, step_ms above 0")
        if counts in seen:
            raise ConfigError(f"{file}, line {line} says again what an earlier line says: keep one of them")
        seen.add(counts)
        found.append(make._make((*counts, step_ms / 1000)))
    if not found:
        raise ConfigError(f"{file} holds no rows{f' with {WHICH_ROWS} {which!r}' if which else ''}: add some")
    return found


def _records(file: Path, columns: Sequence[str], which: str | None) -> Iterator[tuple[int, Mapping[str, str]]]:
    """With their lines' numbers. Further columns are not looked at."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read {file}: {_reason(exc)}; give the path of a CSV file") from exc
    reader = csv.DictReader(lines)
    wanted = [*columns, *([WHICH_ROWS] if which is not None else [])]
    missing = [name for name in wanted if name not in (reader.fieldnames or ())]
    if missing:
        raise ConfigError(f"{file} has no column {missing[0]}: its first line must name {', '.join(wanted)}")
    for record in reader:
        if which is None or record[WHICH_ROWS] == which:
            yield reader.line_num, record


def _reason(exc: OSError | UnicodeDecodeError) -> str:
    return (exc.strerror or str(exc)) if isinstance(exc, OSError) else "it is not UTF-8 text"
