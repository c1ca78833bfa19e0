"""Learning a time that is a sum of features: coefficients shared by the fleet, and how far each target is from them.

A Kalman filter on logarithms, so that a prior may be wrong by any factor, no coefficient turns negative, and residuals,
spreads and deviations are all relative to the time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import copysign, exp, inf, log, sqrt
from statistics import median
from typing import NamedTuple

Three = tuple[float, float, float]
Rows = tuple[Three, Three, Three]

NOTHING: Three = (0.0, 0.0, 0.0)
# Standard deviations are of logarithms: 0.1 is about 10 %.
SPREAD = 0.15  # of observations around their mean, before any was seen
LEVEL_SD = 0.4  # of a target's own level around the fleet's: other hardware, another host
DRIFT_SD = 0.1  # what a target's speed wobbles by from minute to minute
LEVEL_GROWTH_VAR_PER_S = 0.2**2 / 600  # a level not looked at for ten minutes is uncertain by 20 % more
DRIFT_HALF_LIFE_S = 10.0
OUTLIER = 3.0  # times the expected deviation
YOUNG = 10  # observations until which surprises are the fit's own fault rather than a target's
GROWTH_VAR = 0.005**2  # of a coefficient, per observation: the memory is some hundreds of them
FURTHEST = 12.0  # from the prior, in either direction: a factor of 160,000
MAX_SD = 1.0
STRAIGHT = 0.2  # residuals up to which one step of the solver is exact enough
ROUNDS = 4  # for the others
CLIPPED_SQUARE = 0.92  # mean of min(x * x, 4) for a standard normal x


class Belief(NamedTuple):
    """Where a deviation is thought to be at one moment. `calm`, 0 to 1: how far the level may learn from now; what is
    measured in the middle of a drift, or is an outlier, does not tell of it."""

    level: float
    level_var: float
    drift: float
    drift_var: float
    calm: float

    @property
    def log(self) -> float:
        return self.level + self.drift

    @property
    def var(self) -> float:
        return self.level_var + self.drift_var

    @property
    def yielding_var(self) -> float:
        return self.calm * self.level_var + self.drift_var


@dataclass(slots=True)
class Deviation:
    """How far one target, or pair, is from the fleet: a level that stays and a drift that passes.

    A drift that is not looked at is still there with a probability that halves every DRIFT_HALF_LIFE_S. Its mean fades
    with that probability p, and p * (1 - p) * drift**2 is what that adds to its variance.
    """

    level: float = 0.0
    level_var: float = LEVEL_SD**2
    drift: float = 0.0
    drift_var: float = DRIFT_SD**2
    seen_s: float = -inf
    surprise: float = 0.0  # the last residual if it was an outlier

    def at(self, now_s: float) -> Belief:
        age_s = max(0.0, now_s - self.seen_s)
        there = 0.5 ** (age_s / DRIFT_HALF_LIFE_S)
        square, drift = there * there, there * self.drift
        return Belief(
            self.level,
            min(LEVEL_SD**2, self.level_var + LEVEL_GROWTH_VAR_PER_S * age_s),
            drift,
            square * self.drift_var + (1 - square) * DRIFT_SD**2 + (1 - there) * drift * self.drift,
            DRIFT_SD**2 / (DRIFT_SD**2 + drift * drift),
        )

    def take(self, belief: Belief, step: float, certainty: float, now_s: float) -> None:
        """Move what was believed at `now_s` by `step`, dealt out by variance; `certainty`: 1 / variance of what
        was measured, as seen from the deviation; 0 teaches nothing."""
        part = step / belief.yielding_var
        self.level = belief.level + part * belief.calm * belief.level_var
        self.drift = belief.drift + part * belief.drift_var
        self.level_var = belief.level_var * (1 - belief.calm * belief.level_var * certainty)
        self.drift_var = belief.drift_var * (1 - belief.drift_var * certainty)
        self.seen_s = now_s


class Known(NamedTuple):
    """What a fit believes now. `var`: of the noise and of the coefficients together, for the mix of features that was
    seen lately; for another mix `noise_var` and the coefficients' `covariance`."""

    coefficients: Three
    var: float = 0.0
    noise_var: float = 0.0
    covariance: Rows = (NOTHING, NOTHING, NOTHING)

    def times(self, belief: Belief) -> Three:
        a, b, c = self.coefficients
        factor = exp(belief.log)
        return a * factor, b * factor, c * factor

    def sd(self, belief: Belief) -> float:
        """Relative to the time; at most MAX_SD, which stands for not knowing."""
        return min(MAX_SD, sqrt(self.var + belief.var))


