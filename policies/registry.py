"""Policy names -> policies. A third party adds one by the entry-point group `disagg_router.policies`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from disagg_router.errors import ConfigError
from disagg_router.interfaces import PathPolicy
from disagg_router.policies.always_local import AlwaysLocal
from disagg_router.policies.always_remote import AlwaysRemote
from disagg_router.policies.break_even import BreakEven
from disagg_router.policies.isl_bounding import IslBounding
from disagg_router.policies.least_loaded import LeastLoaded
from disagg_router.policies.threshold import Threshold
from disagg_router.policies.ttft_min import TtftMin

ENTRY_POINTS = "disagg_router.policies"
BUILT_IN: Mapping[str, Callable[..., PathPolicy]] = MappingProxyType(
    {
        "break_even": BreakEven,
        "always_local": AlwaysLocal,
        "always_remote": AlwaysRemote,
        "threshold": Threshold,
        "isl_bounding": IslBounding,
        "ttft_min": TtftMin,
        "least_loaded": LeastLoaded,
    }
)


def build_policy(name: str, options: Mapping[str, Any]) -> PathPolicy:
    """The policy's own parameters are the valid options, their annotations the valid types. Raises ConfigError."""
    maker = BUILT_IN.get(name) or _plug_in(name)
    if maker is None:
        known = sorted({*BUILT_IN, *entry_points(group=ENTRY_POINTS).names})
        raise ConfigError(f"router.policy.name {name!r} is not known: use one of {', '.join(known)}")
    valid = list(inspect.signature(maker).parameters)
    for key in options:
        if key not in valid:
            raise ConfigError(f"router.policy.{key} is not an option of {name}: it has {', '.join(valid) or 'none'}")
    try:
        policy: PathPolicy = maker(**options)
    except ValidationError as exc:
        first = exc.errors()[0]
        raise ConfigError(f"router.policy.{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}") from exc
    return policy


def _plug_in(name: str) -> Callable[..., PathPolicy] | None:
    """Looked for only when the name is none of ours: it goes through everything that is installed."""
    return next((point.load() for point in entry_points(group=ENTRY_POINTS, name=name)), None)
