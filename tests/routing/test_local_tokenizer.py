"""Token ids made here, with the tokenizers library and transformers as the judges."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from transformers import AutoTokenizer

from disagg_router.errors import NotUnderstood
from disagg_router.routing.local_tokenizer import LocalTokenizer, Prompt
from disagg_router.routing.model_folder import load_tokenizer, model_folder
from disagg_router.routing.request_shapes import request_shapes
from tests.routing.chat_templates import LLAMA_LIKE, QWEN_LIKE
from tests.routing.tiny_tokenizers import byte_level, metaspace, write

USER = {"role": "user", "content": "the prompt"}


def raw(body: dict[str, Any]) -> dict[str, msgspec.Raw]:
    return {key: msgspec.Raw(msgspec.json.encode(value)) for key, value in body.items()}


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "model", byte_level(), QWEN_LIKE)


async def ids_of(tokenizer: LocalTokenizer, body: dict[str, Any]) -> list[int] | None:
    prompt = await tokenizer.prompt(raw(body))
    return None if prompt is None else list(await tokenizer.ids(prompt))


@pytest.mark.parametrize("config", [{}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}])
@pytest.mark.parametrize("build", [byte_level, metaspace])
async def test_a_text_gives_what_transformers_gives(tmp_path, build, config):
    """With the special tokens that the tokenizer puts around it, and without."""
    folder = write(tmp_path, build(), None, **config)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for special in (True, False):
        for text in ("", "the prompt's keys", "Zürich 你好 <|im_end|> and\n\n <s>", "the values are there " * 200):
            expected = theirs(text, add_special_tokens=special)["input_ids"]
            assert await ids_of(ours, {"prompt": text, "add_special_tokens": special}) == expected
    assert await ids_of(ours, {"prompt": "the"}) == theirs("the")["input_ids"]


@pytest.mark.parametrize("template", [QWEN_LIKE, LLAMA_LIKE], ids=["qwen", "llama"])
async def test_a_conversation_that_grows_gives_the_ids_of_the_whole(tmp_path, template):
    """Turn by turn, most of the text known from before, against one encoding of all of it."""
    folder = write(tmp_path, byte_level(), template)
    ours, theirs, rng = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder), random.Random(1)
    messages = []
    for turn in range(12):
        messages += [USER, {"role": "assistant", "content": "there are the values " * rng.randrange(60) + f"{turn}"}]
        asked = [*messages, USER]
        text = theirs.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        assert await ids_of(ours, {"messages": asked}) == theirs(text, add_special_tokens=False)["input_ids"]
    chars = ours.stats()
    assert chars.known_chars > 2 * chars.tokenized_chars


async def test_token_ids_are_what_the_client_gave(folder):
    """There is nothing to tokenize."""
    tokenizer = load_tokenizer(folder)
    assert await tokenizer.prompt(raw({"prompt": [5, 6]})) == Prompt(ids=[5, 6])
    assert await ids_of(tokenizer, {"prompt": [5, 6]}) == [5, 6]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": None},
        {"prompt": ["a", "b"]},
        {"prompt": []},
        {"prompt": [1, True]},
        {"prompt": "too long " * 500_000},
        {"prompt": "a", "truncate_prompt_tokens": 3},
        {"prompt": "a", "prompt_embeds": "x"},
        {"prompt": "a", "add_special_tokens": "yes"},
        {"messages": []},
        {"messages": [USER], "chat_template": "{{ messages }}"},
        {"messages": [USER], "mm_processor_kwargs": {"x": 1}},
        {"messages": [USER], "reasoning_effort": "huge"},
        {"messages": [USER], "documents": [{"n": 1}]},
        {"messages": [USER], "chat_template_kwargs": {"tokenize": True}},
        {"messages": [USER], "chat_template_kwargs": []},
        {"messages": [USER], "continue_final_message": True},
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
    ],
)
async def test_what_only_the_engine_knows_is_left_to_it(folder, body):
    """Other kinds of prompt, other templates, media, and what it would refuse."""
    assert await load_tokenizer(folder).prompt(raw(body)) is None


async def test_a_body_that_is_no_json_is_left_to_the_engine(folder):
    """Its refusal says it better."""
    body = {"messages": msgspec.Raw(b'[{"role": "user", "content": "\\ud800"}]')}
    assert await load_tokenizer(folder).prompt(body) is None


async def test_every_shape_of_the_check_can_be_read(folder):
    """Twenty and more, each with ids."""
    tokenizer = load_tokenizer(folder)
    shapes = request_shapes("m")
    assert len(shapes) >= 20
    assert {name for name, shape in shapes.items() if not await ids_of(tokenizer, shape)} == set()


@pytest.mark.parametrize(
    ("body", "at_most"),
    [
        ({"prompt": "abc"}, 4),
        ({"prompt": "abc", "add_special_tokens": False}, 3),
        ({"prompt": "é"}, 3),
        ({"prompt": [7, 8, 9]}, 3),
        ({"messages": [USER], "add_generation_prompt": False}, len("<|im_start|>user\nthe prompt<|im_end|>\n")),
    ],
)
async def test_bytes_bound_the_tokens(folder, body, at_most):
    """No token of a byte-level tokenizer stands for less than a byte; the beginning-of-text token comes on top."""
    tokenizer = load_tokenizer(folder)
    prompt = await tokenizer.prompt(raw(body))
    assert prompt is not None
    assert tokenizer.at_most_tokens(prompt) == at_most
    assert len(await tokenizer.ids(prompt)) <= at_most


async def test_other_tokenizers_have_no_bound(tmp_path):
    """A piece of theirs may stand for nothing of the text."""
    tokenizer = load_tokenizer(write(tmp_path, metaspace(), None))
    assert tokenizer.at_most_tokens(Prompt(text="the")) is None


# --- folders ----------------------------------------------------------------------------------------------------


async def test_requests_with_tools_may_have_a_template_of_their_own(tmp_path):
    """As the list in tokenizer_config.json names them."""
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    tokenizer = load_tokenizer(write(tmp_path, byte_level(), None, chat_template=templates))
    tools = [{"type": "function", "function": {"name": "f"}}]
    prompts = [await tokenizer.prompt(raw({"messages": [USER], **more})) for more in ({}, {"tools": tools})]
    assert [prompt and prompt.text for prompt in prompts] == ["plain", "with tools"]


async def test_without_a_template_only_texts_are_read(tmp_path):
    """Also where a multimodal processor brings its own."""
    tokenizer = load_tokenizer(write(tmp_path, byte_level(), None))
    assert await tokenizer.prompt(raw({"messages": [USER]})) is None
    assert await tokenizer.prompt(raw({"prompt": "a"})) is not None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tekken.json", "{}"),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "["),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"9": {"content": "<new>"}}}'),
        ("chat_template.jinja", "{% for %}"),
    ],
)
def test_other_folders_are_not_understood(folder, name, content):
    """Another kind of tokenizer, or files that do not fit."""
    (folder / name).write_text(content, encoding="utf-8")
    with pytest.raises(NotUnderstood):
        load_tokenizer(folder)


@pytest.mark.parametrize("environment", [{"HF_HUB_CACHE": "hub"}, {"HF_HOME": "."}, {"HOME": "home"}])
@pytest.mark.parametrize("revision", [None, "main", "abc123"])
def test_a_hub_name_is_looked_up_in_the_cache(tmp_path, environment, revision):
    """Where huggingface_hub keeps it: a branch names its commit, a commit its folder."""
    hub = tmp_path / ("home/.cache/huggingface/hub" if "HOME" in environment else "hub") / "models--org--name"
    (hub / "snapshots" / "abc123").mkdir(parents=True)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("abc123", encoding="utf-8")
    here = {name: str(tmp_path / value) for name, value in environment.items()}
    assert model_folder("org/name", revision, here) == hub / "snapshots" / "abc123"
    assert model_folder("org/other", revision, here) is None
    assert model_folder(str(tmp_path), revision, here) == tmp_path
