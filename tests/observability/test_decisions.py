"""The decision log: its lines, its bound, its rotation."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from disagg_router.errors import ConfigError
from disagg_router.model import InstanceId, Target
from disagg_router.observability.decisions import DecisionLine, DecisionLog, line_of, target_name
from tests.observability.records import DECISION, record

NEVER_S = 3600.0


def written(path: Path, *records, **options) -> list[dict]:
    with closing(DecisionLog(str(path), wall_s=lambda: 1_700_000_002.0, **options)) as log:
        for one in records:
            log.add(one)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_line(tmp_path):
    """Ids, sizes and times, and nothing beside them; infinity is null."""
    assert written(tmp_path / "log", record()) == [
        {
            "at_s": 1_700_000_002.0,
            "request_id": "r1",
            "endpoint": "/v1/completions",
            "stream": True,
            "prompt_tokens": 1000,
            "cached_tokens": {"d0": 320, "p0/1": 64},
            "expected_output_tokens": 50.0,
            "slo": {"ttft_s": 0.5, "tpot_s": 0.1, "max_gap_s": 0.25},
            "path": "remote_prefill",
            "reason": "prefill_faster",
            "decode": "d0",
            "prefill": "p0/1",
            "predicted": {
                "remote_prefill": {"mean_s": 0.25, "sd_s": 0.05},
                "local": {"mean_s": 0.75, "sd_s": 0.125},
            },
            "chance": 0.9,
            "gain": 0.8,
            "terms": {"uncached_tokens": 936.0, "free_bytes": None},
            "status": 200,
            "outcome": "ok",
            "rejected_early": False,
            "queue_wait_s": 0.125,
            "ttft_s": 0.5,
            "tpot_s": 0.1,
            "max_gap_s": 0.375,
            "total_s": 2.0,
            "output_tokens": 11,
            "met": {"ttft": True, "tpot": True, "max_gap": False},
        }
    ]


def test_a_request_that_was_rejected(tmp_path):
    """Nothing was decided about it; the fields are the same."""
    refused = record(request=None, decision=None, status=429, outcome="queue_full", first_content_s=None)
    [line] = written(tmp_path / "log", refused)
    assert line.keys() == set(DecisionLine.__struct_fields__)
    assert (line["path"], line["reason"], line["outcome"], line["predicted"]) == ("none", None, "queue_full", {})


def test_the_readme_names_every_field():
    """What stands in the file is documented."""
    readme = (Path(__file__).parents[2] / "disagg_router" / "observability" / "README.md").read_text(encoding="utf-8")
    assert [name for name in DecisionLine.__struct_fields__ if f"`{name}`" not in readme] == []


@pytest.mark.parametrize(("rank", "name"), [(0, "d0"), (3, "d0/3")])
def test_targets_are_named_by_instance_and_rank(rank, name):
    """The rank only where there are several."""
    assert target_name(Target(InstanceId("d0"), rank)) == name


def test_lines_are_flushed_without_a_close(tmp_path):
    """So that they can be read while the router runs."""
    path = tmp_path / "log"
    with closing(DecisionLog(str(path), flush_s=0.01)) as log:
        log.add(record())
        for _ in range(500):
            if path.stat().st_size:
                break
            threading.Event().wait(0.01)
        assert json.loads(path.read_text(encoding="utf-8"))["request_id"] == "r1"


class SlowTerms(Mapping[str, float]):
    """Terms that take until they are let go: a disk that hangs looks the same from outside."""

    def __init__(self) -> None:
        self.asked, self.go = threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[str]:
        self.asked.set()
        assert self.go.wait(10)
        return iter(())

    def __len__(self) -> int:
        return 0

    def __getitem__(self, name: str) -> float:
        raise KeyError(name)


def test_a_full_queue_drops_and_counts(tmp_path):
    """`add` returns at once while the writer hangs; what found room is written in order."""
    terms = SlowTerms()
    log = DecisionLog(str(tmp_path / "log"), queue_records=4, flush_s=0.01)
    log.add(record(request_id="slow", decision=dataclasses.replace(DECISION, terms=terms)))
    assert terms.asked.wait(10)
    for i in range(6):
        log.add(record(request_id=f"r{i}"))
    terms.go.set()
    log.close()
    log.add(record(request_id="late"))
    ids = [json.loads(line)["request_id"] for line in (tmp_path / "log").read_bytes().splitlines()]
    assert ids == ["slow", "r0", "r1", "r2", "r3"]
    assert log.counts() == {"written": 5, "dropped": 3, "failed": 0}


def test_half_a_queue_is_written_before_its_time(tmp_path):
    """A burst need not wait for the second to be over."""
    log = DecisionLog(str(tmp_path / "log"), queue_records=8, flush_s=NEVER_S)
    for _ in range(4):
        log.add(record())
    for _ in range(500):
        if log.counts()["written"] == 4:
            break
        threading.Event().wait(0.01)
    assert log.counts() == {"written": 4, "dropped": 0, "failed": 0}
    log.close()


def test_rotation(tmp_path):
    """Past its size the file is put aside, whole lines in both; only one old file is kept."""
    path = tmp_path / "log"
    line_bytes = len(msgspec.json.encode(line_of(record(request_id="r00"), 1_700_000_002.0))) + 1
    kept = written(path, *(record(request_id=f"r{i:02}") for i in range(10)), max_bytes=line_bytes * 4)
    old = [json.loads(line) for line in (tmp_path / "log.1").read_bytes().splitlines()]
    assert [it["request_id"] for it in old] == ["r04", "r05", "r06", "r07"]
    assert [it["request_id"] for it in kept] == ["r08", "r09"]
    assert sorted(it.name for it in tmp_path.iterdir()) == ["log", "log.1"]


def test_a_file_that_exists_is_continued(tmp_path):
    """On a new line where the last one was cut off."""
    path = tmp_path / "log"
    path.write_bytes(b'{"at_s": 1')
    with closing(DecisionLog(str(path))) as log:
        log.add(record())
    first, second = path.read_bytes().splitlines()
    assert (first, json.loads(second)["request_id"]) == (b'{"at_s": 1', "r1")


def test_terms_that_are_no_numbers(tmp_path):
    """A policy's slip costs its own line, and is counted."""
    odd = record(decision=dataclasses.replace(DECISION, terms={"why": object()}))  # type: ignore[dict-item]
    log = DecisionLog(str(tmp_path / "log"))
    log.add(odd)
    log.add(record())
    log.close()
    assert log.counts() == {"written": 1, "dropped": 0, "failed": 1}


