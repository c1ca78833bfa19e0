"""The decision log: a file with one JSON object per line and routed request. Its fields stand in README.md."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import IO

import msgspec

from disagg_router.errors import ConfigError
from disagg_router.model import Slo, Target
from disagg_router.observability.requests import RequestRecord

log = logging.getLogger(__name__)

CLOSE_LIMIT_S = 5.0
# JSON has no infinity: such a number is written as null.
Number = float | None


class Predicted(msgspec.Struct, frozen=True):
    """A path's TTFT."""

    mean_s: Number
    sd_s: Number


class Objectives(msgspec.Struct, frozen=True):
    ttft_s: Number
    tpot_s: Number
    max_gap_s: Number


class ObjectivesMet(msgspec.Struct, frozen=True):
    """None: not measured."""

    ttft: bool | None
    tpot: bool | None
    max_gap: bool | None


class DecisionLine(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Every field is always there; null is "not known"."""

    at_s: float
    request_id: str
    endpoint: str
    stream: bool | None
    prompt_tokens: int | None
    cached_tokens: dict[str, int]
    expected_output_tokens: Number
    slo: Objectives | None
    path: str
    reason: str | None
    decode: str | None
    prefill: str | None
    predicted: dict[str, Predicted]
    chance: Number
    gain: Number
    terms: dict[str, Number]
    status: int
    outcome: str
    rejected_early: bool
    queue_wait_s: float
    ttft_s: Number
    tpot_s: Number
    max_gap_s: Number
    total_s: Number
    output_tokens: int | None
    met: ObjectivesMet


class DecisionLog:
    """Appends the records of ended requests to a file, from a thread of its own: `add` never waits for a disk.

    Past `max_bytes` the file becomes PATH.1, in place of an older one. When more than `queue_records` wait to be
    written, further ones are dropped and counted. One file is one process's: two would rotate it under each other.
    """

    def __init__(
        self,
        path: str,
        *,
        max_bytes: int = 64 * 2**20,
        queue_records: int = 4096,
        flush_s: float = 1.0,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        """Raises ConfigError when the file cannot be opened."""
        self._file = _RotatedFile(path, max_bytes)
        try:
            self._file.open()
        except OSError as exc:
            why = exc.strerror or str(exc)
            raise ConfigError(f"the decision log {path} cannot be written ({why}): name another file") from exc
        self._queue_records, self._flush_s, self._wall_s = queue_records, flush_s, wall_s
        self._waiting: deque[tuple[float, RequestRecord]] = deque()
        self._written = self._dropped = self._failed = 0
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._write_until_closed, name="decision-log", daemon=True)
        self._thread.start()

    def add(self, record: RequestRecord) -> None:
        """The record must not change any more."""
        if self._closing or len(self._waiting) >= self._queue_records:
            self._dropped += 1
            return
        self._waiting.append((self._wall_s(), record))
        if len(self._waiting) * 2 >= self._queue_records and not self._wake.is_set():
            self._wake.set()

    def counts(self) -> Mapping[str, int]:
        """Lines `written`, `dropped` for want of room, and `failed`: those that the file did not take."""
        return {"written": self._written, "dropped": self._dropped, "failed": self._failed}

    def close(self) -> None:
        """Write what waits, for CLOSE_LIMIT_S at most."""
        self._closing = True
        self._wake.set()
        self._thread.join(CLOSE_LIMIT_S)

    # --- the writing thread ---

    def _write_until_closed(self) -> None:
        while not self._closing:
            self._wake.wait(self._flush_s)
            self._wake.clear()
            self._write_waiting()
        self._write_waiting()
        self._file.close()

    def _write_waiting(self) -> None:
        lines = []
        while self._waiting:
            ended_at_s, record = self._waiting.popleft()
            try:
                lines.append(msgspec.json.encode(line_of(record, ended_at_s)) + b"\n")
            except (msgspec.MsgspecError, TypeError, ValueError):  # a policy's terms may hold anything
                self._failed += 1
                log.exception("a decision could not be written as JSON")
        try:
            self._file.write(lines)
            self._written += len(lines)
        except OSError as exc:
            self._failed += len(lines)
            log.warning("%d lines of the decision log may be lost: %s", len(lines), exc)


class _RotatedFile:
    """Opened again by the next write after an error."""

    def __init__(self, path: str, max_bytes: int) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._file: IO[bytes] | None = None
        self._size_bytes = 0

    def open(self) -> IO[bytes]:
        """Raises OSError, also for what is no regular file: a device cannot be rotated, a pipe would be waited for."""
        if os.path.exists(self._path) and not os.path.isfile(self._path):
            raise OSError(errno.EINVAL, "not a regular file", self._path)
        self._file = file = open(self._path, "a+b")  # noqa: SIM115 - closed by close()
        self._size_bytes = file.seek(0, os.SEEK_END)
        if self._size_bytes:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # somebody was cut off in the middle of a line
                self._size_bytes += file.write(b"\n")
        return file

    def write(self, lines: Iterable[bytes]) -> None:
        """Raises OSError."""
        try:
            file = self._file or self.open()
            for line in lines:
                if self._size_bytes and self._size_bytes + len(line) > self._max_bytes:
                    file.close()
                    os.replace(self._path, f"{self._path}.1")
                    file = self.open()
                self._size_bytes += file.write(line)
            file.flush()
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # it tries once more to write what could not be written
                file.close()


def line_of(record: RequestRecord, at_s: float) -> DecisionLine:
    """`at_s`: when the request ended, in seconds since 1970."""
    request, decision, met = record.request, record.decision, record.met
    return DecisionLine(
        at_s=at_s,
        request_id=record.request_id,
        endpoint=record.endpoint,
        stream=request.stream if request else None,
        prompt_tokens=request.prompt_tokens if request else None,
        cached_tokens={target_name(target): n for target, n in request.cached_tokens.items()} if request else {},
        expected_output_tokens=request.output_tokens if request else None,
        slo=_objectives(request.slo) if request else None,
        path=record.path,
        reason=decision.reason if decision else None,
        decode=target_name(decision.decode) if decision else None,
        prefill=target_name(decision.prefill) if decision and decision.prefill else None,
        predicted={path: Predicted(it.mean_s, it.sd_s) for path, it in decision.ttft.items()} if decision else {},
        chance=decision.chance if decision else None,
        gain=decision.gain if decision else None,
        terms=dict(decision.terms) if decision else {},
        status=record.status,
        outcome=record.outcome,
        rejected_early=record.rejected_early,
        queue_wait_s=record.queue_wait_s,
        ttft_s=record.ttft_s,
        tpot_s=record.tpot_s,
        max_gap_s=record.max_gap_s,
        total_s=None if record.ended_s is None else record.ended_s - record.arrived_s,
        output_tokens=record.output_tokens,
        met=ObjectivesMet(met.ttft, met.tpot, met.max_gap),
    )


def target_name(target: Target) -> str:
    """The instance, and its rank where it is not the first: `decode-0`, `decode-0/1`."""
    return target.instance if target.dp_rank == 0 else f"{target.instance}/{target.dp_rank}"


def _objectives(slo: Slo) -> Objectives:
    return Objectives(slo.ttft_s, slo.tpot_s, slo.max_gap_s)
