"""What only the gateway can add to rows of resources, by the resource's plural."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from engine.forecast.calibration import longest_wait_s
from gateway.explain.explanation import steps_of
from tenants.resources.ended import SettledRequest
from tenants.resources.resource import Json, Resource


def _with_longest_wait(row: Any, shown: Json) -> Json:
    if "wait_bucket" not in shown:
        return shown
    longest_s = longest_wait_s(shown["wait_bucket"])
    return shown | {"wait_up_to_s": None if math.isinf(longest_s) else round(longest_s, 2)}


def _with_steps(row: SettledRequest, shown: Json) -> Json:
    return shown | steps_of(row.packed)


_MORE: Mapping[str, Callable[[Any, Json], Json]] = {
    "calibration": _with_longest_wait,
    "requests/ended": _with_steps,
}


def json_of(resource: Resource[Any], row: Any) -> Json:
    """A row as API and pages show it."""
    shown = resource.as_json(row)
    more = _MORE.get(resource.plural)
    return shown if more is None else more(row, shown)
