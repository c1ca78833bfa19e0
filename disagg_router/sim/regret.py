"""What the branches of a run's decisions say, as figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disagg_router.model import Decision, Path
from disagg_router.sim.oracle import Tried
from disagg_router.sim.oracle_bound import Hindsight

RESAMPLED = 2000
UNCACHED_TOKENS = (512, 2048, 8192)  # edges of the buckets
Floats = NDArray[np.float64]


def regret_figures(tried: Sequence[Tried], bound: Hindsight, seed: int = 1) -> Mapping[str, Any]:
    """Requests lost per decision, all with 90 % intervals by bootstrap over decisions.

    `regret_share`: the best branch less the one taken, in good requests; the best is known after the fact, so its luck
    counts for it. `held_out`: the branch that is best with the other lucks, judged with this one, which luck does not
    flatter; None with one luck only. `of_counted`: `regret_share` over the requests that a branch is judged by.
    `other_path` and `other_target`: what such a branch would have brought on average, loss or gain.
    """
    rng = np.random.default_rng(seed)
    means = [np.mean(np.asarray(one.good, dtype=float), axis=1) for one in tried]
    regret = np.array([mean.max() - mean[0] for mean in means])
    counted = float(np.mean([one.counted for one in tried])) if tried else 0.0
    share = _with_interval(regret, rng)
    return {
        "decisions": len(tried),
        "branches": float(np.mean([len(one.branches) for one in tried])) if tried else 0.0,
        "counted": counted,
        "regret_share": share["mean"],
        "interval_90": share["interval_90"],
        "of_counted": share["mean"] / counted if counted else 0.0,
        "of_counted_interval_90": [end / counted if counted else 0.0 for end in share["interval_90"]],
        "held_out": _with_interval(_held_out(tried), rng) if tried and len(tried[0].good[0]) > 1 else None,
        "other_path": _with_interval(_of_kind(tried, means, other_path=True), rng),
        "other_target": _with_interval(_of_kind(tried, means, other_path=False), rng),
        "confusion": _confusion(tried, means),
        "by_uncached_tokens": _by_length(tried, regret),
        "hindsight": {"idle": bound.idle, "capacity": bound.capacity, "attainment": bound.attainment},
    }


def regret_rows(regret: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    """Label and figure."""
    low, high = regret["interval_90"]
    rows = [
        (f"lost per decision ({regret['decisions']} tried)", f"{regret['regret_share']:.3g} ({low:.3g} to {high:.3g})"),
        ("of the requests judged", f"{regret['of_counted']:.2%}"),
    ]
    if (held_out := regret["held_out"]) is not None:
        rows.append(("lost per decision, luck aside", f"{held_out['mean']:.3g}"))
    rows.append(("attainment that nobody beats", f"{regret['hindsight']['attainment']:.1%}"))
    return rows


def _with_interval(values: Floats, rng: np.random.Generator) -> dict[str, Any]:
    if not len(values):
        return {"mean": 0.0, "interval_90": [0.0, 0.0]}
    drawn = rng.integers(len(values), size=(RESAMPLED, len(values)))
    low, high = np.quantile(values[drawn].mean(axis=1), [0.05, 0.95])
    return {"mean": float(values.mean()), "interval_90": [float(low), float(high)]}


def _held_out(tried: Sequence[Tried]) -> Floats:
    found = []
    for one in tried:
        good = np.asarray(one.good, dtype=float)
        lucks = range(good.shape[1])
        best = [int(np.argmax(np.delete(good, luck, axis=1).mean(axis=1))) for luck in lucks]
        found.append(float(np.mean([good[best[luck], luck] - good[0, luck] for luck in lucks])))
    return np.array(found)


def _of_kind(tried: Sequence[Tried], means: Sequence[Floats], *, other_path: bool) -> Floats:
    """The first of its kind of each decision, for that is the most promising one."""
    found = []
    for one, mean in zip(tried, means, strict=True):
        taken = _path(one.branches[0])
        kinds = (i for i, d in enumerate(one.branches) if i and (_path(d) != taken) == other_path)
        if (i := next(kinds, None)) is not None:
            found.append(float(mean[i] - mean[0]))
    return np.array(found)


def _confusion(tried: Sequence[Tried], means: Sequence[Floats]) -> Mapping[str, Mapping[str, int]]:
    """The path taken, then the path of the best branch: the one taken unless another is better."""
    counts = Counter(
        (_path(one.branches[0]), _path(one.branches[int(np.argmax(mean))]))
        for one, mean in zip(tried, means, strict=True)
    )
    paths = (Path.LOCAL, Path.REMOTE_PREFILL)
    return {taken.value: {best.value: counts[taken, best] for best in paths} for taken in paths}


def _by_length(tried: Sequence[Tried], regret: Floats) -> Mapping[str, Mapping[str, float]]:
    edges = (0, *UNCACHED_TOKENS)
    bucket = np.searchsorted(UNCACHED_TOKENS, [one.uncached_tokens for one in tried], side="right")
    return {
        f"from {low}": {
            "decisions": int(np.sum(bucket == i)),
            "regret_share": float(regret[bucket == i].mean()) if np.any(bucket == i) else 0.0,
        }
        for i, low in enumerate(edges)
    }


def _path(decision: Decision) -> Path:
    return Path.LOCAL if decision.prefill is None else Path.REMOTE_PREFILL
