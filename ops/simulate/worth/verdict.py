"""What a move was worth by three figures, each beside the simulator's own error. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from ops.reporting import number, plain, quantile
from ops.simulate.records import Records
from ops.simulate.slo import SloLimits

SHARE = 0.9
LEAST_ERROR = 0.01
"""Of a time: what is nearer than that is as good as equal."""
LEAST_S = 0.001


@dataclass(frozen=True, slots=True)
class WaitFigures:
    """Of the requests that arrived after a move. A refused one met nothing and waits for ever."""

    requests: int
    attainment: float
    """Share of all submitted that met their targets."""
    wait_p90_s: float
    """Until they were sent to an engine."""
    ttft_p90_s: float

    @staticmethod
    def of(records: Records, rows: Sequence[int], slo: SloLimits) -> WaitFigures:
        """Of these rows, at least one."""
        waits = [
            dispatched_s - records.arrival_s[row]
            if (dispatched_s := records.dispatched_s[row]) >= 0
            else math.inf
            for row in rows
        ]
        return WaitFigures(
            len(rows),
            sum(slo.met(records, row) for row in rows) / len(rows),
            quantile(waits, SHARE),
            quantile(map(records.ttft_s, rows), SHARE),
        )

    def as_json(self) -> dict[str, Any]:
        """A time that never came is null."""
        shown: dict[str, Any] = plain(asdict(self))
        return shown


@dataclass(frozen=True, slots=True)
class ReplayError:
    """How far the simulation of what happened is off what was recorded."""

    attainment: float
    wait_p90_s: float
    ttft_p90_s: float

    @staticmethod
    def of(served: WaitFigures, simulated: WaitFigures, stated_ttft: float | None) -> ReplayError:
        """`stated_ttft`: by what share a TTFT is off by chance (what-if's stated error); None: not known."""
        share = max(LEAST_ERROR, stated_ttft or 0.0)
        return ReplayError(
            max(abs(served.attainment - simulated.attainment), 1 / served.requests),
            max(apart(served.wait_p90_s, simulated.wait_p90_s), LEAST_ERROR * served.wait_p90_s, LEAST_S),
            max(apart(served.ttft_p90_s, simulated.ttft_p90_s), share * served.ttft_p90_s, LEAST_S),
        )


class MoveVerdict(StrEnum):
    """What a replay says of a move."""

    WORTH_IT = "worth it"
    COST = "cost"
    WITHIN_ERROR = "within the simulator's error"


def judged(without: WaitFigures, with_it: WaitFigures, error: ReplayError) -> tuple[MoveVerdict, str]:
    """The verdict, and the figure that decides in words: the first one that differs by more than the error,
    attainment before TTFT before wait."""
    gained = with_it.attainment - without.attainment
    if abs(gained) > error.attainment:
        verdict = MoveVerdict.WORTH_IT if gained > 0 else MoveVerdict.COST
        return verdict, f"attainment {100 * gained:+.1f} points"
    for name, before_s, after_s, error_s in (
        ("TTFT p90", without.ttft_p90_s, with_it.ttft_p90_s, error.ttft_p90_s),
        ("wait p90", without.wait_p90_s, with_it.wait_p90_s, error.wait_p90_s),
    ):
        if apart(before_s, after_s) > error_s:
            verdict = MoveVerdict.WORTH_IT if after_s < before_s else MoveVerdict.COST
            return verdict, f"{name} {seconds(before_s)} without it, {seconds(after_s)} with it"
    return MoveVerdict.WITHIN_ERROR, ""


def seconds(value_s: float) -> str:
    """`3.21 s`, or `never`."""
    return f"{number(value_s)} s" if math.isfinite(value_s) else "never"


def apart(one_s: float, other_s: float) -> float:
    """How far two times are apart; equal ones, also two that never come, by nothing."""
    return 0.0 if one_s == other_s else abs(one_s - other_s)
