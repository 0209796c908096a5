"""Prometheus collector of learned policies: the macro-states that pools are in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.flow.learned.switch import MacroStateSwitch

NO_STATE = -1


class MacroStateCollector(Collector):
    """A pool without a table in use has no series. Counts restart with each table."""

    def __init__(self, switches: Callable[[], Mapping[str, MacroStateSwitch | None]]) -> None:
        """`switches`: by model; None: it has no table in use."""
        self._switches = switches

    def collect(self) -> Iterator[Metric]:
        states = GaugeMetricFamily(
            "fairgate_macro_state",
            "Macro-state of the load that a learned policy acts by, 0 to 11; -1: none is taken on, or the "
            "load is outside of what its table was fitted on.",
            labels=["model"],
        )
        switches = CounterMetricFamily(
            "fairgate_macro_state_switches",
            "Changes of the macro-state that a learned policy acts by.",
            labels=["model"],
        )
        outside = CounterMetricFamily(
            "fairgate_macro_state_outside",
            "Times that the load left what a learned policy's table was fitted on.",
            labels=["model"],
        )
        for model, switch in self._switches().items():
            if switch is not None:
                states.add_metric([model], NO_STATE if switch.state is None else switch.state)
                switches.add_metric([model], switch.switches)
                outside.add_metric([model], switch.times_outside)
        yield from (states, switches, outside)
