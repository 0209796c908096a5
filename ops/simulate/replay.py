"""The baseline of a replay: a simulation of the server that the recording names, and its stated error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ops.simulate.figures.figures import figures
from ops.simulate.figures.stated_error import Baseline, ComparedFigure
from ops.simulate.pool import SimulatedPool
from ops.simulate.recorded import Recorded, records_of
from ops.simulate.run import Scenario, run_policy


@dataclass(frozen=True, slots=True)
class BaselineRun:
    baseline: Baseline
    pool: SimulatedPool = field(repr=False)
    figures: dict[str, Any] = field(repr=False)

    @staticmethod
    def of(
        recorded: Recorded,
        scenario: Scenario,
        policy: str,
        on_rows: Callable[[int], None] = lambda rows: None,
    ) -> BaselineRun:
        """Simulates the whole recording as it came. Raises ValueError where nothing can be compared."""
        pool, fairness = run_policy(
            replace(scenario, source=recorded, shortfall=None), policy, on_rows=on_rows
        )
        baseline = Baseline.of(records_of(recorded), pool.records)
        pool.records = baseline.records
        more = {"is_baseline": True, "options": scenario.options_of(policy).changed()}
        return BaselineRun(baseline, pool, figures(pool, fairness, scenario.slo) | more)

    @property
    def comparison(self) -> list[dict[str, Any]]:
        return [
            {
                "figure": figure.name,
                "served_s": figure.served_s,
                "baseline_s": figure.simulated_s,
                "simulated_alone_s": figure.alone_s,
                "off": figure.off,
                "stated_error": figure.error,
                "is_within": figure.is_within,
            }
            for figure in self.baseline.figures
        ]

    @property
    def warning(self) -> str | None:
        if not self.baseline.off:
            return None
        off = "; ".join(map(_words, self.baseline.off))
        return (
            f"The baseline is off by more than its stated error: {off}. Something that counts is not"
            " simulated here: do not size anything by this replay."
        )


def _words(figure: ComparedFigure) -> str:
    error = f"stated error {100 * (figure.error or 0):.1f} %"
    name = figure.name.replace("_", " ").replace("ttft", "TTFT").replace("e2e", "E2E")
    if figure.simulated_s == float("inf"):
        return f"{name} never came, and was {figure.served_s:.3g} s ({error})"
    off = f"{100 * figure.off:+.1f} %"
    return f"{name} {figure.simulated_s:.3g} s, and was {figure.served_s:.3g} s ({off}, {error})"
