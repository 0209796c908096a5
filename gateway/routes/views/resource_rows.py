"""What only the gateway can add to rows and acts of resources, by plurals and names of acts."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine.forecast.calibration import longest_wait_s
from gateway.explain.explanation import steps_of
from gateway.routes.views.limits_view import with_uses
from tenants.resources.records.ended import SettledRequest
from tenants.resources.resource import Resource
from tenants.resources.shown import Json

if TYPE_CHECKING:
    from gateway.gateway import Gateway


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


_OF_PAGES: Mapping[str, Callable[[Gateway, Any, Sequence[Any]], Awaitable[list[Json]]]] = {
    "limits": lambda gateway, query, rows: with_uses(gateway, rows, query.end_user or ""),
}


async def json_of_page(
    gateway: Gateway, resource: Resource[Any], query: Any, rows: Sequence[Any]
) -> list[Json]:
    """The rows of one page as the API shows them."""
    shown = _OF_PAGES.get(resource.plural)
    if shown is None:
        return [json_of(resource, row) for row in rows]
    return await shown(gateway, query, rows)


def json_of(resource: Resource[Any], row: Any) -> Json:
    """A row as API and pages show it."""
    shown = resource.as_json(row)
    more = _MORE.get(resource.plural)
    return shown if more is None else more(row, shown)
