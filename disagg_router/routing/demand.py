"""What prefills have asked of each target lately, and of the fleet: decayed averages."""

from __future__ import annotations

import math
from typing import NamedTuple

from disagg_router.model import Target

DECAY_S = 20.0  # time constant (the policy study's value)
LEAST_S = 1.0  # a shorter past says nothing of a rate
MOST_SHARE = 0.97  # 1/(1 - share) stays finite
_NOTHING = 1e-9


class PerSecond(NamedTuple):
    """Prefill seconds, KV bytes of the prompts, stalls, and steps with prompt tokens in them, each per second."""

    prefill_s: float
    kv_bytes: float
    stalls: float
    steps: float


_NONE = PerSecond(0.0, 0.0, 0.0, 0.0)


class Rates:
    """Decayed sums over the decayed time they were gathered in."""

    __slots__ = ("_kv_bytes", "_last_s", "_prefill_s", "_stalls", "_steps", "_time_s")

    def __init__(self, now_s: float) -> None:
        self._last_s = now_s
        self._time_s = self._prefill_s = self._kv_bytes = self._stalls = self._steps = 0.0

    def add(self, prefill_s: float, kv_bytes: float, stalls: float, steps: float, now_s: float) -> None:
        self._decay(now_s)
        self._prefill_s += prefill_s
        self._kv_bytes += kv_bytes
        self._stalls += stalls
        self._steps += steps

    def per_s(self, now_s: float) -> PerSecond:
        kept = math.exp((self._last_s - now_s) / DECAY_S)
        scale = kept / max(LEAST_S, self._time_s * kept + DECAY_S * (1 - kept))
        if self._prefill_s * scale < _NOTHING:
            return _NONE
        return PerSecond(self._prefill_s * scale, self._kv_bytes * scale, self._stalls * scale, self._steps * scale)

    def _decay(self, now_s: float) -> None:
        kept = math.exp((self._last_s - now_s) / DECAY_S)
        self._last_s = now_s
        self._time_s = self._time_s * kept + DECAY_S * (1 - kept)  # the integral of what is kept of each moment
        self._prefill_s *= kept
        self._kv_bytes *= kept
        self._stalls *= kept
        self._steps *= kept


class DemandBook:
    """What was placed where."""

    def __init__(self, *, touched: set[Target], now_s: float) -> None:
        self._touched = touched
        self._targets: dict[Target, Rates] = {}
        self._fleet = Rates(now_s)

    def placed(
        self, target: Target, *, predicted_s: float, stalls: float, steps: int, kv_bytes: float, now_s: float
    ) -> None:
        """A prefill of so many `steps` was given to `target`. `kv_bytes`: of its whole prompt, what a handoff would
        move. `stalls`: the chance that one of its steps is longer than a stream's pause may be."""
        rates = self._targets.get(target)
        if rates is None:
            rates = self._targets[target] = Rates(now_s)
        rates.add(predicted_s, kv_bytes, stalls, steps, now_s)
        self._fleet.add(predicted_s, kv_bytes, stalls, steps, now_s)
        self._touched.add(target)

    def of(self, target: Target, now_s: float) -> PerSecond:
        """`prefill_s` is the part of the target's time that prefills take, at most MOST_SHARE."""
        rates = self._targets.get(target)
        if rates is None:
            return _NONE
        found = rates.per_s(now_s)
        return found if found.prefill_s <= MOST_SHARE else found._replace(prefill_s=MOST_SHARE)

    def kv_bytes_per_s(self, now_s: float) -> float:
        """What the handoffs would move if every prompt were split."""
        return self._fleet.per_s(now_s).kv_bytes

    def forget(self, target: Target) -> None:
        self._targets.pop(target, None)
        self._touched.add(target)
