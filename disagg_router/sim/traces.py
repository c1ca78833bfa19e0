"""Readers of public request traces, one per format: a file's rows as typed records, one at a time.

A row that is not of its format raises ConfigError; a request without prompt or answer is a row like any other.
"""

from __future__ import annotations

import csv
import math
from array import array
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, TypeAlias, TypeVar

import msgspec

from disagg_router.errors import ConfigError

ROOT = -1  # the parent_chat_id of a conversation's first request
MAX_BLOCK_IDS = 2**31

_Tokens: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
_BlockId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=MAX_BLOCK_IDS)]
_AnyRow = TypeVar("_AnyRow", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class LengthRow:
    """`at_s` counts from any moment, the same for a whole file."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class HashedRow:
    """`block_ids` of the prompt, each standing for its block and all that is before it; the last block may be partial.

    `chat_id` and `parent_chat_id` (ROOT: none) only where a format has them.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    block_tokens: int
    block_ids: array[int]
    chat_id: int | None = None
    parent_chat_id: int | None = None


@dataclass(frozen=True, slots=True)
class TurnRow:
    """A conversation's turns follow each other in their file; `history_tokens` are all prompts and answers before."""

    conversation: str
    turn: int
    new_prompt_tokens: int
    history_tokens: int
    output_tokens: int

    @property
    def prompt_tokens(self) -> int:
        return self.history_tokens + self.new_prompt_tokens


Row: TypeAlias = LengthRow | HashedRow | TurnRow
Reader: TypeAlias = Callable[[Path], Generator[Row, None, None]]


class _Mooncake(msgspec.Struct):
    timestamp: float  # in milliseconds
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: list[_BlockId]


class _Bailian(msgspec.Struct):
    timestamp: float  # in seconds
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: list[_BlockId]
    chat_id: int
    parent_chat_id: int = ROOT


def mooncake(file: Path) -> Generator[HashedRow, None, None]:
    """kvcache-ai/Mooncake, FAST25-release: blocks of 512 tokens; its times are quantised to about 3 s."""
    for line, row in _json_rows(file, _Mooncake):
        ids = _block_ids(file, line, row, 512)
        yield HashedRow(row.timestamp / 1000, row.input_length, row.output_length, 512, ids)


def bailian(file: Path) -> Generator[HashedRow, None, None]:
    """Qwen-Bailian anonymised traces, `*_blksz_16.jsonl`: blocks of 16 tokens."""
    for line, row in _json_rows(file, _Bailian):
        ids = _block_ids(file, line, row, 16)
        chat = row.chat_id, row.parent_chat_id
        yield HashedRow(row.timestamp, row.input_length, row.output_length, 16, ids, *chat)


def azure(file: Path) -> Generator[LengthRow, None, None]:
    """AzurePublicDataset's LLM inference traces: 2023's times have seven decimals, 2024's a time zone."""
    return _timed(file, ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _posix_s)


def burstgpt(file: Path) -> Generator[LengthRow, None, None]:
    """BurstGPT, with or without its columns Session ID and Elapsed time; a failed request has no answer."""
    return _timed(file, ("Timestamp", "Request tokens", "Response tokens"), float)


def servegen(file: Path) -> Generator[LengthRow, None, None]:
    """Requests sampled from alibaba/ServeGen, all clients together."""
    return lengths(file)


def lengths(file: Path) -> Generator[LengthRow, None, None]:
    """The simplest one, for traces of one's own."""
    return _timed(file, ("arrival_s", "input_tokens", "output_tokens"), float)


def sharegpt(file: Path) -> Generator[TurnRow, None, None]:
    """Lengths of ShareGPT's conversations, which have no times."""
    columns = ("turn", "new_prompt_tokens", "history_tokens", "output_tokens")
    for line, (conversation, *texts) in _csv_rows(file, ("conv", *columns)):
        counts = [_count(file, line, column, text) for column, text in zip(columns, texts, strict=True)]
        yield TurnRow(conversation, *counts)


FORMATS: Mapping[str, Reader] = MappingProxyType(
    {
        "mooncake": mooncake,
        "azure": azure,
        "burstgpt": burstgpt,
        "bailian": bailian,
        "servegen": servegen,
        "sharegpt": sharegpt,
        "lengths": lengths,
    }
)
QUANTA_S: Mapping[str, float] = MappingProxyType({"mooncake": 3.0})  # of formats whose times are coarse


def _timed(
    file: Path, columns: tuple[str, str, str], seconds: Callable[[str], float]
) -> Generator[LengthRow, None, None]:
    """`columns`: the time, the prompt's and the answer's tokens."""
    when, prompt, output = columns
    for line, texts in _csv_rows(file, columns):
        try:
            at_s = seconds(texts[0])
        except ValueError as exc:
            raise ConfigError(f"{file}, line {line}: {when} {texts[0]!r} is no time: correct the row") from exc
        if not math.isfinite(at_s):
            raise ConfigError(f"{file}, line {line}: {when} {texts[0]!r} is no time: correct the row")
        yield LengthRow(at_s, _count(file, line, prompt, texts[1]), _count(file, line, output, texts[2]))


def _posix_s(text: str) -> float:
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _count(file: Path, line: int, column: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"{file}, line {line}: {column} {text!r} is no whole number: correct the row")
    return int(text)


def _csv_rows(file: Path, columns: Sequence[str]) -> Generator[tuple[int, list[str]], None, None]:
    """These columns of each row, with its line's number. Further columns are not looked at."""
    records = csv.reader(_lines(file))
    try:
        header = [name.strip() for name in next(records, ())]
        missing = [name for name in columns if name not in header]
        if missing:
            needed = ", ".join(columns)
            raise ConfigError(
                f"{file}, line 1 names no column {missing[0]}: give a file with {needed}, or another format"
            )
        places = [header.index(name) for name in columns]
        for record in records:
            if len(record) <= max(places):
                if not record:
                    continue
                raise ConfigError(f"{file}, line {records.line_num} ends early: complete it or take it out")
            yield records.line_num, [record[place].strip() for place in places]
    except csv.Error as exc:
        raise ConfigError(f"{file}, line {records.line_num} is not CSV: {exc}; correct or take it out") from exc


def _json_rows(file: Path, form: type[_AnyRow]) -> Generator[tuple[int, _AnyRow], None, None]:
    decoder = msgspec.json.Decoder(form)
    for line, text in enumerate(_lines(file), start=1):
        if not text.strip():
            continue
        try:
            yield line, decoder.decode(text)
        except msgspec.DecodeError as exc:  # a ValidationError is one of them
            fields = ", ".join(form.__struct_fields__)
            raise ConfigError(f"{file}, line {line}: {exc}; each line must be an object with {fields}") from exc


def _block_ids(file: Path, line: int, row: _Mooncake | _Bailian, block_tokens: int) -> array[int]:
    """Of full blocks, and maybe of the partial one: another count means another block size, thus another format."""
    full, partial = divmod(row.input_length, block_tokens)
    if not full <= len(row.hash_ids) <= full + bool(partial):
        raise ConfigError(
            f"{file}, line {line} has {len(row.hash_ids)} hash_ids for {row.input_length} tokens, which are "
            f"{full + bool(partial)} blocks of {block_tokens}: give another format, or correct the row"
        )
    return array("I", row.hash_ids)


def _lines(file: Path) -> Generator[str, None, None]:
    try:
        with file.open(encoding="utf-8-sig", newline="") as opened:
            yield from opened
    except OSError as exc:
        raise ConfigError(f"cannot read {file}: {exc.strerror or exc}; give the path of a trace") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{file} is not UTF-8 text: unpack or convert it first") from exc
