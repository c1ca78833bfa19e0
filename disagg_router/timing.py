"""The timing formulas of one target and one link, and the picture of all of them that a policy computes with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from disagg_router.model import Estimate, Pair, Target

Three = tuple[float, float, float]
MOST_SD = 1.0  # relative; stands for not knowing


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

    def prefill_mean_s(
        self, uncached_tokens: float, cached_tokens: float, running: float = 0, context_tokens: float = 0
    ) -> float:
        """The whole prefill, over as many steps as its chunks need, each shared with the running streams."""
        step_s = self.prefill_a_s
        if running:
            step_s = max(step_s, self.step_d_s) + self.step_e_s * running + self.step_f_s * context_tokens
        return (
            self.steps(uncached_tokens, running) * step_s
            + self.prefill_b_s * uncached_tokens
            + self.prefill_c_s * attention(uncached_tokens, cached_tokens)
        )

    def prefill_sd_s(self, uncached_tokens: float, cached_tokens: float, mean_s: float) -> float:
        """Of `prefill_mean_s`, which is given as `mean_s`; by the share of each term in it."""
        if self.prefill_covariance is None or mean_s <= 0:
            return mean_s * self.prefill_sd
        a = self.prefill_a_s * self.steps(uncached_tokens, 0) / mean_s
        b = self.prefill_b_s * uncached_tokens / mean_s
        c = self.prefill_c_s * attention(uncached_tokens, cached_tokens) / mean_s
        (aa, ab, ac), (_, bb, bc), (_, _, cc) = self.prefill_covariance
        var = self.prefill_noise_var + aa * a * a + bb * b * b + cc * c * c + 2 * (ab * a * b + ac * a * c + bc * b * c)
        return mean_s * min(MOST_SD, math.sqrt(max(0.0, var)))

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

    def longest_step_s(
        self, uncached_tokens: float, cached_tokens: float, running: float, context_tokens: float
    ) -> float:
        """Of the prefill's steps: a full chunk at the prompt's end, since that attends to all that comes before."""
        chunk_tokens = min(uncached_tokens, max(1.0, self.chunk_tokens - running))
        before_tokens = uncached_tokens + cached_tokens - chunk_tokens
        return self.mixed_step_mean_s(chunk_tokens, running, context_tokens, before_tokens)


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
        timing = self.of(target)
        mean_s = timing.prefill_mean_s(uncached_tokens, cached_tokens, running, context_tokens)
        return Estimate(mean_s, timing.prefill_sd_s(uncached_tokens, cached_tokens, mean_s))

    def mixed_step_s(self, target: Target, chunk_tokens: float, running: float, context_tokens: float) -> Estimate:
        timing = self.of(target)
        mean_s = timing.mixed_step_mean_s(chunk_tokens, running, context_tokens)
        return Estimate(mean_s, mean_s * timing.prefill_sd)

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
