"""The server does what its own OpenAPI document says. Schemathesis asks; fixed seed.

No answer may have a status, a media type or a shape that is not documented, and none may be a fault of ours.
"""

from __future__ import annotations

import contextlib
from typing import Any

import schemathesis
from hypothesis import HealthCheck, settings
from litestar import Litestar
from schemathesis import Case
from schemathesis.checks import CheckFunction
from schemathesis.checks import not_a_server_error as no_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from gateway.app import HANDLERS
from gateway.routes import openapi
from tests.support.server_process import MODEL, Server, until

EXAMPLES = 60
"""For each operation."""
MOST_TOKENS = 4
PATIENCE_S = 60.0
TIMEOUT = "X-Fairgate-Timeout-S"
CHECKS: list[CheckFunction] = [
    no_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


def described() -> dict[str, Any]:
    """The document as a server gives it, from the routes."""
    app = Litestar(route_handlers=HANDLERS, openapi_config=openapi.openapi_config())
    return openapi.document(app, app.openapi_schema.to_schema())


schema = schemathesis.openapi.from_dict(described())


def test_the_server_gives_this_very_document(server: Server) -> None:
    with server.http() as client:
        assert client.get("/openapi.json").json() == described()


@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
def test_every_answer_is_documented_and_none_is_a_fault_of_ours(case: Case, server: Server) -> None:
    narrowed(case)
    case.call_and_validate(
        base_url=server.url, headers={"authorization": f"Bearer {server.owner_key}"}, checks=CHECKS
    )


def narrowed(case: Case) -> None:
    """A random name is no model of ours, a long answer teaches nothing, and who gives us a microsecond is
    rightly refused with 503: with the right name, few tokens and some patience the rest gets further."""
    body: Any = case.body
    if "/completions" not in case.path:
        return
    if isinstance(body, dict):
        if isinstance(body.get("model"), str):
            body["model"] = MODEL
        for name in ("max_tokens", "max_completion_tokens"):
            if isinstance(body.get(name), int) and body[name] > MOST_TOKENS:
                body[name] = MOST_TOKENS
    with contextlib.suppress(KeyError, TypeError, ValueError):
        if 0 < float(case.headers[TIMEOUT]) < PATIENCE_S:
            case.headers[TIMEOUT] = str(PATIENCE_S)


def test_the_books_agree_after_all_that(server: Server) -> None:
    until(server.is_idle)
    report = server.verify()
    assert report["ok"], report
