"""Prometheus collector of the control loops: where knobs stand, who decides, what was moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True)
class ControlFigures:
    mode: str
    in_force: Mapping[str, float]
    moves: Mapping[tuple[str, bool], int]
    """Decided here since the start, by knob and whether they were made."""
    decides: bool
    """This gateway decides."""


class ControlCollector(Collector):
    """Labels are models, knobs and modes: closed sets."""

    def __init__(self, figures: Callable[[], Mapping[str, ControlFigures]]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        mode = GaugeMetricFamily(
            "fairgate_control_mode",
            "1, of the control loop's mode: off, advice, acting.",
            labels=["model", "mode"],
        )
        knob = GaugeMetricFamily(
            "fairgate_control_knob",
            "Where a knob of the control loop stands (not: where advice would put it).",
            labels=["model", "knob"],
        )
        holder = GaugeMetricFamily(
            "fairgate_control_holder",
            "1: this gateway decides in the control loop. Of gateways that share a queue, one does.",
            labels=["model"],
        )
        moves = CounterMetricFamily(
            "fairgate_control_moves",
            "Moves of a knob that this gateway decided: made, or advised alone.",
            labels=["model", "knob", "kind"],
        )
        for model, figures in self._figures().items():
            mode.add_metric([model, figures.mode], 1)
            holder.add_metric([model], figures.decides)
            for name, value in figures.in_force.items():
                knob.add_metric([model, name], value)
            for (name, is_made), count in figures.moves.items():
                moves.add_metric([model, name, "made" if is_made else "advised"], count)
        yield from (mode, knob, holder, moves)
