"""Online conformal correction of forecasts by their recent errors.

Online conformal correction by quantile tracking (Gibbs and Candes, "Adaptive conformal inference under
distribution shift", 2021; the step proportional to the scores' spread as in Angelopoulos, Candes and
Tibshirani, "Conformal PID control for time series prediction", 2023). The score of a forecast is the
logarithm of actual over told, each with a floor added; for each quantile q a shift follows the q-quantile
of the scores:

    shift += step * (q - [score <= shift])

so that over any long run the share of actual times under the corrected quantile is q, whatever the
distribution and however wrong the forecast. Shifts are kept for each load, tier and kind of request; where
there are too few answers yet, those of all tiers, or of all plain requests, do.

Requests of one burst err alike: however many, they are hardly more than one observation. So of those that are
told a forecast of one bucket within `BURST_S` only the 1st, 2nd, 4th, 8th and so on are learned from; for
those that were quoted together it counts when they end.

Of a request that still waits, or ended before its time came, all that is known is how long it has waited:
that is a miss where it was told less, and says nothing where it was told more (censoring). Each request moves
a quantile once: then, or when its time has come.

Pure and serialisable. Bounded: the number of buckets is limited.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, exp, inf, log
from typing import Any, Literal, Protocol

import msgspec

from engine.forecast.wait.forecast import Figures, Forecast, Seconds

Kind = Literal["plain", "binding", "together"]
"""`binding`: what was told is a promise. Only offers that were liked are taken: their errors differ.
`together`: a promise that was made while others to its tenant were outstanding, as they may be taken at one
moment."""
What = Literal["wait", "ttft", "tpot", "e2e"]
WHATS: tuple[What, ...] = ("wait", "ttft", "tpot", "e2e")
LEARNED_FIRST: tuple[What, ...] = ("ttft", "e2e")
QUANTILES = (0.5, 0.9)

FLOOR_S: Mapping[What, float] = {"wait": 0.02, "ttft": 0.005, "tpot": 0.0005, "e2e": 0.005}
"""Added to both sides of a ratio: 1 ms predicted and 3 ms waited counts as right."""
RATE = 0.05
"""Step of a shift, in spreads of the scores."""
WARM_UP = 20
"""Scores until a bucket speaks for itself."""
SHRINKAGE = 40
"""A shift of a median that so many scores have made counts half: the fewer, the more may be chance."""
NARROWING = 160
"""The same of a shift that lowers a p90: what has not happened lately may still. One that raises it counts
whole."""
LARGEST_SHIFT = 4.0
"""A factor of 55: beyond, the forecast is not wrong but something else happened."""
SMALLEST_SPREAD = 0.02
SPREAD_MEMORY = 0.02
"""Weight of the newest score in the spread."""
RECENT = 0.005
"""Weight of the newest request in the recent coverage."""
AT_ONCE: Seconds = (0.0, 0.0)
BURST_S = 0.05
"""Requests that are told their forecasts within this time are a burst."""
REDEEMED_BURST_S = 1.0
"""Requests that were quoted together and end within this time are one."""
FIRST_WAIT_S = 0.02
"""Shorter waits are none."""
WAIT_RATIO = 3.0
NUM_LOADS = 12
VERSION = 1

Correction = tuple[float, float, float, float]
"""Factor and summand of the p50, and of the p90."""
AS_IT_IS: Correction = (1.0, 0.0, 1.0, 0.0)

Miss = tuple[What, int]
"""A figure that was told too short, and at which of `QUANTILES`."""

Key = tuple[str, bool, int, int]
"""(kind, exact, tier or -1, load or -1)."""
ANY = -1
COARSER_EVERY = 4
"""Once a bucket has enough scores, this many of them make one of the coarser buckets'."""


class Bucket(msgspec.Struct, frozen=True, gc=False):
    """Requests whose forecasts are corrected alike."""

    kind: Kind
    is_exact: bool
    """The length of the answer was known."""
    tier: int
    load: int
    """0: it goes at once; then by the wait that was told, three times as long each."""

    def of_kind(self, kind: Kind) -> Bucket:
        """The same load under another promise."""
        return msgspec.structs.replace(self, kind=kind)


def bucket_of(raw: Forecast, tier: int, *, is_exact: bool, kind: Kind = "plain") -> Bucket:
    """Where a forecast, as it came, belongs."""
    return Bucket(kind, is_exact, tier, load_of(raw.wait_s[0]))


def load_of(wait_s: float) -> int:
    if wait_s <= FIRST_WAIT_S:
        return 0
    return min(NUM_LOADS - 1, 1 + int(log(wait_s / FIRST_WAIT_S) / log(WAIT_RATIO)))


