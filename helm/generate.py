"""Makes the chart's README.md and values.schema.json from values.yaml, its comments, and the settings' own models.

`.venv/bin/python helm/generate.py` writes them; with `--check` it only says which are out of date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from disagg_router.config import ClusterConfig

CHART = Path(__file__).parent / "disagg-router"
SECTION, SCHEMA = "@section ", "@schema "
# Kubernetes' own shape, so that a slip in `resources` is refused here and not by the API server.
RESOURCES = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        kind: {"type": "object", "additionalProperties": {"type": ["string", "number"]}}
        for kind in ("requests", "limits")
    },
}
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


@dataclass(frozen=True, slots=True)
class Key:
    """One key of values.yaml. A leaf is handed on as it is: it stands on one line, whatever it holds."""

    path: tuple[str, ...]
    section: str
    comment: str
    schema: dict[str, Any]
    default: Any
    leaf: bool


def keys(text: str) -> Iterator[Key]:
    """Every key of a values file in block style, in its order, with the comment above it."""
    data = yaml.safe_load(text)
    section, comment, schema, parents = "", [], {}, []
    for line in text.splitlines():
        words = line.strip()
        if words.startswith("#"):
            words = words.lstrip("# ")
            if words.startswith(SECTION):
                section = words.removeprefix(SECTION)
            elif words.startswith(SCHEMA):
                schema = yaml.safe_load(words.removeprefix(SCHEMA))
            else:
                comment.append(words)
            continue
        if words:
            name, _, rest = words.partition(":")
            depth = (len(line) - len(line.lstrip())) // 2
            parents = [*parents[:depth], name]
            yield Key(tuple(parents), section, " ".join(comment), schema, look_up(data, parents), bool(rest.strip()))
        comment, schema = [], {}


def look_up(data: Any, path: list[str]) -> Any:  # noqa: ANN401 - any YAML value
    for name in path:
        data = data[name]
    return data


def schema_of(found: list[Key]) -> dict[str, Any]:
    """A JSON schema that refuses unknown keys. `config` is ClusterConfig: a typo in it shows at install time."""
    root: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": {}}
    for key in found:
        parent = look_up(root, [word for name in key.path[:-1] for word in ("properties", name)])
        parent["properties"][key.path[-1]] = _of_key(key)
    cluster = ClusterConfig.model_json_schema()
    definitions = cluster.pop("$defs")
    root["properties"]["config"] = {"$ref": "#/$defs/ClusterConfig"}
    pool = {**root["properties"]["poolDefaults"], "description": "What differs from poolDefaults."}
    root["properties"]["global"] = {"type": "object"}  # helm gives it to every chart that is part of another
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Values of the chart disagg-router",
        **root,
        "$defs": {**definitions, "ClusterConfig": cluster, "pool": pool, "resources": RESOURCES},
    }


def _of_key(key: Key) -> dict[str, Any]:
    shape: dict[str, Any] = {"description": key.comment} if key.comment else {}
    if "$ref" in key.schema:
        return shape | key.schema
    shape["type"] = TYPES[type(key.default)]
    if not key.leaf:
        shape |= {"additionalProperties": False, "properties": {}}
    elif shape["type"] == "integer":
        shape["minimum"] = 0
    return shape | key.schema


def readme(found: list[Key], intro: str) -> str:
    lines = [intro.rstrip(), ""]
    section = None
    for key in found:
        if key.section != section:
            section = key.section
            lines += ["", f"## {section}", "", "| value | default | what it is |", "|---|---|---|"]
        default = f"`{json.dumps(key.default)}`" if key.leaf else ""
        lines.append(f"| `{'.'.join(key.path)}` | {default} | {key.comment} |".replace("  ", " "))
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def generated(chart: Path = CHART) -> dict[str, str]:
    """File name to content."""
    found = list(keys((chart / "values.yaml").read_text(encoding="utf-8")))
    intro = (chart / "files" / "README.intro.md").read_text(encoding="utf-8")
    return {
        "README.md": readme(found, intro),
        "values.schema.json": json.dumps(schema_of(found), indent=1) + "\n",
    }


def main() -> None:
    files = {CHART / name: content for name, content in generated().items()}
    if "--check" in sys.argv[1:]:
        stale = [f.name for f, content in files.items() if not f.exists() or f.read_text(encoding="utf-8") != content]
        sys.exit(f"out of date: {', '.join(stale)}; run .venv/bin/python helm/generate.py" if stale else 0)
    for file, content in files.items():
        file.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
