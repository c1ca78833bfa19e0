"""Where decode and prefill settle when roles are soft: the slow part of the break-even policy, on a timer."""

from __future__ import annotations

import math

from disagg_router.model import Role, Slo, Target
from disagg_router.policies.harm import logistic
from disagg_router.view import ClusterView, Leans, TargetLoad, TargetView

PACK = 1.5  # expected good requests: more than any one request can be worth, so that a full price is never paid
GAIN = 0.25  # of the way that a lean moves in one step
_ROLE_LEAN = {Role.PREFILL: -1.0, Role.DECODE: 1.0, Role.UNIFIED: 0.0}


class LeanBalancer:
    """Leans follow what the targets do, slowly: a target that has just lost its last stream still leans to decoding.

    The price of opening one more target for decoding rises when spreading the streams would put them in the prefills'
    way, by TPOT or by pauses, and only as far as the links can carry the handoffs (policy study: without the first
    factor loose objectives lose 5 %, without the second a slow link loses 42 %).
    """

    def __init__(self, slo: Slo) -> None:
        self._slo = slo

    def step(self, view: ClusterView, leans: Leans) -> Leans:
        lean = {t.target: self._lean(t, leans) for t in view.targets}
        return Leans(lean, self._pack(view))

    def _lean(self, t: TargetView, leans: Leans) -> float:
        before = leans.lean.get(t.target, _ROLE_LEAN[t.role])
        if t.load.streams.running or t.load.decodes:
            wanted = 1.0 - 2.0 * t.load.prefill_share * (t.load.stalls_per_s > 0)
        elif t.load.prefill_share > 0.01:
            wanted = -1.0
        else:
            wanted = _ROLE_LEAN[t.role]
        return before + GAIN * (wanted - before)

    def _pack(self, view: ClusterView) -> float:
        count = len(view.targets)
        if count < 2:
            return 0.0
        loads = [t.load for t in view.targets]
        running = sum(load.streams.running for load in loads) / count
        context_tokens = sum(load.streams.context_tokens for load in loads) / count
        mean = TargetLoad(
            prefill_share=sum(load.prefill_share for load in loads) / count,
            prefill_steps_per_s=sum(load.prefill_steps_per_s for load in loads) / count,
        )
        step_s = sum(view.costs.of(t.target).step_mean_s(running, context_tokens) for t in view.targets) / count
        spread_s, spread_sd_s = mean.token_s(step_s, 2.0 * _mean_to_come(view))
        width_s = math.hypot(0.08 * self._slo.tpot_s, 0.55 * spread_sd_s)
        too_slow = logistic((spread_s - 0.75 * self._slo.tpot_s) / width_s)
        stalls_per_s = sum(load.stalls_per_s for load in loads) / count
        broken = 1.0 - math.exp(-stalls_per_s * 2.0 * _mean_to_come(view) * spread_s)
        paused = logistic((broken - 0.1) / 0.03) if stalls_per_s else 0.0
        return PACK * max(too_slow, paused) * logistic((0.6 - self._link_share(view)) / 0.06)

    def _link_share(self, view: ClusterView) -> float:
        """The part of all links together that handing off every prompt would take."""
        total_bytes_per_s = sum(_egress_bytes_per_s(view, t.target) for t in view.targets)
        return view.kv_bytes_per_s / total_bytes_per_s


def _egress_bytes_per_s(view: ClusterView, target: Target) -> float:
    known = [link.bytes_per_s for pair, link in view.costs.links.items() if pair.prefill == target.instance]
    return max(known, default=view.costs.link.bytes_per_s)


def _mean_to_come(view: ClusterView) -> float:
    running = sum(t.load.streams.running for t in view.targets)
    tokens = sum(t.load.streams.running * t.load.streams.to_come_tokens for t in view.targets)
    return tokens / running if running else 0.0
