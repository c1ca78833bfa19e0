"""The fleet's timing, learned from what is served."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf

from disagg_router.cost.fit import Deviation, Fit, Known
from disagg_router.cost.priors import Priors
from disagg_router.cost.states import FRESH_S, States
from disagg_router.interfaces import PrefillWork
from disagg_router.model import InstanceId, Pair, Target
from disagg_router.timing import CostSnapshot, LinkTiming, TargetTiming

COMMON_SD = 3.0  # a prior that is wrong by 20 is nothing special, nor is one that is wrong by 100
OWN_SD = 1.0  # but what its coefficients are to each other is known within 3
LINK_SD = 2.5  # a handoff's fixed cost and the bandwidth have nothing in common
MOVED = 0.01  # so much more of a coefficient, and every picture is out of date


@dataclass(slots=True)
class _Deviations:
    prefill: Deviation = field(default_factory=Deviation)
    step: Deviation = field(default_factory=Deviation)


class OnlineCosts:
    """One fit each for prefills, decode steps and handoffs, to which every target contributes; on top of it each
    target's and each pair's own deviation."""

    def __init__(self, priors: Priors, chunk_tokens: Callable[[Target], int | None]) -> None:
        """`chunk_tokens`: a target's --max-num-batched-tokens; None takes the prior's."""
        prior, link = priors.target, priors.link
        self._chunk_tokens = chunk_tokens
        self._default_chunk_tokens = prior.chunk_tokens
        self._kv_bytes_per_token = priors.kv_bytes_per_token
        prefill = prior.prefill_a_s, prior.prefill_b_s, prior.prefill_c_s
        step = prior.step_d_s, prior.step_e_s, prior.step_f_s
        self._prefill = Fit(prefill, common_sd=COMMON_SD, own_sd=OWN_SD)
        self._step = Fit(step, common_sd=COMMON_SD, own_sd=OWN_SD)
        # Per handoff and per byte; the third feature is never there.
        self._link = Fit((link.handoff_s, 1 / link.bytes_per_s, 1.0), common_sd=0.0, own_sd=LINK_SD)
        self._targets = States[Target, _Deviations, TargetTiming](_Deviations, self._draw_target)
        self._pairs = States[Pair, Deviation, LinkTiming](Deviation, lambda _, state, now_s: self._timing(state, now_s))
        self._learned = False  # anything since the last snapshot
        self._centred_s = -inf
        self._drawn_of = self._logs()
        self._known = self._all_known()
        self._snapshot = self._made(0.0, self._targets.pictures(0.0), self._pairs.pictures(0.0))

    # --- learning -------------------------------------------------------------------------------------------

    def prefilled(self, target: Target, work: PrefillWork, seconds: float, now_s: float) -> None:
        deviations = self._targets.change(target)
        steps, beside_s = float(work.steps), 0.0
        if work.running:
            # What the running streams would have taken anyway is the step fit's; TargetTiming.prefill_mean_s.
            d, e, f = Known(self._step.coefficients).times(deviations.step.at(now_s))
            a, _, _ = Known(self._prefill.coefficients).times(deviations.prefill.at(now_s))
            beside_s = work.steps * (e * work.running + f * work.context_tokens)
            if d > a:
                steps, beside_s = 0.0, beside_s + work.steps * d
        features = (steps, float(work.uncached_tokens), work.attention)
        self._prefill.observe(features, seconds, deviations.prefill, now_s, beside_s)
        self._learned = True

    def stepped(self, target: Target, running: float, context_tokens: float, seconds: float, now_s: float) -> None:
        deviation = self._targets.change(target).step
        self._step.observe((1.0, running, context_tokens), seconds, deviation, now_s)
        self._learned = True

    def handed_off(self, pair: Pair, moved_bytes: float, seconds: float, now_s: float) -> None:
        self._link.observe((1.0, moved_bytes, 0.0), seconds, self._pairs.change(pair), now_s)
        self._learned = True

    def transferred(self, decode: InstanceId, moved_bytes: float, seconds: float, now_s: float) -> None:
        """For the fleet's bandwidth only: the counters do not say which prefill instance the bytes came from."""
        self._link.observe((0.0, moved_bytes, 0.0), seconds, Deviation(), now_s)
        self._learned = True

    def forget(self, target: Target) -> None:
        self._targets.forget([target])
        self._pairs.forget([pair for pair in self._pairs if target.instance in (pair.prefill, pair.decode)])
        self._learned = True

    # --- what it believes -----------------------------------------------------------------------------------

    def snapshot(self, now_s: float) -> CostSnapshot:
        if self._learned:
            self._centre(now_s)
            self._known = self._all_known()
        targets, links = self._targets.pictures(now_s), self._pairs.pictures(now_s)
        if self._learned or targets is not self._snapshot.targets or links is not self._snapshot.links:
            self._learned = False
            self._snapshot = self._made(now_s, targets, links)
        return self._snapshot

    def _centre(self, now_s: float) -> None:
        if now_s - self._centred_s >= FRESH_S:
            self._centred_s = now_s
            self._prefill.centre(of.prefill for of in self._targets.all())
            self._step.centre(of.step for of in self._targets.all())
            self._link.centre(self._pairs.all())
        logs = self._logs()
        if any(abs(log - drawn) > MOVED for log, drawn in zip(logs, self._drawn_of, strict=True)):
            self._drawn_of = logs
            self._targets.outdate()
            self._pairs.outdate()

    def _made(
        self, now_s: float, targets: Mapping[Target, TargetTiming], links: Mapping[Pair, LinkTiming]
    ) -> CostSnapshot:
        return CostSnapshot(
            target=self._draw(_Deviations(), now_s, None),
            link=self._timing(Deviation(), now_s),
            kv_bytes_per_token=self._kv_bytes_per_token,
            targets=targets,
            links=links,
        )

    def _logs(self) -> tuple[float, ...]:
        return (*self._prefill.logs, *self._step.logs, *self._link.logs)

    def _all_known(self) -> tuple[Known, Known, Known]:
        return self._prefill.known(), self._step.known(), self._link.known()

    def _draw_target(self, target: Target, deviations: _Deviations, now_s: float) -> TargetTiming:
        return self._draw(deviations, now_s, self._chunk_tokens(target))

    def _draw(self, deviations: _Deviations, now_s: float, chunk_tokens: int | None) -> TargetTiming:
        known_prefill, known_step, _ = self._known
        prefill, step = deviations.prefill.at(now_s), deviations.step.at(now_s)
        return TargetTiming(
            *known_prefill.times(prefill),
            *known_step.times(step),
            prefill_sd=known_prefill.sd(prefill),
            step_sd=known_step.sd(step),
            prefill_covariance=known_prefill.covariance,
            prefill_noise_var=known_prefill.noise_var + prefill.var,
            chunk_tokens=chunk_tokens or self._default_chunk_tokens,
        )

    def _timing(self, deviation: Deviation, now_s: float) -> LinkTiming:
        _, _, known = self._known
        belief = deviation.at(now_s)
        handoff_s, s_per_byte, _ = known.times(belief)
        return LinkTiming(handoff_s, 1 / s_per_byte, known.sd(belief))
