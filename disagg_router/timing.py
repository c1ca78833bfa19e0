"""The timing formulas of one target and one link, and the picture of all of them that a policy computes with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from disagg_router.model import Estimate, Pair, Target

Three = tuple[float, float, float]
MOST_SD = 1.0  # relative; stands for not knowing


class PrefillTimes(NamedTuple):
    """Of one prompt on one target. `stall_s`: by how much all its steps together delay each stream that runs there;
    `pause_s`: the longest of them; `sd_s` is the standard deviation of `whole_s`."""

    whole_s: float
    sd_s: float
    stall_s: float
    pause_s: float


@dataclass(frozen=True, slots=True)
class TargetTiming:
    """One target's prefill and decode times, in seconds.

    A step that computes n prompt tokens beside `running` streams, whose contexts add up to `context_tokens`, takes
    `max(a, d if running) + b*n + c*attention + e*running + f*context_tokens`; a step without prompt tokens takes
    `d + e*running + f*context_tokens`. `attention` of u uncached on top of h cached tokens is `u*(u/2 + h)`. The form
    is DistServe's and AIConfigurator's (prefill linear and quadratic in tokens, decode linear in batch and context).
    `prefill_sd` and `step_sd` are standard deviations relative to the time, for requests like those seen lately. For
    any other prompt `prefill_covariance` (of the logarithms of a, b and c) and `prefill_noise_var` say it: who has
    seen short prompts only knows nothing of long ones.
    """

    prefill_a_s: float
    prefill_b_s: float
    prefill_c_s: float
    step_d_s: float
    step_e_s: float
    step_f_s: float
    prefill_sd: float = 0.0
    step_sd: float = 0.0
    prefill_covariance: tuple[Three, Three, Three] | None = None
    prefill_noise_var: float = 0.0
    chunk_tokens: int = 2048  # --max-num-batched-tokens

    def steps(self, uncached_tokens: float, running: float) -> int:
        return max(1, math.ceil(uncached_tokens / max(1.0, self.chunk_tokens - running)))

    def prefill(
        self, uncached_tokens: float, cached_tokens: float, running: float = 0, context_tokens: float = 0
    ) -> PrefillTimes:
        """The whole prefill, over as many steps as its chunks need, each shared with the running streams.

        All of it in one go, for it is asked some twenty times for every decision.
        """
        room = self.chunk_tokens - running
        chunk = uncached_tokens if uncached_tokens < room else (room if room > 1.0 else 1.0)
        steps = math.ceil(uncached_tokens / chunk) if chunk > 0 else 1
        a_s, b_s, c_s = self.prefill_a_s, self.prefill_b_s, self.prefill_c_s
        linear_s = b_s * uncached_tokens
        squared_s = c_s * uncached_tokens * (uncached_tokens / 2 + cached_tokens)
        base_s, stall_s = a_s, 0.0
        # A full chunk at the prompt's end is the longest step, since it attends to all that comes before it.
        last_s = b_s * chunk + c_s * chunk * (uncached_tokens + cached_tokens - chunk / 2)
        if running:
            beside_s = self.step_e_s * running + self.step_f_s * context_tokens
            longer_s = a_s - self.step_d_s if a_s > self.step_d_s else 0.0
            base_s = self.step_d_s + longer_s + beside_s
            stall_s = steps * longer_s + linear_s + squared_s
        whole_s = steps * base_s + linear_s + squared_s
        return PrefillTimes(whole_s, self._sd_s(whole_s, steps * a_s, linear_s, squared_s), stall_s, base_s + last_s)

    def _sd_s(self, whole_s: float, steps_s: float, linear_s: float, squared_s: float) -> float:
        """By the share of each term in the whole."""
        if self.prefill_covariance is None or whole_s <= 0:
            return whole_s * self.prefill_sd
        (aa, ab, ac), (_, bb, bc), (_, _, cc) = self.prefill_covariance
        squares = aa * steps_s * steps_s + bb * linear_s * linear_s + cc * squared_s * squared_s
        products = ab * steps_s * linear_s + ac * steps_s * squared_s + bc * linear_s * squared_s
        var_s2 = self.prefill_noise_var * whole_s * whole_s + squares + 2.0 * products
        sd_s = math.sqrt(var_s2) if var_s2 > 0 else 0.0
        return sd_s if sd_s < MOST_SD * whole_s else MOST_SD * whole_s

    def prefill_mean_s(
        self, uncached_tokens: float, cached_tokens: float, running: float = 0, context_tokens: float = 0
    ) -> float:
        return self.prefill(uncached_tokens, cached_tokens, running, context_tokens).whole_s

    def step_mean_s(self, running: float, context_tokens: float) -> float:
        return self.step_d_s + self.step_e_s * running + self.step_f_s * context_tokens

    def mixed_step_mean_s(
        self, chunk_tokens: float, running: float, context_tokens: float, cached_tokens: float = 0
    ) -> float:
        """One step that computes `chunk_tokens` of a prompt beside the running streams: the pause each of them sees."""
        base_s = max(self.prefill_a_s, self.step_d_s if running else 0.0)
        return (
            base_s
            + self.prefill_b_s * chunk_tokens
            + self.prefill_c_s * attention(chunk_tokens, cached_tokens)
            + self.step_e_s * running
            + self.step_f_s * context_tokens
        )


@dataclass(frozen=True, slots=True)
class LinkTiming:
    """`handoff_s` is what a handoff costs however small it is: two HTTP legs, the handshake, the pull's bookkeeping."""

    handoff_s: float
    bytes_per_s: float
    sd: float = 0.0  # relative

    def transfer_mean_s(self, moved_bytes: float, in_flight_bytes: float) -> float:
        """Without `handoff_s`. `in_flight_bytes`: the larger of what leaves the source and what enters the sink."""
        return (moved_bytes + in_flight_bytes) / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class CostSnapshot:
    """What the cost model believes now; immutable. Targets and pairs not listed have the defaults."""

    target: TargetTiming
    link: LinkTiming
    kv_bytes_per_token: float
    targets: Mapping[Target, TargetTiming] = field(default_factory=dict)
    links: Mapping[Pair, LinkTiming] = field(default_factory=dict)

    def of(self, target: Target) -> TargetTiming:
        return self.targets.get(target, self.target)

    def between(self, prefill: Target, decode: Target) -> LinkTiming:
        return self.links.get(Pair(prefill.instance, decode.instance), self.link)

    def prefill_s(
        self, target: Target, uncached_tokens: float, cached_tokens: float, running: float, context_tokens: float
    ) -> Estimate:
        times = self.of(target).prefill(uncached_tokens, cached_tokens, running, context_tokens)
        return Estimate(times.whole_s, times.sd_s)

    def step_s(self, target: Target, running: float, context_tokens: float) -> Estimate:
        timing = self.of(target)
        mean_s = timing.step_mean_s(running, context_tokens)
        return Estimate(mean_s, mean_s * timing.step_sd)

    def transfer_s(self, prefill: Target, decode: Target, moved_bytes: float, in_flight_bytes: float) -> Estimate:
        link = self.between(prefill, decode)
        mean_s = link.transfer_mean_s(moved_bytes, in_flight_bytes)
        return Estimate(mean_s, mean_s * link.sd)


def attention(uncached_tokens: float, cached_tokens: float) -> float:
    """Token pairs that a prefill attends over, up to a constant factor: u*(u/2 + h)."""
    return uncached_tokens * (uncached_tokens / 2 + cached_tokens)