def test_a_folder_that_goes_away_and_comes_back(tmp_path):
    """Lines are lost meanwhile, the log is not."""
    folder = tmp_path / "logs"
    folder.mkdir()
    path = folder / "log"
    log = DecisionLog(str(path), max_bytes=1, queue_records=2, flush_s=NEVER_S)

    def add_and_wait(count: int) -> None:
        log.add(record())
        for _ in range(500):
            if sum(log.counts().values()) == count:
                return
            threading.Event().wait(0.01)
        raise AssertionError(log.counts())

    add_and_wait(1)
    path.unlink()
    folder.rmdir()
    add_and_wait(2)
    assert log.counts()["failed"] == 1
    folder.mkdir()
    add_and_wait(3)
    log.close()
    assert log.counts() == {"written": 2, "dropped": 0, "failed": 1}
    assert len(path.read_bytes().splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "why"),
    [("nowhere/log", "No such file or directory"), (".", "not a regular file"), ("pipe", "not a regular file")],
)
def test_a_file_that_cannot_be_opened(tmp_path, name, why):
    """One sentence, when the router starts; a pipe is not waited for."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError) as told:
        DecisionLog(str(tmp_path / name))
    assert str(told.value) == f"the decision log {tmp_path / name} cannot be written ({why}): name another file"