def longest_wait_s(load: int) -> float:
    """The upper end of a bucket of waits."""
    return FIRST_WAIT_S * WAIT_RATIO**load if load < NUM_LOADS - 1 else inf


class HasTimes(Protocol):
    """Whatever has the times of a request, as `Figures` has."""

    @property
    def wait_s(self) -> Seconds:
        """Until it is dispatched."""

    @property
    def ttft_s(self) -> Seconds:
        """To its first token."""

    @property
    def tpot_s(self) -> Seconds:
        """For each further one."""

    @property
    def e2e_s(self) -> Seconds:
        """To its last."""


@dataclass(slots=True)
class Shifts:
    """The tracked quantiles of the scores of one figure in one bucket."""

    at: list[float] = field(default_factory=lambda: [0.0] * len(QUANTILES))
    spread: list[float] = field(default_factory=lambda: [0.0] * len(QUANTILES))
    """Mean distance of the scores from each."""
    seen: int = 0
    first: list[Sequence[float]] = field(default_factory=list)
    """The first scores, until there are `WARM_UP`: their quantiles are where the tracking begins."""

    @property
    def is_ready(self) -> bool:
        return self.seen >= WARM_UP

    def follow(self, scores: Sequence[float], has_moved: Sequence[bool] = (False,) * len(QUANTILES)) -> None:
        """Takes in the scores of one request, against each quantile as it was forecast. `has_moved`: while
        it waited."""
        self.seen += 1
        if self.seen <= WARM_UP:
            self.first.append(scores)
            if self.seen == WARM_UP:
                self._begin()
            return
        at, spread = self.at, self.spread
        for index, quantile in enumerate(QUANTILES):
            here, score = at[index], scores[index]
            spread[index] += SPREAD_MEMORY * (abs(score - here) - spread[index])
            if not has_moved[index]:
                self._move(index, quantile - (score <= here))

    def exceed(self, index: int) -> None:
        """A score that is not known yet is beyond this quantile."""
        self._move(index, QUANTILES[index])

    def _move(self, index: int, by: float) -> None:
        step = RATE * max(self.spread[index], SMALLEST_SPREAD)
        self.at[index] = _bounded(self.at[index] + step * by)

    def _begin(self) -> None:
        for index, quantile in enumerate(QUANTILES):
            column = sorted(scores[index] for scores in self.first)
            # As conformal prediction has it: of n scores and the next one, the n + 1st has no larger rank.
            self.at[index] = _bounded(column[min(len(column), ceil((len(column) + 1) * quantile)) - 1])
            self.spread[index] = sum(abs(score - self.at[index]) for score in column) / len(column)
        self.first.clear()


@dataclass(slots=True)
class Coverage:
    """How often the truth was no more than what was told."""

    judged: int = 0
    within: int = 0
    recent: float = 0.0

    def count(self, is_within: bool) -> None:
        self.judged += 1
        self.within += is_within
        self.recent += max(RECENT, 1 / self.judged) * (is_within - self.recent)

    @property
    def share(self) -> float | None:
        """Of all; None: nothing was judged."""
        return self.within / self.judged if self.judged else None


