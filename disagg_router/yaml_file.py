"""YAML files that people write: read into a pydantic model, or one sentence about the first mistake in it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from disagg_router.errors import ConfigError

M = TypeVar("M", bound=BaseModel)


def read_yaml(file: Path, model: type[M], what: str) -> M:
    """`what` the file should be, for who gave the path of another. Raises ConfigError."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"cannot read {file}: {exc.strerror or exc}; give the path of a {what}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{file} is not UTF-8 text; give the path of a {what}") from exc
    try:
        data = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as exc:
        raise ConfigError(f"{file} is not valid YAML: {' '.join(str(exc).split())}") from exc
    if not isinstance(data, dict):
        raise ConfigError(f"{file} must be a mapping with the keys {', '.join(model.model_fields)}")
    try:
        return model.model_validate(data)
    except ValidationError as exc:
        raise ConfigError(f"{file}: {_one_sentence(exc, model)}") from exc


class _UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader takes the last of two equal keys silently; a cluster file with two `pools:` is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, (str, int)) and key in seen:
                raise yaml.YAMLError(f"the key {key!r} stands twice (line {key_node.start_mark.line + 1})")
            if isinstance(key, (str, int)):
                seen.add(key)
        return super().construct_mapping(node, deep)


def _one_sentence(exc: ValidationError, model: type[BaseModel]) -> str:
    # A misspelt key also leaves the right one missing: the misspelling is the mistake to name.
    first = min(exc.errors(), key=lambda error: error["type"] != "extra_forbidden")
    where = ".".join(str(part) for part in first["loc"]) or "the file"
    if first["type"] == "extra_forbidden":
        return _unknown_key(first["loc"], model)
    if first["type"] == "missing":
        return f"{where} is missing: add it"
    message = first["msg"].removeprefix("Value error, ")
    return f"{where}: {message[0].lower()}{message[1:]} (got {_short(first.get('input'))})"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _unknown_key(loc: tuple[int | str, ...], model: type[BaseModel]) -> str:
    *parents, key = (str(part) for part in loc)
    valid = _valid_keys(parents, model)
    near = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"valid keys are {', '.join(valid)}"
    return f"unknown key {'.'.join([*parents, key])!r}: {hint}"


def _valid_keys(parents: Sequence[str], model: type[BaseModel]) -> list[str]:
    """The field names of the model that `parents` leads to; found by walking the annotations."""
    models: list[type[BaseModel]] = [model]
    for part in parents:
        found: list[type[BaseModel]] = []
        for one in models:
            field = one.model_fields.get(part)
            found += _models_in(field.annotation) if field else [one] * part.isdigit()
        models = found or models
    return sorted({name for one in models for name in one.model_fields})


def _models_in(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for arg in get_args(annotation) for model in _models_in(arg)]
