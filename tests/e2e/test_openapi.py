"""The server does what its own OpenAPI document says. Schemathesis asks; fixed seed.

No answer may have a status, a media type or a shape that is not documented, and none may be a fault of ours.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, settings
from litestar import Litestar
from schemathesis import Case
from schemathesis import Response as Answer
from schemathesis.checks import CheckContext, CheckFunction
from schemathesis.checks import not_a_server_error as no_server_error
from schemathesis.generation.feedback import FeedbackSources
from schemathesis.generation.hypothesis.builder import (
    InvalidHeadersExampleMark,
    MissingPathParameters,
    UnserializablePayloadMark,
)
from schemathesis.pytest._test_builder import build_operation_test
from schemathesis.python._constants.orchestrator import make_constants_value_source
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    positive_data_acceptance,
    response_schema_conformance,
    status_code_conformance,
)

from gateway.app import handlers
from gateway.routes import openapi
from tests.support.server_process import MODEL, Server, server_process, until

EXAMPLES, EXAMPLES_LONG = 8, 120
"""Random ones of each operation, beside those that its schema's own bounds call for."""
MOST_BOUNDS = 100
"""Of an operation's cases at the bounds, evenly from among all of them: the largest schemas have a thousand,
most of them alike. The long run asks all."""
LEFT_OUT = (InvalidHeadersExampleMark, MissingPathParameters, UnserializablePayloadMark)
GENERATE = ("/completions", "/v1/responses", "/v1/messages")
MOST_TOKENS = 4
PATIENCE_S = 60.0
TIMEOUT = "X-Fairgate-Timeout-S"
RULES = (
    # Only what we gave, for the same list or request.
    "cursor: ",
    "X-Fairgate-Quote: .*not a quote of this server",
    # Of two parameters.
    "(from|since|to): .*(must be before|must lie at most|lies more than|days by window|with a full hour)",
    "(old|new): .*must be 0 <= old <= new",
    "tenant: .*is needed beside the project's name",
    "window: .*of format focus",
    # Sets that no pattern names: what Unicode prints, years, time zones, words of which none is there twice.
    ".*printable characters",
    "(from|to): .*must lie between",
    "time_zone: .*is not a time zone",
    "group_by: .*name each group once",
)
"""Why a parameter or header may be refused that is as the document says."""
BODY_RULE = "(?!.*(Invalid type(?!.*got `float`)|Unknown parameter|use 1 to 64 letters|say why|url: needs))"
"""Of a body's field: all but types (1.0 is whole in JSON Schema) and texts: what is stored or can be run."""
USED, ASKED = set[str](), set[str]()


def is_valid(case: Case) -> bool:
    """With every part: Schemathesis looks at one of them, beside a header for which it finds no value."""
    assert case.meta is not None
    modes = (case.meta.generation.mode, *(part.mode for part in case.meta.components.values()))
    return all(mode.is_positive for mode in modes)


def takes_what_is_valid(context: CheckContext, answer: Answer, case: Case) -> bool | None:
    """`positive_data_acceptance`, but for what no schema says."""
    if not is_valid(case) or answer.status_code == 412:  # a condition that does not hold
        return None
    if answer.status_code == 400:
        error = answer.json()["error"]
        reason = f"{error['param']}: {error['message']}"
        is_of_url = error["param"] in {each.name for each in case.operation.iter_parameters()}
        rules = RULES if is_of_url else (BODY_RULE,)
        if held := {rule for rule in rules if re.match(rule, reason, re.IGNORECASE | re.DOTALL)}:
            USED.update(held)
            return None
    return positive_data_acceptance(context, answer, case)


CHECKS: list[CheckFunction] = [
    no_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    takes_what_is_valid,
]


def described() -> dict[str, Any]:
    """The document as a server gives it, from the routes."""
    app = Litestar(route_handlers=handlers(), openapi_config=openapi.openapi_config())
    return openapi.document(app, app.openapi_schema.to_schema())


