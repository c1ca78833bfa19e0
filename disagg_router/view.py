"""What a policy may look at: an immutable picture of the fleet, its loads, its costs and its leans."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from disagg_router.model import Estimate, InferenceRequest, InstanceId, Role, Target
from disagg_router.timing import CostSnapshot

# Upper edges of the slack histogram, in seconds; the eighth bin is open. Slack: how much later than predicted a stream
# may end and still meet its TPOT objective.
SLACK_EDGES_S = (0.0, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
MOST_SHARE = 0.95  # of a target's time is taken to go into prefills; streams come to a halt at 1
# 1 is what a stream sees; of 0, 0.5, 0.7 and 1 this did best over ten simulated cells with chunks of 512 and of 2,048.
MIXED_TOKEN = 0.5
NO_SLACK: tuple[int, ...] = (0,) * (len(SLACK_EDGES_S) + 1)


class StreamLoad(NamedTuple):
    """The streams that run on a target now, those of this router. A stream counts from its first byte on.

    `slack`: how many of them are in each bin of SLACK_EDGES_S; those that have lost their objective for good are in
    none. `unbroken`: those that have not yet had a pause longer than their max-gap objective; `gap_s` is the tightest
    such objective among them.
    """

    running: int = 0
    context_tokens: float = 0.0  # prompt and answer so far, of all of them
    to_come_tokens: float = 0.0  # mean per stream
    slack: tuple[int, ...] = NO_SLACK
    unbroken: int = 0
    gap_s: float = math.inf
    over_tokens: float = 0.0  # by which answers have outgrown what was expected, and claimed, of them


class TargetLoad(NamedTuple):
    """What is going on at a target: this router's leases, and of others what its metrics show.

    `prefills_end_s` is on the view's clock: when the prefills placed there will be done; in the past when there are
    none. `prefills_sd_s`: how much of that may be wrong; they are wrong together, so their deviations add up.
    `prefill_share` is the part of its time that went into prefills lately, in `prefill_steps_per_s` steps; of
    `stalls_per_s` prefills a step was predicted to be longer than the configured max-gap objective. All of them decayed
    averages.
    """

    prefills: int = 0
    handoffs: int = 0  # prefilled here, not yet pulled
    decodes: int = 0
    foreign: int = 0  # requests that others have running or waiting there
    prefill_tokens: int = 0  # uncached tokens of the prefills placed there
    prefills_end_s: float = -math.inf
    prefills_sd_s: float = 0.0
    streams: StreamLoad = StreamLoad()
    kv_capacity_bytes: float = math.inf
    kv_free_bytes: float = math.inf  # what neither a lease nor anybody else's request takes
    pinned_bytes: float = 0.0  # what handoffs take of it here, those not yet prefilled included
    out_bytes: float = 0.0  # KV on its way out of this instance and
    in_bytes: float = 0.0  # into it: handoffs between their prefill's answer and their decode leg's first byte
    prefill_share: float = 0.0
    prefill_steps_per_s: float = 0.0
    stalls_per_s: float = 0.0

    @property
    def requests(self) -> int:
        """Those that the target works on now; a handoff only waits to be pulled."""
        return self.prefills + self.decodes + self.foreign

    def token_s(self, step_s: float, tokens: float) -> Estimate:
        """The mean time per token of a stream of so many here, where a step without prompt tokens takes `step_s`.

        One with some is longer, and makes a token as well: but it is worth MIXED_TOKEN of one, for a stream among
        prefills costs those that come after it too. The shorter the stream, the more it hangs on how many it meets (a
        Poisson number), and most are shorter than the mean says.
        """
        share, steps_per_s = min(MOST_SHARE, self.prefill_share), self.prefill_steps_per_s
        mean_s = step_s / (1.0 - share + MIXED_TOKEN * steps_per_s * step_s)
        if not steps_per_s:
            return Estimate(mean_s)
        longer_s = max(0.0, share / steps_per_s - step_s)
        return Estimate(mean_s, longer_s * math.sqrt(steps_per_s * mean_s / max(1.0, tokens / 2.0)))

    def backlog_s(self, now_s: float) -> float:
        return max(0.0, self.prefills_end_s - now_s)


class TargetView(NamedTuple):
    """A target that may be used now."""

    target: Target
    role: Role
    load: TargetLoad = TargetLoad()


@dataclass(frozen=True, slots=True)
class Leans:
    """What the role balancer has settled: which targets lean to decoding (+1) or to prefilling (-1), and the price, in
    expected good requests, of opening a further target for decoding (the policy study's packing)."""

    lean: Mapping[Target, float] = field(default_factory=dict)
    pack: float = 0.0


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The immutable picture of the fleet a policy may look at: usable targets and tested pairs only."""

    now_s: float
    targets: tuple[TargetView, ...]
    # Decode instance -> where in `targets` those are that may prefill for it: the pair is tested, the roles allow it.
    partners: Mapping[InstanceId, tuple[int, ...]]
    costs: CostSnapshot
    soft_roles: bool = False  # the connector lets any engine prefill for any other
    leans: Leans = Leans()
    kv_bytes_per_s: float = 0.0  # what the links would carry lately had every prompt been handed off; a decayed average


def cached_elsewhere_tokens(request: InferenceRequest, target: Target) -> int:
    """How many more tokens of the prompt some other target holds."""
    most = max(request.cached_tokens.values(), default=0)
    return max(0, most - request.cached_tokens.get(target, 0))
