"""Who is compared, and the router's config for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from disagg_router.errors import ConfigError
from disagg_router.model import Role
from disagg_router.policies.registry import build_policy

SUBJECT = "break_even"
DEFAULT_CHUNK_TOKENS = 2048  # vLLM's default for --max-num-batched-tokens
SLO = {"ttft_ms": 500, "tpot_ms": 25, "max_gap_ms": 100}

_UNIFIED = (Role.UNIFIED, Role.UNIFIED)
_SPLIT = (Role.PREFILL, Role.DECODE)


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy on two engines with these roles, both started with `chunk_tokens`."""

    name: str
    policy: str
    roles: tuple[Role, Role]
    options: Mapping[str, Any] = field(default_factory=dict)
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS


CONTENDERS = (
    Contender(SUBJECT, "break_even", _UNIFIED),
    Contender("unified_2048", "always_local", _UNIFIED),
    Contender("unified_256", "always_local", _UNIFIED, chunk_tokens=256),
    Contender("always_remote", "always_remote", _SPLIT),
    Contender("threshold_1000", "threshold", _SPLIT, {"tokens": 1000}),
)


def chosen(only: str | None) -> tuple[Contender, ...]:
    """By the comma-separated names, or all. Raises ConfigError."""
    known = {one.name: one for one in CONTENDERS}
    names = [name.strip() for name in only.split(",")] if only is not None else list(known)
    for name in names:
        if name not in known:
            raise ConfigError(f"--only {name!r} is no contender: use some of {', '.join(known)}")
    found = tuple(known[name] for name in dict.fromkeys(names))
    for one in found:
        build_policy(one.policy, one.options)
    return found


def router_config(
    contender: Contender, *, model: str, served_name: str, args: Mapping[str, Any], urls: Sequence[str]
) -> str:
    """YAML for `disagg-router proxy` in front of two engines that run already, started with `args`."""
    instances = [{"url": url, "role": role.value} for url, role in zip(urls, contender.roles, strict=True)]
    return yaml.safe_dump(
        {
            "model": {"path": model, "served_name": served_name},
            "engine": {"device": "cpu", "args": dict(args)},
            "fleet": {"static": instances},
            "router": {
                "policy": {"name": contender.policy, **contender.options},
                "slo": SLO,
                "decision_log": f"{contender.name}.decisions.jsonl",  # beside this file, for `disagg-router explain`
            },
        },
        sort_keys=False,
    )
