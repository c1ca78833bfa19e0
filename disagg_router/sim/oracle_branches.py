"""What else could have been decided: a few valid decisions, as different from the one taken as is still sensible."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from disagg_router.model import Decision, InferenceRequest, Path, Reason
from disagg_router.policies.forecast import Way, decode_terms, local_way, prefill_terms, remote_way
from disagg_router.policies.harm import chance_below, later_tokens_chance, lost_to_decode, lost_to_prefill, start_chance
from disagg_router.view import ClusterView


class _Ranked(NamedTuple):
    """The more is gained the better, then the earlier the first token."""

    lost: float
    ttft_s: float
    decision: Decision


def alternatives(request: InferenceRequest, view: ClusterView, taken: Decision, most: int) -> Sequence[Decision]:
    """At most so many: the most promising by the other path, the most promising by the same path to another decode
    target, then those that share no target with any of these, then any. Nobody's chance is given where the policy gives
    none: an admission is to treat them all alike."""
    left = [one.decision for one in sorted(_ranked(request, view), key=lambda one: one[:2])]
    left = [one for one in left if (one.prefill, one.decode) != (taken.prefill, taken.decode)]
    chosen: list[Decision] = []

    def shares_nothing(decision: Decision) -> bool:
        return all(decision.decode != c.decode and decision.prefiller != c.prefiller for c in (taken, *chosen))

    def other_path(decision: Decision) -> bool:
        return (decision.prefill is None) != (taken.prefill is None)

    def elsewhere(decision: Decision) -> bool:
        return not other_path(decision) and decision.decode != taken.decode

    kinds: list[Callable[[Decision], bool]] = [other_path, elsewhere, *[shares_nothing] * most]
    kinds += [bool] * most  # any
    for kind in kinds:
        found = next((decision for decision in left if kind(decision)), None)
        if found is not None and len(chosen) < most:
            chosen.append(found)
            left.remove(found)
    return [dataclasses.replace(one, chance=None, gain=None) if taken.chance is None else one for one in chosen]


def _ranked(request: InferenceRequest, view: ClusterView) -> list[_Ranked]:
    if request.prompt_tokens is None:
        return []
    usable = [t for t in view.targets if t.target not in request.excluded]
    prefills = {t.target: prefill_terms(request, view, t) for t in usable}
    found = []
    for target in usable:
        if not (view.soft_roles or target.role.decodes):
            continue
        decode = decode_terms(request, view, target)
        found.append(_rank(request, local_way(request, prefills[target.target], decode)))
        sources = view.partners.get(target.target.instance, ()) if request.splittable else ()
        for source in (view.targets[place] for place in sources):
            if source.target in prefills and (view.soft_roles or source.role.prefills):
                found.append(_rank(request, remote_way(request, view, prefills[source.target], decode)))
    return found


def _rank(request: InferenceRequest, way: Way) -> _Ranked:
    chance = later_tokens_chance(request, way.decode) * chance_below(request.slo.ttft_s, way.mean_s, way.sd_s)
    if way.remote:
        chance *= start_chance(request, way.decode)
    gain = chance - lost_to_decode(request, way.decode) - lost_to_prefill(request, way.prefill)
    path, prefill = (Path.REMOTE_PREFILL, way.prefill.target.target) if way.remote else (Path.LOCAL, None)
    decode = way.decode.target.target
    decision = Decision(
        path, decode, Reason.POLICY, prefill, way.terms(), ttft={path: way.ttft}, chance=chance, gain=gain
    )
    return _Ranked(-gain, way.mean_s, decision)
