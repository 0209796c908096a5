"""Figures of a policy's run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from engine.entry import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST
from ops.reporting import Spread, quantile
from ops.simulate.engine_run import Moment, ServedRequest

SEEDS = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class LatencyTargets:
    """SLO targets of a request."""

    ttft_s: float
    tpot_s: float

    def met(self, served: ServedRequest) -> bool:
        """Both limits, and the whole answer."""
        return served.done and served.ttft_s <= self.ttft_s and served.tpot_s <= self.tpot_s


def attainment(served: Sequence[ServedRequest], slo: LatencyTargets) -> float:
    """Share of all submitted requests that met the SLO."""
    return sum(slo.met(each) for each in served) / len(served)


def latency_figures(served: Sequence[ServedRequest]) -> dict[str, float]:
    """TTFT, TPOT and E2E in seconds."""
    return {
        "requests": len(served),
        "ttft_p50_s": quantile((each.ttft_s for each in served), 0.5),
        "ttft_p99_s": quantile((each.ttft_s for each in served), 0.99),
        "ttft_mean_s": statistics.fmean(each.ttft_s for each in served),
        "tpot_p50_s": quantile((each.tpot_s for each in served), 0.5),
        "tpot_p99_s": quantile((each.tpot_s for each in served), 0.99),
        "e2e_p50_s": quantile((each.e2e_s for each in served), 0.5),
        "e2e_p99_s": quantile((each.e2e_s for each in served), 0.99),
        "e2e_mean_s": statistics.fmean(each.e2e_s for each in served),
    }


# ---------------------------------------------------------------- fairness


def service_bound(kv_tokens: int, longest_input: int, weights: Mapping[str, float]) -> float:
    """2U / min(weight): the most by which two backlogged tenants' service per weight may differ (VTC).

    U = max(cost of the longest prompt, cost of all tokens that the running batch can hold).
    """
    unit = max(INPUT_TOKEN_COST * longest_input, OUTPUT_TOKEN_COST * kv_tokens)
    return 2 * unit / min(weights.values())


def widest_gap(moments: Sequence[Moment], weights: Mapping[str, float]) -> float:
    """The largest |W_f / w_f - W_g / w_g| over all intervals in which two tenants were both backlogged.

    Between two instants the difference of a pair is D(end) - D(start), D the running difference; over all
    intervals of a backlogged stretch its largest size is therefore max D - min D of that stretch.
    """
    widest = 0.0
    for left, right in combinations(sorted(weights), 2):
        difference = lowest = highest = 0.0
        inside = False
        for moment in moments:
            if left not in moment.backlogged or right not in moment.backlogged:
                inside = False
                continue
            if not inside:
                difference = lowest = highest = 0.0
                inside = True
            difference += (
                moment.service.get(left, 0) / weights[left] - moment.service.get(right, 0) / weights[right]
            )
            lowest, highest = min(lowest, difference), max(highest, difference)
            widest = max(widest, highest - lowest)
    return widest


def backlogged_share(moments: Sequence[Moment], tenants: Iterable[str]) -> float:
    """Share of the steps in which all of `tenants` were backlogged."""
    wanted = frozenset(tenants)
    return sum(wanted <= moment.backlogged for moment in moments) / max(1, len(moments))


# ---------------------------------------------------------------- several seeds


def spread(values: Sequence[float]) -> Spread:
    """Median and extremes."""
    return Spread(statistics.median(values), min(values), max(values))


def over_seeds(seeds: Sequence[int], figures: Callable[[int], Mapping[str, float]]) -> dict[str, Spread]:
    """Each figure's spread."""
    drawn = [figures(seed) for seed in seeds]
    return {name: spread([each[name] for each in drawn]) for name in drawn[0]}
