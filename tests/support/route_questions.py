"""Every GET route, alone and with each of its parameters, as asked of a database of `many_requests`.

The routes come from the application, their parameters from its OpenAPI document.
"""

from __future__ import annotations

from functools import cache
from typing import Any
from urllib.parse import urlencode

from litestar import Litestar

from gateway.app import handlers
from gateway.routes import openapi
from tenants.instants import from_us
from tests.support.many_requests import SPAN_US

PATHS = {
    "tenant": "t1",
    "project": "prj_1",
    "key": "key_1",
    "limit": "lim_1",
    "slo": "slo_1",
    "webhook": "whk_1",
    "request_id": "req_1",
    "session": "run-1",
    "model_id": "model-1",
}
"""What the names in a path stand for; others stand for nothing that there is."""


def samples(now_us: int) -> dict[str, str]:
    """A value of each query parameter; others take the first of those that they name."""
    day_us = 86_400_000_000
    since, until = (
        from_us((now_us - part * SPAN_US // 10) // day_us * day_us).isoformat() for part in (6, 2)
    )
    return {
        "tenant": "t1",
        "project": "prj_1",
        "key": "key_1",
        "model": "model-1",
        "actor": "cli",
        "act": "limit.set",
        "subject": "limit:lim_1",
        "end_user": "amy",
        "outcome": "failed",
        "cause": "capacity",
        "tier": "batch",
        "order": "oldest",
        "sort": "slowest",
        "min_duration_s": "1.5",
        "code": "insufficient_quota",
        "limit_id": "lim_1",
        "session": "run-1",
        "seq": "0",
        "first": "0",
        "after": "0",
        "old": "0",
        "new": "0",
        "from": since,
        "since": since,
        "to": until,
        "until": until,
        "made": "true",
        "knob": "batch_cap",
    }


@cache
def documented_paths() -> dict[str, dict[str, Any]]:
    """Of the OpenAPI document."""
    app = Litestar(route_handlers=handlers(), openapi_config=openapi.openapi_config())
    paths: dict[str, dict[str, Any]] = openapi.document(app, app.openapi_schema.to_schema())["paths"]
    return paths


def questions(now_us: int) -> list[str]:
    """Each GET route alone, and with each of its parameters alone."""
    known, asked = samples(now_us), []
    for path, methods in documented_paths().items():
        if "get" not in methods:
            continue
        given: dict[str, str] = {}
        needed: dict[str, str] = {}
        for parameter in methods["get"].get("parameters", ()):
            if parameter["in"] == "path":
                path = path.replace(
                    f"{{{parameter['name']}}}", PATHS.get(parameter["name"], "nobody-has-this")
                )
                continue
            value = known.get(parameter["name"]) or _enumerated(parameter["schema"])
            if parameter["in"] == "query" and value:
                given[parameter["name"]] = value
                needed |= {parameter["name"]: value} if parameter["required"] else {}
        queries = {urlencode(needed), *(urlencode(needed | {name: value}) for name, value in given.items())}
        asked += [f"{path}?{query}" for query in sorted(queries)]
    return asked


def _enumerated(schema: dict[str, Any]) -> str:
    parts = [schema, *schema.get("oneOf", ()), *schema.get("anyOf", ())]
    return next((str(value) for part in parts for value in part.get("enum", ()) if value), "")