class _Slopes(NamedTuple):
    """A prediction, taken apart. A slope is the derivative of the time's logarithm after a coefficient's logarithm,
    which is that coefficient's share of the time."""

    seconds: float
    each: Three
    all: float  # below 1 when there is an offset
    reach: Three  # covariance of the coefficients times `each`


class _Step(NamedTuple):
    logs: Three  # what to add to the coefficients' logarithms, and
    deviation: float  # to the deviation
    slopes: _Slopes
    certainty: float  # 1 / variance of the residual


class Fit:
    """`seconds = exp(deviation) * sum(coefficient * feature) + offset`, with noise relative to the seconds.

    Three coefficients, written out: a loop over them takes three times as long, and this runs for every request.
    """

    def __init__(self, coefficients: Three, *, common_sd: float, own_sd: float) -> None:
        """`common_sd`: how far off all priors may be together, `own_sd` each by itself; of logarithms."""
        a, b, c = coefficients
        self.seen = 0
        self.logs: Three = (log(max(1e-15, a)), log(max(1e-15, b)), log(max(1e-15, c)))
        self._priors = self.logs
        one, both = common_sd**2, common_sd**2 + own_sd**2
        self._wide: Rows = ((both, one, one), (one, both, one), (one, one, both))
        self._covariance = self._wide
        self._noise_var = SPREAD**2
        self._mix: Three = (1 / 3, 1 / 3, 1 / 3)
        self._surprise = 0.0  # like a deviation's, of whichever came last

    @property
    def coefficients(self) -> Three:
        a, b, c = self.logs
        return exp(a), exp(b), exp(c)

    def known(self) -> Known:
        var = self._noise_var + _dot(self._mix, self._reach(self._mix))
        return Known(self.coefficients, var, self._noise_var, self._covariance)

    def observe(
        self, features: Three, seconds: float, deviation: Deviation, now_s: float, offset_s: float = 0.0
    ) -> None:
        """Learn from one measured time. One that is not above 0, or that no feature has a part in, is left out."""
        belief, young = deviation.at(now_s), self.seen < YOUNG
        slopes = self._slopes(self.logs, belief.log, features, offset_s)
        if not (0 < seconds < inf and slopes.all > 0):
            return
        residual = log(seconds / slopes.seconds)
        variance = self._variance(slopes, belief)
        self._learn_noise(residual * residual / variance, self._noise_var / variance)
        before = self._surprise if young else deviation.surprise
        limit = OUTLIER * sqrt(variance)
        again = residual * before > 0 and abs(residual) > min(limit, abs(before) / 2)
        outlier = abs(residual) > limit and not again
        self._surprise = deviation.surprise = residual if outlier else 0.0
        if outlier:  # believed up to the limit, and nothing gets more certain
            residual = copysign(limit, residual)
        if again:
            belief = self._give_way(belief, min(abs(residual), abs(before)))
            slopes = self._slopes(self.logs, belief.log, features, offset_s)
        if outlier or young:  # nobody can be told from a fleet that is not known itself
            belief = belief._replace(calm=0.0)
        step = self._solve(features, slopes, residual, belief, offset_s)
        self._take(step, trusted=not outlier)
        deviation.take(belief, step.deviation, 0.0 if outlier else step.slopes.all**2 * step.certainty, now_s)

    def centre(self, deviations: Iterable[Deviation]) -> None:
        """What all have in common is the fleet's: move their median level into the coefficients."""
        known = [one for one in deviations if one.level_var < LEVEL_SD**2 / 4]
        if known:
            shift = median(one.level for one in known)
            a, b, c = self.logs
            self.logs = a + shift, b + shift, c + shift
            for one in known:
                one.level -= shift

    def _slopes(self, logs: Three, deviation: float, features: Three, offset_s: float) -> _Slopes:
        a, b, c = logs
        x, y, z = features
        a_s, b_s, c_s = exp(a + deviation) * x, exp(b + deviation) * y, exp(c + deviation) * z
        own_s = a_s + b_s + c_s
        if own_s <= 0:
            return _Slopes(offset_s, NOTHING, 0.0, NOTHING)
        seconds = own_s + offset_s
        each = a_s / seconds, b_s / seconds, c_s / seconds
        return _Slopes(seconds, each, own_s / seconds, self._reach(each))

    def _reach(self, slopes: Three) -> Three:
        first, second, third = self._covariance
        return _dot(first, slopes), _dot(second, slopes), _dot(third, slopes)

    def _variance(self, slopes: _Slopes, belief: Belief) -> float:
        own = slopes.all
        return _dot(slopes.each, slopes.reach) + own * own * (belief.level_var + belief.drift_var) + self._noise_var

    def _give_way(self, belief: Belief, surprise: float) -> Belief:
        """Two surprises in a row to the same side are news. Make whoever they are about uncertain enough to take it
        in: a young fit itself, later the deviation."""
        if self.seen >= YOUNG:
            return belief._replace(drift_var=belief.drift_var + surprise**2)
        first, second, third = zip(self._covariance, self._wide, strict=True)
        self._covariance = _sum(*first), _sum(*second), _sum(*third)
        return belief

    def _solve(self, features: Three, slopes: _Slopes, residual: float, belief: Belief, offset_s: float) -> _Step:
        """The most probable correction, by Gauss-Newton steps: an iterated extended Kalman filter."""
        near, logs, shift, certainty = slopes, NOTHING, 0.0, 0.0
        for done in range(ROUNDS if abs(residual) > STRAIGHT else 1):
            left = residual
            if done:
                near = self._slopes(_sum(self.logs, logs), belief.log + shift, features, offset_s)
                left += _dot(near.each, logs) + near.all * shift - log(near.seconds / slopes.seconds)
            certainty = 1 / self._variance(near, belief)
            logs = _times(near.reach, certainty * left)
            shift = near.all * belief.yielding_var * certainty * left
        return _Step(logs, shift, near, certainty)

    def _learn_noise(self, square: float, part: float) -> None:
        """`square`: of the residual, in expected variances; clipped, so that an outlier counts like any large one.
        `part`: the noise's share of the expected variance."""
        rate = part * max(0.02, 1 / (self.seen + 4))
        noise_var = self._noise_var * (1 + rate * (min(square, 4.0) / CLIPPED_SQUARE - 1))
        self._noise_var = min(1.0, max(0.02**2, noise_var))

    def _take(self, step: _Step, *, trusted: bool) -> None:
        self.seen += 1
        self.logs = _within(_sum(self.logs, step.logs), self._priors)
        rate, slopes = max(0.05, 1 / self.seen), step.slopes
        self._mix = _sum(_times(self._mix, 1 - rate), _times(slopes.each, rate / slopes.all))
        if trusted:
            self._covariance = self._narrowed(slopes.reach, step.certainty)

    def _narrowed(self, reach: Three, certainty: float) -> Rows:
        """`covariance - certainty * reach * reach'`, and a little more on the diagonal: what was learned wears off."""
        x, y, z = reach
        x_, y_, z_ = _times(reach, certainty)
        (xx, xy, xz), (_, yy, yz), (_, _, zz) = self._covariance
        most = self._wide[0][0]
        xx += (GROWTH_VAR if xx < most else 0.0) - x * x_
        yy += (GROWTH_VAR if yy < most else 0.0) - y * y_
        zz += (GROWTH_VAR if zz < most else 0.0) - z * z_
        xy, xz, yz = xy - x * y_, xz - x * z_, yz - y * z_
        return (xx, xy, xz), (xy, yy, yz), (xz, yz, zz)


def _dot(one: Three, other: Three) -> float:
    return one[0] * other[0] + one[1] * other[1] + one[2] * other[2]


def _sum(one: Three, other: Three) -> Three:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]


def _times(one: Three, factor: float) -> Three:
    return one[0] * factor, one[1] * factor, one[2] * factor


def _within(logs: Three, priors: Three) -> Three:
    a, b, c = (min(prior + FURTHEST, max(prior - FURTHEST, at)) for at, prior in zip(logs, priors, strict=True))
    return a, b, c
