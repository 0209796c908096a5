"""Predictions of output lengths on arrival."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from engine.forecast.length.length import LengthForecast
from ops.simulate.traffic.requests import SimulatedRequest

MODEL = "simulated"
HIGH = 0.9


class Predictions(Protocol):
    """Predicts outputs, and learns from answers that end."""

    def predict(self, request: SimulatedRequest) -> tuple[int, int]:
        """Median and 90th percentile of the output, in tokens."""
        ...

    def ended(self, request: SimulatedRequest) -> None: ...


class Learned:
    """As served where only the tenant is known: a sketch of the lengths of its answers."""

    def __init__(self) -> None:
        self._forecast = LengthForecast()

    def predict(self, request: SimulatedRequest) -> tuple[int, int]:
        forecast, tenant = self._forecast, request.tenant
        return forecast.quantile(tenant, MODEL, 0.5), forecast.quantile(tenant, MODEL, HIGH)

    def ended(self, request: SimulatedRequest) -> None:
        self._forecast.observe(request.tenant, MODEL, request.output_tokens)


class Exact:
    """The true lengths: an upper bound for any forecast."""

    def predict(self, request: SimulatedRequest) -> tuple[int, int]:
        return request.output_tokens, request.output_tokens

    def ended(self, request: SimulatedRequest) -> None: ...


class Constant(Exact):
    def predict(self, request: SimulatedRequest) -> tuple[int, int]:
        return 64, 512


PREDICTIONS: dict[str, Callable[[], Predictions]] = {"learned": Learned, "exact": Exact, "none": Constant}