class Calibration:
    """Corrects forecasts by what became of earlier ones. One writer: the code that sees requests end."""

    def __init__(self) -> None:
        self._shifts: dict[tuple[Key, What], Shifts] = {}
        self._corrections: dict[Bucket, Sequence[Correction]] = {}
        """By `WHATS`, what the shifts in force make of a forecast in a bucket: looked up for every request,
        and changed by the few that are learned from."""
        self._bursts: dict[Bucket, tuple[float, int]] = {}
        """When the present burst began, and forecasts of it so far."""
        self.coverage: dict[tuple[Kind, What, float], Coverage] = {}
        """Of what was told, corrections included."""
        self.wait_coverage: dict[tuple[Kind, int, int, float], Coverage] = {}
        """Of waits, also by tier and by the bucket of the median that was told."""

    def correct(self, raw: Forecast, bucket: Bucket) -> Figures:
        """The corrected times: no p50 above its p90, no first token before the dispatch, no last one
        before the first."""
        of_wait, of_ttft, of_tpot, of_e2e = self.corrections(bucket)
        wait = corrected(raw.wait_s, of_wait, AT_ONCE)
        ttft = corrected(raw.ttft_s, of_ttft, wait)
        tpot = corrected(raw.tpot_s, of_tpot, AT_ONCE)
        return Figures(wait, ttft, tpot, corrected(raw.e2e_s, of_e2e, ttft))

    def corrections(self, bucket: Bucket) -> Sequence[Correction]:
        """What is made of the figures of a bucket's forecasts, by `WHATS`."""
        return self._corrections.get(bucket) or self._look_up(bucket)

    def has_learned(self, bucket: Bucket) -> bool:
        """Whether first tokens and whole answers of `WARM_UP` requests of this tier were compared with their
        forecasts, whatever they waited; for one that has to wait, of such as had to. Before, a p90 is the
        replay's word alone. What became of single requests says nothing of many together, and of those what
        was under load nothing of an idle engine."""
        is_together = bucket.kind == "together"
        loads = range(1, NUM_LOADS) if bucket.load else range(1 if is_together else NUM_LOADS)
        seen = dict.fromkeys(LEARNED_FIRST, 0)
        for ((kind, is_exact, tier, load), what), shifts in self._shifts.items():
            is_alike = (is_exact, tier, kind == "together") == (bucket.is_exact, bucket.tier, is_together)
            if what in seen and is_alike and load in loads:
                seen[what] += shifts.seen
        return min(seen.values()) >= WARM_UP

    def is_tracked(self, bucket: Bucket, now_s: float, burst_s: float = BURST_S) -> bool:
        """Whether a forecast that is told now is learned from: the n-th of a burst is where n is a power of
        two. A burst is what comes within `burst_s`."""
        began_s, count = self._bursts.get(bucket, (now_s, 0))
        if not 0.0 <= now_s - began_s < burst_s:
            began_s, count = now_s, 0
        self._bursts[bucket] = began_s, count + 1
        return not count & (count + 1)

    def observe(
        self,
        bucket: Bucket,
        raw: HasTimes,
        told: HasTimes,
        actual: Mapping[What, float],
        *,
        is_counted: bool = True,
        is_tracked: bool = True,
        taught: Collection[Miss] = (),
        never: Collection[What] = (),
    ) -> None:
        """A request is over. `told` is `raw` as it was corrected when it was told; `actual` has the figures
        that came to be, in seconds. `is_counted`: in the coverage; `is_tracked`: it is learned from;
        `taught`: what it taught while it waited; `never`: figures that would have been longer, had it not
        ended."""
        for what, actual_s in actual.items():
            is_cut, (p50_s, p90_s) = what in never, figure(told, what)
            if is_counted:
                self._count(bucket, what, told, actual_s, only_misses=is_cut)
            if is_tracked and (not is_cut or actual_s > p90_s):
                self._follow(bucket, what, raw, actual_s, taught)
            elif is_tracked and actual_s > p50_s and (what, 0) not in taught:
                self.overdue(bucket, raw, (what, 0), actual_s)

    def overdue(self, bucket: Bucket, raw: HasTimes, miss: Miss, after_s: float) -> bool:
        """A request has waited for so long, and its figure is yet to come. Learns from that where it is a
        miss of what is told today; returns whether it did."""
        what, index = miss
        score = _score(raw, what, index, after_s)
        moved = False
        for number, key in enumerate(_own_keys(bucket)):
            shifts = self._shifts.get((key, what))
            if shifts is None or not shifts.is_ready:
                continue
            if score <= shifts.at[index]:
                break
            shifts.exceed(index)
            moved = True
            if number == 0 and shifts.seen % COARSER_EVERY:
                break
        if moved:
            self._corrections.clear()
        return moved

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON: the shifts, not what was counted."""
        return {
            "version": VERSION,
            "shifts": [
                [*key, what, shifts.at, shifts.spread, shifts.seen]
                for (key, what), shifts in self._shifts.items()
                if shifts.is_ready
            ],
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Calibration:
        """The inverse of `to_dict`. Raises ValueError for anything else."""
        calibration = Calibration()
        try:
            if data["version"] != VERSION:
                raise ValueError(f"version {data['version']!r} of a calibration is not known")
            for kind, is_exact, tier, load, what, shifted, distances, seen in data["shifts"]:
                at, spread = [float(number) for number in shifted], [float(number) for number in distances]
                if what not in WHATS or not all(abs(number) <= LARGEST_SHIFT for number in at):
                    raise ValueError(f"not a calibration: {what!r} shifted by {at!r}")
                if (len(at), len(spread)) != (len(QUANTILES), len(QUANTILES)) or int(seen) < WARM_UP:
                    raise ValueError(f"not a calibration: {seen!r} scores of {what!r}")
                key: Key = (str(kind), bool(is_exact), int(tier), int(load))
                calibration._shifts[key, what] = Shifts(at, spread, int(seen))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a calibration: {error!r}") from None
        return calibration

    def _count(
        self, bucket: Bucket, what: What, told: HasTimes, actual_s: float, *, only_misses: bool = False
    ) -> None:
        for quantile, limit_s in zip(QUANTILES, figure(told, what), strict=True):
            is_within = actual_s <= limit_s
            if is_within and only_misses:
                continue
            self.coverage.setdefault((bucket.kind, what, quantile), Coverage()).count(is_within)
            if what == "wait":
                told_as = (bucket.kind, bucket.tier, load_of(told.wait_s[0]), quantile)
                self.wait_coverage.setdefault(told_as, Coverage()).count(is_within)

    def _look_up(self, bucket: Bucket) -> Sequence[Correction]:
        keys = _chain(bucket)
        found = self._corrections[bucket] = [
            _correction(self._in_force(keys, what), FLOOR_S[what]) for what in WHATS
        ]
        return found

    def _in_force(self, keys: Sequence[Key], what: What) -> Shifts | None:
        """Of the finest bucket with enough answers."""
        for key in keys:
            shifts = self._shifts.get((key, what))
            if shifts is not None and shifts.is_ready:
                return shifts
        return None

    def _follow(
        self, bucket: Bucket, what: What, raw: HasTimes, actual_s: float, taught: Collection[Miss]
    ) -> None:
        self._corrections.clear()
        quantiles = range(len(QUANTILES))
        scores = [_score(raw, what, index, actual_s) for index in quantiles]
        has_moved = [(what, index) in taught for index in quantiles]
        finest, *coarser = _own_keys(bucket)
        shifts = self._of(finest, what)
        shifts.follow(scores, has_moved)
        if shifts.seen <= WARM_UP or shifts.seen % COARSER_EVERY == 0:
            for key in coarser:
                self._of(key, what).follow(scores, has_moved)

    def _of(self, key: Key, what: What) -> Shifts:
        shifts = self._shifts.get((key, what))
        if shifts is None:
            shifts = self._shifts[key, what] = Shifts()
        return shifts


def _correction(shifts: Shifts | None, floor_s: float) -> Correction:
    """`(told + floor_s) * factor - floor_s`, as a factor and what is added, for each quantile."""
    if shifts is None:
        return AS_IT_IS
    at_p50, at_p90 = shifts.at
    at_p50 *= shifts.seen / (shifts.seen + SHRINKAGE)
    if at_p90 < 0:
        at_p90 *= shifts.seen / (shifts.seen + NARROWING)
    p50, p90 = exp(at_p50), exp(at_p90)
    return p50, (p50 - 1) * floor_s, p90, (p90 - 1) * floor_s


def corrected(raw_s: Seconds, by: Correction, least: Seconds) -> Seconds:
    """As the shifts in force have it, in order, and not below `least`."""
    p50 = raw_s[0] * by[0] + by[1]
    p90 = raw_s[1] * by[2] + by[3]
    # Not `max`: four calls of this for every request, and a call costs several times a comparison.
    if p50 < least[0]:
        p50 = least[0]
    if p90 < least[1]:
        p90 = least[1]
    return p50, (p50 if p90 < p50 else p90)


def figure(times: HasTimes, what: What) -> Seconds:
    pair: Seconds = getattr(times, f"{what}_s")
    return pair


def _score(raw: HasTimes, what: What, index: int, actual_s: float) -> float:
    return log((actual_s + FLOOR_S[what]) / (figure(raw, what)[index] + FLOOR_S[what]))


def _own_keys(bucket: Bucket) -> list[Key]:
    """Those that learn from a request of this bucket, the finest first."""
    return [key for key in _chain(bucket) if key[0] == bucket.kind]


def _chain(bucket: Bucket) -> list[Key]:
    """From the finest bucket to the coarsest: loads are distinguished before tiers."""
    kind, is_exact, tier, load = bucket.kind, bucket.is_exact, bucket.tier, bucket.load
    kinds = _KINDS[kind]
    # Where nothing waits there is nothing to be a multiple of: that says nothing of other loads.
    loads = [(tier, load)] + [(tier, ANY)] * (load > 0)
    return [(kind, is_exact, *where) for kind in kinds for where in loads]


_KINDS: Mapping[Kind, Sequence[Kind]] = {
    "plain": ["plain"],
    "binding": ["binding", "plain"],
    "together": ["together", "binding", "plain"],
}


def _bounded(shift: float) -> float:
    return min(LARGEST_SHIFT, max(-LARGEST_SHIFT, shift))
