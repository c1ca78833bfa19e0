"""Trace files of every format: what their rows become, and what is said of a row that is not of the format."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np
import pytest

from disagg_router.errors import ConfigError
from disagg_router.sim.traces import FORMATS, ROOT, HashedRow, LengthRow, TurnRow

SHARED = Path(__file__).parents[2].parent / "shared" / "traces"
needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="the public traces are not beside the clone")

MOONCAKE = '{"timestamp": 2999, "input_length": 513, "output_length": 7, "hash_ids": [0, 46]}\n'
BAILIAN = (
    '{"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.25, "input_length": 33, "output_length": 132, '
    '"type": "text", "turn": 2, "hash_ids": [1089, 1090, 6326]}\n'
    '{"chat_id": 160, "parent_chat_id": -1, "timestamp": 62.0, "input_length": 16, "output_length": 1, '
    '"type": "text", "turn": 1, "hash_ids": [2]}\n'
)
AZURE_2023 = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.9799600,4808,10\r\n"
AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01+00:00,7,9\n"
)
BURSTGPT_1 = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
    "7,GPT-4,0,0,0,API log\n"
)
BURSTGPT_3 = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5.5,,2.125,ChatGPT,472,18,490,API log\n"
)
SERVEGEN = "arrival_s,input_tokens,output_tokens,client\n0.015,60,350,41\n"
SHAREGPT = "conv,turn,new_prompt_tokens,history_tokens,output_tokens\n0,0,34,0,252\n0,1,37,286,325\n"
LENGTHS = "\ufeffarrival_s,input_tokens,output_tokens\n0.046927,85,416\n\n"


@pytest.mark.parametrize(
    ("format_name", "text", "rows"),
    [
        ("mooncake", MOONCAKE, [HashedRow(2.999, 513, 7, 512, array("I", [0, 46]))]),
        (
            "bailian",
            BAILIAN,
            [
                HashedRow(61.25, 33, 132, 16, array("I", [1089, 1090, 6326]), 159, 55),
                HashedRow(62.0, 16, 1, 16, array("I", [2]), 160, ROOT),
            ],
        ),
        # date -u -d '2023-11-16 18:17:03' +%s
        pytest.param("azure", AZURE_2023, [LengthRow(1700158623.97996, 4808, 10)], id="azure 2023"),
        pytest.param(
            "azure", AZURE_2024, [LengthRow(1715299200.00993, 2162, 5), LengthRow(1715299201.0, 7, 9)], id="azure 2024"
        ),
        pytest.param("burstgpt", BURSTGPT_1, [LengthRow(5.0, 472, 18), LengthRow(7.0, 0, 0)], id="burstgpt 1"),
        pytest.param("burstgpt", BURSTGPT_3, [LengthRow(5.5, 472, 18)], id="burstgpt 3"),
        ("servegen", SERVEGEN, [LengthRow(0.015, 60, 350)]),
        ("sharegpt", SHAREGPT, [TurnRow("0", 0, 34, 0, 252), TurnRow("0", 1, 37, 286, 325)]),
        pytest.param("lengths", LENGTHS, [LengthRow(0.046927, 85, 416)], id="byte-order mark and blank line"),
    ],
)
def test_rows(tmp_path, format_name, text, rows):
    """Times come out in seconds, whatever the format's unit, and columns are found by their names."""
    file = tmp_path / "trace"
    file.write_text(text, encoding="utf-8")
    assert list(FORMATS[format_name](file)) == rows


@pytest.mark.parametrize(
    ("format_name", "text", "message"),
    [
        ("mooncake", MOONCAKE + "{", r"line 2: Input data was truncated; each line must be an object with timestamp,"),
        ("mooncake", MOONCAKE.replace("7", '"7"'), r"line 1: Expected `int`, got `str` - at `\$.output_length`;"),
        ("mooncake", MOONCAKE.replace(": 7", ": -7"), r"line 1: Expected `int` >= 0 - at `\$.output_length`;"),
        ("mooncake", MOONCAKE.replace("46", "2147483648"), r"line 1: Expected `int` <= 2147483647"),
        ("mooncake", BAILIAN, r"line 1 has 3 hash_ids for 33 tokens, which are 1 blocks of 512: give another format"),
        ("bailian", MOONCAKE, r"line 1: Object missing required field `chat_id`; each line must be an object with"),
        ("azure", LENGTHS, r"line 1 names no column TIMESTAMP: give a file with TIMESTAMP, ContextTokens, Gen"),
        ("azure", AZURE_2023.replace("-16", "-36"), r"line 2: TIMESTAMP '2023-11-36 18:17:03.9799600' is no time"),
        ("burstgpt", BURSTGPT_1.replace("18,", "18.5,"), r"line 2: Response tokens '18.5' is no whole number: corr"),
        ("servegen", SERVEGEN + "1,2\n", r"line 3 ends early: complete it or take it out"),
        ("lengths", LENGTHS.replace("0.04", "x"), r"line 2: arrival_s 'x6927' is no time: correct the row"),
        ("lengths", LENGTHS.replace("0.046927", "nan"), r"line 2: arrival_s 'nan' is no time: correct the row"),
        ("lengths", LENGTHS.replace("85", "-85"), r"line 2: input_tokens '-85' is no whole number: correct the row"),
        ("lengths", "", r"line 1 names no column arrival_s"),
    ],
)
def test_bad_rows_are_named(tmp_path, format_name, text, message):
    """With file and line, in one sentence that says what to do."""
    file = tmp_path / "trace"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as caught:
        list(FORMATS[format_name](file))
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("format_name", FORMATS)
def test_files_that_cannot_be_read(tmp_path, format_name):
    """One that isn't there and one that is packed, in every format."""
    with pytest.raises(ConfigError, match=r"cannot read .*/none: No such file or directory; give the path of a trace"):
        list(FORMATS[format_name](tmp_path / "none"))
    packed = tmp_path / "packed"
    packed.write_bytes(b"\x1f\x8b\x08\x00\xff\xfe")
    with pytest.raises(ConfigError, match=r"packed is not UTF-8 text: unpack or convert it first"):
        list(FORMATS[format_name](packed))


@needs_shared
def test_sharegpt_turns():
    """The first turns' and the later turns' lengths of the table in reference/modelling.md."""
    rows = [row for row in FORMATS["sharegpt"](SHARED / "sharegpt_v3_sample_lengths.csv") if isinstance(row, TurnRow)]
    later = [row for row in rows if row.turn]
    columns = {
        "first": [row.prompt_tokens for row in rows if not row.turn],
        "new": [row.new_prompt_tokens for row in later],
        "history": [row.history_tokens for row in later],
    }
    assert len(rows) == 41_680
    quantiles = {name: [round(q) for q in np.quantile(values, [0.5, 0.9, 0.99])] for name, values in columns.items()}
    assert quantiles == {"first": [25, 455, 2772], "new": [16, 88, 573], "history": [762, 1528, 1888]}
    means = {name: round(float(np.mean(values))) for name, values in columns.items()}
    assert means == {"first": 193, "new": 46, "history": 817}