schema = schemathesis.openapi.from_dict(described())
schema.config.generation.update(with_security_parameters=False)  # ours are sent: others end at 401
OPERATIONS = {each.ok().label: each.ok() for each in schema.get_all_operations()}
LABELS = sorted(OPERATIONS)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[Server]:
    """A server of its own: Hypothesis takes words from the modules that are loaded, so that what it makes may
    have the name of another test's tenant."""
    with server_process(
        tmp_path_factory.mktemp("fuzzed"), chat_model, "--engine-max-sequences", "8"
    ) as running:
        yield running


def test_the_server_gives_this_very_document(fuzzed: Server) -> None:
    with fuzzed.http() as client:
        assert client.get("/openapi.json").json() == described()


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    """One connection for all cases."""
    with requests.Session() as session:
        session.trust_env = False
        yield session


def is_documented_and_no_fault_of_ours(case: Case, server: Server, session: requests.Session) -> None:
    narrowed(case)
    session.cookies.clear()
    headers = {"authorization": f"Bearer {server.owner_key}"}
    case.call_and_validate(base_url=server.url, session=session, headers=headers, checks=CHECKS)


@pytest.fixture(scope="module")
def feedback() -> FeedbackSources:
    """What Schemathesis learns from one operation for the others."""
    return FeedbackSources(constants_value_source=make_constants_value_source(schema))


@pytest.mark.parametrize("examples", [EXAMPLES, pytest.param(EXAMPLES_LONG, marks=pytest.mark.long)])
@pytest.mark.parametrize("label", LABELS)
def test_every_answer_is_documented_and_none_is_a_fault_of_ours(
    label: str, examples: int, fuzzed: Server, session: requests.Session, feedback: FeedbackSources
) -> None:
    """The cases are made here and not by `schema.parametrize`, which would make all of them as it
    collects."""
    ask = build_operation_test(
        config=schema.config,
        operation=OPERATIONS[label],
        test_func=is_documented_and_no_fault_of_ours,
        given_kwargs={},
        feedback=feedback,
        explicit_settings=settings(
            max_examples=examples,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    if examples == EXAMPLES:
        bounds = ask.hypothesis_explicit_examples
        ask.hypothesis_explicit_examples = bounds[:: -(-len(bounds) // MOST_BOUNDS) or 1]
    assert not any(mark.is_set(ask) for mark in LEFT_OUT), "part of the operation is not asked"
    ask(server=fuzzed, session=session)
    if examples == EXAMPLES_LONG:
        ASKED.add(label)


@pytest.mark.long
def test_each_exemption_is_used() -> None:
    if set(LABELS) != ASKED:
        pytest.skip("only the long run of all operations meets them all")
    assert {*RULES, BODY_RULE} == USED


def narrowed(case: Case) -> None:
    """A random name is no model of ours, a random cursor none that we gave, a long answer teaches nothing,
    and who gives us a microsecond is rightly refused with 503: without these the rest gets further."""
    body: Any = case.body
    if len(case.query) > 1 and is_valid(case):
        case.query.pop("cursor", None)
    if isinstance(body, dict) and str(body.get("url")).startswith("http"):
        body["url"] = "https://127.0.0.1/"  # no name is looked up
    if not case.path.endswith(GENERATE):
        return
    if isinstance(body, dict):
        if isinstance(body.get("model"), str):
            body["model"] = MODEL
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if isinstance(body.get(name), int) and body[name] > MOST_TOKENS:
                body[name] = MOST_TOKENS
    with contextlib.suppress(KeyError, TypeError, ValueError):
        if 0 < float(case.headers[TIMEOUT]) < PATIENCE_S:
            case.headers[TIMEOUT] = str(PATIENCE_S)


def test_the_books_agree_after_all_that(fuzzed: Server) -> None:
    until(fuzzed.is_idle)
    report = fuzzed.verify()
    assert report["ok"], report
