"""The tiny model of the demo and the engine tests: equal bytes every time, and a template worth testing against."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

MAKE_MODEL = Path(__file__).parents[1] / "examples" / "local-cpu" / "make_model.py"
WEIGHTS_SHA256 = "a5e40cf4d20b7a0e07380e76ac7b691d47800eba50c16d1c87cb711782dbcfc7"

HELLO = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
TOOL_JSON = '{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}'
CALL = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(model)


def build(out: Path) -> Path:
    subprocess.run([sys.executable, str(MAKE_MODEL), str(out)], check=True)
    return out


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def test_two_builds_are_equal_byte_for_byte(model: Path, tmp_path: Path) -> None:
    """Engines on different machines, each with a model of its own making, must hold the same weights."""
    first = digests(model)
    assert first == digests(build(tmp_path))
    assert first["model.safetensors"] == WEIGHTS_SHA256


def test_every_byte_is_one_token(tokenizer: Any) -> None:
    """Prompt lengths in tests are counted in bytes; nothing is added or merged."""
    text = "two  words, ünï\n\t"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("messages", "options", "expected"),
    [
        pytest.param(HELLO, {}, "user: Hi\nassistant: ", id="user"),
        pytest.param(HELLO, {"add_generation_prompt": False}, "user: Hi\n", id="no generation prompt"),
        pytest.param(
            [{"role": "system", "content": "Be kind."}, *HELLO, {"role": "assistant", "content": "Ho"}, *HELLO],
            {},
            "system: Be kind.\nuser: Hi\nassistant: Ho\nuser: Hi\nassistant: ",
            id="several turns",
        ),
        pytest.param(
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "look: "},
                        {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}},
                        {"type": "text", "text": " nice?"},
                    ],
                }
            ],
            {},
            "user: look: <image> nice?\nassistant: ",
            id="content parts",
        ),
        pytest.param(HELLO, {"tools": [TOOL]}, f"settings: tool {TOOL_JSON};\nuser: Hi\nassistant: ", id="tools"),
        pytest.param(
            [
                *HELLO,
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
            ],
            {},
            'user: Hi\nassistant: [call c1 clock {"zone": "UTC"}]\ntool c1: 12:00\nassistant: ',
            id="tool call and result",
        ),
        pytest.param(
            HELLO,
            {"enable_thinking": False},
            "settings: thinking off;\nuser: Hi\nassistant: <think></think> ",
            id="thinking off",
        ),
        pytest.param(
            HELLO, {"enable_thinking": True}, "settings: thinking on;\nuser: Hi\nassistant: ", id="thinking on"
        ),
    ],
)
def test_chat_template(tokenizer: Any, messages: list[Any], options: dict[str, Any], expected: str) -> None:
    """Whatever a request can put into a chat shows in the prompt."""
    options = {"add_generation_prompt": True, **options}
    assert tokenizer.apply_chat_template(messages, tokenize=False, **options) == expected
