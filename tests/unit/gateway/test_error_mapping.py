"""Every refusal tells SDKs whether and when to retry."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from string import Formatter

import msgspec
import pytest

import gateway
from gateway import errors, key_errors
from gateway.budget.holds import EndUserRefused
from gateway.domain.account import Account
from gateway.domain.estimate import Times
from gateway.error_mapping import as_api_error, budget_denied, platform_limit
from gateway.errors import LONGEST_RETRY_S, ApiError, ErrorKind, Retry
from gateway.fair_threads import TooManyWaiting
from gateway.http.unknown_routes import method_not_allowed, not_found
from gateway.requests.dialects.chat import error_event
from gateway.response_headers import MAX_POLICIES, limit_headers, policy_name, quota_fields
from tenants.quota.store import Denied, LimitState, TooManyEndUsers
from tenants.types import NOTHING, Limit, LimitMode, Meter, SubjectKind, Tier, Window

ARGUMENTS: dict[str, tuple[object, ...]] = {
    "bad_request": ("no",),
    "bad_header": ("X", "y", "no"),
    "unknown_parameter": ("x",),
    "unsupported_parameter": ("x", "no"),
    "no_server_can": ("tools", "no"),
    "wrong_content_type": ("text/plain",),
    "context_too_long": (128, 100, 50, "max_tokens"),
    "precondition_failed": ("no", {"name": "acme"}, "0123456789abcdef"),
    "insufficient_quota": ("spent",),
    "rate_limited": ("wait", "tokens", 1.5),
    "accounts_unavailable": ("database",),
    "quote_refused": ("quote_expired", "it has expired"),
    "request_not_found": ("req_1",),
    "request_cancelled": (3,),
    "tier_has_limits": ("interactive", "output_tokens"),
}
KINDS = {name: kind for name, kind in vars(errors).items() if isinstance(kind, ErrorKind)}


def fields_of(kind: ErrorKind) -> dict[str, object]:
    """What a kind is called with: samples by their format."""
    parsed = [(name, spec) for _, name, spec, _ in Formatter().parse(kind.template) if name is not None]
    samples = {name: 3.5 if spec and spec[-1] in "fg" else "none" for name, spec in parsed}
    return samples | ({"retry_after_s": 4.0} if kind.retry is Retry.AFTER else {})


def made(kind: ErrorKind) -> list[ApiError]:
    """Samples of a kind; of one that may have been charged, charged and free."""
    fields = fields_of(kind)
    if "charged_tokens" in fields:
        return [kind(**fields | {"charged_tokens": tokens}) for tokens in (0, 7)]  # type: ignore[arg-type]
    return [kind(**fields)]  # type: ignore[arg-type]


CASES: list[tuple[str, ApiError]] = [
    *((name, getattr(errors, name)(*arguments)) for name, arguments in ARGUMENTS.items()),
    *((name, error) for name, kind in KINDS.items() for error in made(kind)),
    ("invalid_api_key", key_errors.invalid_api_key("revoked")),
    ("address_not_allowed", key_errors.address_not_allowed(None)),
    ("key_rejected", key_errors.key_rejected("project_suspended")),
    ("key_withdrawn", key_errors.key_withdrawn("tenant_suspended", 3)),
    ("not_found", not_found("/x")),
    ("method_not_allowed", method_not_allowed("PUT", "/x", "GET, OPTIONS")),
    *(("large_bodies_full", errors.large_bodies_full(1024, of_tenant=each)) for each in (False, True)),
    *(("address_has_too_many", errors.address_has_too_many(9, through_proxy=each)) for each in (False, True)),
    *(
        (name, make(seconds))
        for seconds in (None, 12.2, LONGEST_RETRY_S + 1)
        for name, make in {
            "platform_limit": platform_limit,
            "too_many_end_users": lambda seconds: errors.too_many_end_users("amy", 10, seconds),
        }.items()
    ),
]


def sdk_tries_again(error: ApiError) -> bool:
    """The retry rules of the SDKs of OpenAI and Anthropic, from their `_base_client.py`."""
    headers = error.all_headers()
    if float(headers.get("retry-after-ms", "0")) > LONGEST_RETRY_S * 1000:
        return False
    if "x-should-retry" in headers:
        return headers["x-should-retry"] == "true"
    return error.status in (408, 409, 429) or error.status >= 500


def constructors() -> set[str]:
    """Every function of `gateway/errors.py` that makes an error."""
    made: dict[str, Callable[..., object]] = dict(inspect.getmembers(errors, inspect.isfunction))
    return {
        name
        for name, function in made.items()
        if function.__module__ == errors.__name__
        and inspect.signature(function).return_annotation == "ApiError"
    }


def test_every_refusal_there_is_is_looked_at_here() -> None:
    assert constructors() - {name for name, _ in CASES} == set()


def test_every_call_of_a_kind_names_the_fields_of_its_template() -> None:
    calls = 0
    for path in Path(gateway.__file__).parent.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            if ast.unparse(call.func.value) != "errors" or call.func.attr not in KINDS:
                continue
            kind = KINDS[call.func.attr]
            fields = fields_of(kind).keys()
            optional = {"param"} - fields if kind.param is None else set()
            assert call.args == [], ast.unparse(call)
            assert {str(keyword.arg) for keyword in call.keywords} - optional == fields, ast.unparse(call)
            calls += 1
    assert calls > 50


@pytest.mark.parametrize(("name", "error"), CASES, ids=[name for name, _ in CASES])
def test_what_an_sdk_would_try_again_says_whether_and_when(name: str, error: ApiError) -> None:
    headers = error.all_headers()
    if error.status in (408, 409, 429) or error.status >= 500:
        assert headers["x-should-retry"] in ("true", "false"), f"{name} leaves it to the SDK's guess"
    if headers.get("x-should-retry") == "true":
        assert 0 < float(headers["retry-after-ms"]) <= LONGEST_RETRY_S * 1000
        assert float(headers["retry-after"]) * 1000 >= float(headers["retry-after-ms"])
    assert msgspec.json.decode(error.body())["error"].keys() == {
        *("message", "type", "param", "code"),
        *error.details,
    }


def test_no_refusal_calls_another_server_an_engine() -> None:
    assert [name for name, error in CASES if "engine" in error.message.lower()] == []


def test_what_was_charged_is_never_tried_again_by_itself() -> None:
    charged = [
        errors.engine_lost(charged_tokens=7),
        errors.settlement_pending(),
        errors.slow_reader(charged_tokens=7),
        errors.internal(request_id="r"),
    ]
    assert not any(sdk_tries_again(error) for error in charged)
    assert sdk_tries_again(errors.engine_lost(charged_tokens=0))
    assert sdk_tries_again(errors.tenant_queue_full(message="full", retry_after_s=2.0))
    assert not sdk_tries_again(errors.insufficient_quota("spent"))


def test_more_than_may_wait_for_a_thread_is_refused_for_a_moment() -> None:
    of_tenant = as_api_error(TooManyWaiting(512, of_tenant=True), "r")
    assert (of_tenant.status, of_tenant.code) == (429, "tenant_queue_full")
    assert "512 requests of this tenant are waiting to be read" in of_tenant.message
    in_all = as_api_error(TooManyWaiting(2048, of_tenant=False), "r")
    assert (in_all.status, in_all.code) == (503, "queue_full")
    assert sdk_tries_again(of_tenant)
    assert sdk_tries_again(in_all)


def test_a_stream_that_breaks_says_in_its_event_what_headers_can_say_no_more() -> None:
    account = Account("req_1", "acme", "standard", "refused", None, None, Times(0.0), NOTHING, NOTHING, 0, 0)
    lines = error_event(errors.queue_timeout(tier="batch", waited_s=12.0), account).decode().split("\n")
    assert lines[0] == "event: error"
    assert lines[2:] == ["", ""]
    found = msgspec.json.decode(lines[1].removeprefix("data: "))
    assert found["error"]["code"] == "queue_timeout"
    assert (found["error"]["status"], found["error"]["retry_after_ms"]) == (503, 2000)
    assert found["error"]["should_retry"] is True
    assert found["fairgate"]["tokens"] == {"held": 0, "charged": 0, "refunded": 0}


def limit(meter: Meter, amount: int, **fields: object) -> Limit:
    values: dict[str, object] = {"window": Window.MINUTE} | fields
    return Limit("lim_1", "ten_1", SubjectKind.TENANT, "ten_1", meter, amount, **values)  # type: ignore[arg-type]


def state(of: Limit, available: int, reset_s: float = 12.2) -> LimitState:
    return LimitState(of, of.amount - available, 0, available, reset_s)


def test_the_fields_name_every_hard_limit_the_tightest_first() -> None:
    fields = quota_fields(
        [
            state(limit(Meter.TOTAL_TOKENS, 1000, window=Window.DAY, tier=Tier.INTERACTIVE), 900),
            state(limit(Meter.REQUESTS, 20, window=None, rate_per_s=0.3), 2),
            state(limit(Meter.CONCURRENCY, 5, window=None), 4, 0.0),
            state(limit(Meter.COST_NANOUSD, 10**18, window=Window.LIFETIME), 10**18, float("inf")),
            state(limit(Meter.OUTPUT_TOKENS, 10, mode=LimitMode.SOFT), 0),
            state(limit(Meter.INPUT_TOKENS, 10, mode=LimitMode.SHADOW), 0),
        ]
    )
    assert fields["ratelimit-policy"].split(", ") == [
        '"tenant-requests-rate";q=20;w=67;qu="requests"',
        '"tenant-concurrency";q=5;qu="concurrent-requests"',
        '"tenant-total_tokens-day-interactive";q=1000;w=86400;qu="tokens"',
        '"tenant-cost_nanousd-lifetime";q=999999999999999;qu="nano-dollars"',
    ]
    assert fields["ratelimit"].split(", ") == [
        '"tenant-requests-rate";r=2;t=13',
        '"tenant-concurrency";r=4',
        '"tenant-total_tokens-day-interactive";r=900;t=13',
        '"tenant-cost_nanousd-lifetime";r=999999999999999',
    ]
    assert quota_fields([]) == {}


def test_however_many_limits_there_are_the_fields_stay_short() -> None:
    many = [state(limit(Meter.TOTAL_TOKENS, 100 + n), 50) for n in range(100)]
    assert quota_fields(many)["ratelimit"].count(";r=") == MAX_POLICIES


def test_a_refusal_by_a_limit_carries_the_fields_too() -> None:
    tight = limit(Meter.REQUESTS, 20)
    error = budget_denied(Denied(tight, 1, 0, 12.2, (state(tight, 0),)))
    assert error.all_headers()["ratelimit"] == '"tenant-requests-minute";r=0;t=13'
    spent = replace(tight, window=Window.LIFETIME)
    assert "retry-after" not in budget_denied(Denied(spent, 1, 0, None, (state(spent, 0),))).all_headers()


def test_a_budget_with_something_left_is_not_spent_and_says_what_fits() -> None:
    day = limit(Meter.TOTAL_TOKENS, 100, window=Window.DAY)

    def said(available: int, fitting_max_tokens: int | None, wanted: int = 80) -> str:
        return budget_denied(Denied(day, wanted, available, None), fitting_max_tokens).message

    assert "is spent" in said(0, 0)
    assert "is spent" not in said(30, 20)
    assert "available 30, requested 80. With max_tokens of at most 20 it would fit." in said(30, 20)
    assert "at most 20" in said(30, 20, wanted=800), "also where the request is larger than the limit"
    assert "shorten the prompt" in said(30, 0)
    assert "is spent" not in said(30, None)


def of_platform(meter: Meter, amount: int, **fields: object) -> Limit:
    return replace(limit(meter, amount, **fields), kind=SubjectKind.PLATFORM, subject_id="platform")


def test_of_a_platforms_limit_a_tenant_reads_only_that_it_binds_and_when_to_come_again() -> None:
    mine = state(limit(Meter.REQUESTS, 20), 2)
    full = state(of_platform(Meter.OUTPUT_TOKENS, 77_777, tier=Tier.BATCH, model="secret"), 0, 33.3)
    free = state(of_platform(Meter.COST_NANOUSD, 88_888), 44_444)
    soft = state(of_platform(Meter.REQUESTS, 66_666, mode=LimitMode.SOFT), 0)
    for states, left in (
        ((mine, free, soft), '"tenant-requests-minute";r=2;t=13'),
        ((mine, full, free), '"platform";r=0;t=34, "tenant-requests-minute";r=2;t=13'),
    ):
        fields = limit_headers(states)
        assert fields["ratelimit"] == left
        assert fields["ratelimit-policy"] == '"tenant-requests-minute";q=20;w=60;qu="requests"'
        assert fields["x-ratelimit-limit-requests"] == "20"
        assert "x-ratelimit-limit-tokens" not in fields
    assert limit_headers([full]) == {"ratelimit": '"platform";r=0;t=34'}
    for retry_after_s, code in ((33.3, "rate_limit_exceeded"), (None, "insufficient_quota")):
        error = budget_denied(Denied(full.limit, 99_999, 55_555, retry_after_s, (mine, full, free)))
        said = f"{error.body().decode()} {error.all_headers()}"
        assert error.code == code
        assert error.retry_after_s == retry_after_s
        for secret in ("77777", "88888", "44444", "99999", "55555", "batch", "secret", "output_tokens"):
            assert secret not in said


@pytest.mark.parametrize("closed", [of_platform(Meter.REQUESTS, 0), limit(Meter.REQUESTS, 0)])
def test_a_limit_of_zero_says_that_nothing_passes_and_when_it_resets(closed: Limit) -> None:
    error = budget_denied(Denied(closed, 1, 0, None, (state(closed, 0, 6.2),)))

    assert "is 0, so every request is refused. Nothing was charged. It resets in 7s." in error.message
    assert "smaller request" not in error.message
    assert "max_tokens" not in error.message
    headers = error.all_headers()
    assert (error.code, headers["retry-after"], headers["x-should-retry"]) == (
        "insufficient_quota",
        "7",
        "false",
    )
    for never_s in (math.inf, 0.0, 10 * LONGEST_RETRY_S):
        error = budget_denied(Denied(closed, 1, 0, None, (state(closed, 0, never_s),)))
        assert "retry-after" not in error.all_headers()


def test_a_limit_names_its_model_and_the_size_of_request_that_it_binds() -> None:
    long = limit(Meter.REQUESTS, 5, model="org/Model-1", above_tokens=8_000)
    assert policy_name(long) == "tenant-requests-minute-org_Model_1-above_8000"
    users = replace(long, kind=SubjectKind.END_USER, model=None)
    said = budget_denied(Denied(users, 1, 0, None)).message
    assert "the end user's limit of requests per minute for requests of more than 8000 tokens" in said


def test_an_end_user_too_many_is_named_with_the_way_out() -> None:
    refused = as_api_error(EndUserRefused("amy", TooManyEndUsers(10, 7.5)), "req_1")
    assert (refused.status, refused.code, refused.retry_after_s) == (429, "too_many_end_users", 7.5)
    for part in ("'amy'", "10 end users", "in 8 s", "gateway.max_end_users"):
        assert part in refused.message
