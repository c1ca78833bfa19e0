"""A model's folder -> a LocalTokenizer, as far as the folder holds what one needs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from disagg_router.errors import NotUnderstood
from disagg_router.routing.chat_template import ChatTemplate
from disagg_router.routing.local_tokenizer import LocalTokenizer
from disagg_router.routing.text_chunks import TextChunks

_OTHER_TOKENIZERS = ("tekken.json", "tokenizer.model.v*")  # vLLM prefers these to a tokenizer.json


def model_folder(model: str, revision: str | None, environment: Mapping[str, str]) -> Path | None:
    """Where the model's files are: the folder `model` names, else the hub's cache on this machine. Nothing is fetched.

    The cache's layout is huggingface_hub's: models--OWNER--NAME/{refs/BRANCH, snapshots/COMMIT/}.
    """
    if Path(model).is_dir():
        return Path(model)
    home = Path(environment.get("HF_HOME") or Path(environment.get("HOME", "/")) / ".cache" / "huggingface")
    cached = Path(environment.get("HF_HUB_CACHE") or home / "hub") / f"models--{model.replace('/', '--')}"
    wanted = revision or "main"
    try:
        commit = (cached / "refs" / wanted).read_text(encoding="utf-8").strip()
    except OSError:
        commit = wanted
    found = cached / "snapshots" / commit
    return found if found.is_dir() else None


def load_tokenizer(folder: Path, now: Callable[[], datetime] = datetime.now) -> LocalTokenizer:
    """Takes up to a second. Raises NotUnderstood when the folder's tokenizer is another kind, or cannot be read."""
    if any(next(folder.glob(name), None) for name in _OTHER_TOKENIZERS):
        raise NotUnderstood("it has a tokenizer of Mistral's own kind")
    config = _json(folder / "tokenizer_config.json")
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as exc:  # the library raises Exception itself
        raise NotUnderstood("it has no tokenizer.json that can be read") from exc
    contents = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    declared = config.get("added_tokens_decoder")
    for token in (declared if isinstance(declared, dict) else {}).values():
        if not isinstance(token, dict) or token.get("content") not in contents:
            raise NotUnderstood("its tokenizer_config.json adds tokens that tokenizer.json does not have")
    special_tokens = _special_tokens({**_json(folder / "special_tokens_map.json"), **config})
    extra = config.get("extra_special_tokens")
    named = [*special_tokens.values(), *(extra if isinstance(extra, list) else [])]
    # transformers takes these out of a text whether tokenizer.json says so or not.
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False) for token in named if isinstance(token, str) and token not in contents]
    )
    templates = {name: ChatTemplate(source, special_tokens, now) for name, source in _templates(folder, config).items()}
    return LocalTokenizer(tokenizer, templates, TextChunks(tokenizer.get_added_tokens_decoder().values()))


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """By name. None at all where vLLM would take a multimodal processor's own template."""
    if (folder / "chat_template.json").is_file():
        return {}
    files = {file.stem: file for file in (folder / "additional_chat_templates").glob("*.jinja")}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    if files:
        return {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    given = config.get("chat_template")
    if isinstance(given, str):
        return {"default": given}
    entries = [entry for entry in given if isinstance(entry, dict)] if isinstance(given, list) else []
    named = {entry.get("name"): entry.get("template") for entry in entries}
    return {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and its like, given as text or as an object with `content`."""
    extra = config.get("extra_special_tokens")
    given = {name: value for name, value in config.items() if name.endswith("_token")}
    given |= extra if isinstance(extra, dict) else {}
    contents = {name: value.get("content") if isinstance(value, dict) else value for name, value in given.items()}
    return {name: value for name, value in contents.items() if isinstance(value, str)}


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as exc:
        raise NotUnderstood(f"its {file.name} cannot be read") from exc
    if not isinstance(value, dict):
        raise NotUnderstood(f"its {file.name} holds no JSON object")
    return value
