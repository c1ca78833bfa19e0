"""`disagg-router explain` and what /debug/route answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import pytest

from disagg_router.cli import main
from disagg_router.errors import ErrorCode
from disagg_router.interfaces import Claim, Reject, Reserved, Wait
from disagg_router.proxy.admin import explain
from tests.observability.records import DECISION, LINES, line


@pytest.fixture
def inside(monkeypatch, capsys):
    """(exit code, stdout, lines of stderr) of a command, in this process."""

    def inside(*words: str) -> tuple[object, str, list[str]]:
        monkeypatch.setattr(sys, "argv", ["disagg-router", *words])
        code: object = 0
        try:
            main()
        except SystemExit as end:
            code = end.code
        shown = capsys.readouterr()
        return code, shown.out, shown.err.splitlines()

    return inside


def write(path: Path, *lines, tail: bytes = b"") -> str:
    path.write_bytes(b"".join(msgspec.json.encode(it) + b"\n" for it in lines) + tail)
    return str(path)


def test_as_json(tmp_path, inside):
    """One object, whose keys are the summary's; the last line was cut off."""
    code, out, errors = inside("explain", write(tmp_path / "log", *LINES, tail=b'{"at_s": 17'), "--json")
    assert (code, errors) == (0, [])
    shown = json.loads(out)
    assert (shown["requests"], shown["unreadable_lines"]) == (7, 1)
    assert shown["decisions"][0] == {"path": "local", "reason": "short_prompt", "requests": 2, "share": 2 / 7}
    assert shown["paths"][1]["accuracy"] == {"requests": 1, "ratio_p50": 4.0, "ratio_p90": 4.0, "error_p50": 0.75}
    assert shown["other_arm"] == {"decisions": 3, "better": 1 / 3}
    assert shown["rejections"][0] == {"code": "decode_full", "requests": 1, "early": 1}
    assert [it["request_id"] for it in shown["worst"]] == ["d", "b", "c", "a"]


def test_as_tables(tmp_path, inside):
    """The same for people, in 80 columns."""
    code, out, errors = inside("explain", write(tmp_path / "log", *LINES, tail=b"{"))
    assert (code, errors) == (0, [])
    assert max(map(len, out.splitlines())) <= 80
    words = " ".join(out.split())
    for told in (
        "7 requests from 2023-11-14 22:13:20 to 2023-11-14 22:14:20 UTC; 1 unreadable line(s) left out",
        "by more than its standard deviation, in 33.3% of 3 decisions",
        "│ local │ short_prompt │ 2 │ 28.6% │",
        "│ local │ 100 ms │ 198 ms │ 3 │ 1.00 │ 1.80 │ 50.0% │",
        "│ local │ 3 │ 66.7% │ 100.0% │ 100.0% │ 66.7% │",
        "│ decode_full │ 1 │ 1 │",
        "│ remote_prefill │ 1,000 ms │ 4,000 ms │ 4.00 │ d │",
        "<= 0.5 1 ███",
    ):
        assert told in words


def test_tables_of_little(tmp_path, inside):
    """Nothing predicted, nothing rejected: no empty tables."""
    code, out, _ = inside("explain", write(tmp_path / "log", line("x", "local", "policy")))
    assert code == 0
    assert "Decisions" in out
    for absent in ("Rejections", "Worst", "Measured"):
        assert absent not in out


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "is empty: serve some requests"), (b"hello\n", "is no decision log"), (None, "cannot read")],
)
def test_nothing_to_explain(tmp_path, inside, content, says):
    """Exit code 2 and one line."""
    path = tmp_path / "log"
    if content is not None:
        path.write_bytes(content)
    code, out, [told] = inside("explain", str(path))
    assert (code, out, told[:7]) == (2, "", "error: ")
    assert says in told


@pytest.mark.parametrize(
    ("admission", "shown"),
    [
        (None, None),
        (
            Reserved(Claim(decode_kv_bytes=5e6, prefill_kv_bytes=4e6, link_bytes=3e6, prefill_tokens=936)),
            {
                "verdict": "admitted", "decode_kv_bytes": 5e6, "prefill_kv_bytes": 4e6, "link_bytes": 3e6,
                "prefill_tokens": 936, "prefill_attention": 0.0, "prefill_s": 0.0, "prefill_sd_s": 0.0,
            },
        ),
        (Wait(ErrorCode.DECODE_FULL, ready_s=12.5), {"verdict": "wait", "code": "decode_full", "ready_s": 12.5}),
        (Reject(ErrorCode.LINK_FULL, retry_s=3.0), {"verdict": "rejected", "code": "link_full", "retry_s": 3.0}),
    ],
)  # fmt: skip
def test_a_decision_explained(admission, shown):
    """Both arms, every term, and what admission says to it."""
    assert explain(DECISION, admission) == {
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
        "terms": {"uncached_tokens": 936.0, "free_bytes": float("inf")},
        "admission": shown,
    }
