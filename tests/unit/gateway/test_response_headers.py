"""Headers and refusals that SDKs act on."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from gateway.error_mapping import as_api_error, budget_denied
from gateway.response_headers import contract_headers, estimate_headers, go_duration, rate_limit_headers
from tenants.errors import DatabaseUnavailable, Invalid, KeyRejected, NotFound
from tenants.quota.store import Denied, LimitState, QuotaStoreUnavailable
from tenants.types import Limit, LimitMode, Meter, SubjectKind, Tier, Window
from tests.support import builders


def limit(meter: Meter = Meter.TOTAL_TOKENS, amount: int = 100, **fields: object) -> Limit:
    values: dict[str, object] = {"window": Window.MINUTE} | fields
    return Limit("lim_1", "ten_1", SubjectKind.TENANT, "ten_1", meter, amount, **values)  # type: ignore[arg-type]


def state(of: Limit, available: int, reset_s: float = 60.0) -> LimitState:
    return LimitState(of, of.amount - available, 0, available, reset_s)


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (0, "0s"), (-3, "0s"), (math.inf, "0s"), (0.0001, "1ms"), (0.12, "120ms"), (0.9999, "1s"),
        (1, "1s"), (1.2, "2s"), (59.5, "1m0s"), (360, "6m0s"), (3630, "1h0m30s"), (90_061, "25h1m1s"),
    ],
)  # fmt: skip
def test_resets_are_written_as_go_writes_durations_and_never_too_short(seconds: float, written: str) -> None:
    assert go_duration(seconds) == written


def test_headers_come_from_the_tightest_limit_of_each_kind() -> None:
    headers = rate_limit_headers(
        [
            state(limit(amount=1000), 500),
            state(limit(Meter.OUTPUT_TOKENS, 200, window=Window.DAY), 20, reset_s=3600),
            state(limit(Meter.REQUESTS, 60), 59, reset_s=1.0),
            state(limit(Meter.TOTAL_TOKENS, 5, mode=LimitMode.SHADOW), 0),
            state(limit(Meter.COST_NANOUSD, 5), 0),
        ]
    )
    assert headers == {
        "x-ratelimit-limit-requests": "60", "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s", "x-ratelimit-limit-tokens": "200",
        "x-ratelimit-remaining-tokens": "20", "x-ratelimit-reset-tokens": "1h0m0s",
    }  # fmt: skip
    assert rate_limit_headers([]) == {}


def test_estimates_are_numbers_that_a_script_can_read() -> None:
    estimate = builders.estimate(
        wait_s=(0.12, 0.4812), ttft_s=(0.2, 0.6), e2e_s=(1.0, 2.0), cost_nanousd=(100, 400),
        max_cost_nanousd=5000, samples=7, saturated=True,
    )  # fmt: skip
    [(name, field)] = estimate_headers(estimate).items()
    assert name == "x-fairgate-estimate"
    members = dict(member.split(";", 1) for member in field.split(", "))
    assert members == {
        "wait": "p50=0.120;p90=0.481", "ttft": "p50=0.200;p90=0.600", "latency": "p50=1.000;p90=2.000",
        "output-tokens": "p50=10;p90=40", "cost": "p50=100;p90=400;max=5000",
        'basis="replay"': "samples=7;saturated",
    }  # fmt: skip
    [calm] = estimate_headers(replace(estimate, saturated=False)).values()
    assert field == calm + ";saturated"
    assert estimate_headers(None) == {}


def test_a_tenants_name_cannot_break_a_header() -> None:
    assert contract_headers(builders.principal(tenant_name="bö\r\nset-cookie: x"), Tier.BATCH) == {
        "x-fairgate-tenant": "b???set-cookie: x",
        "x-fairgate-tier": "batch",
    }


@pytest.mark.parametrize(
    ("denied", "code", "retries"),
    [
        (Denied(limit(window=Window.MINUTE), 50, 10, 12.5), "rate_limit_exceeded", True),
        (Denied(limit(window=None, rate_per_s=10.0), 50, 10, 4.0), "rate_limit_exceeded", True),
        (Denied(limit(Meter.CONCURRENCY, 3, window=None), 1, 0, 1.0), "rate_limit_exceeded", True),
        # Held by running requests, and not spent.
        (Denied(limit(window=Window.LIFETIME), 50, 10, 1.0), "rate_limit_exceeded", True),
        (Denied(limit(window=Window.LIFETIME), 50, 10, None), "insufficient_quota", False),
        (Denied(limit(window=Window.DAY), 50, 10, 30_000.0), "insufficient_quota", False),
        # So slow a bucket that a client would sleep for hours: a spent budget.
        (Denied(limit(window=None, rate_per_s=0.001), 50, 10, 40_000.0), "insufficient_quota", False),
        (Denied(limit(window=Window.MINUTE), 101, 100, None), "insufficient_quota", False),
    ],
)
def test_a_rate_is_worth_waiting_for_and_a_budget_is_not(denied: Denied, code: str, retries: bool) -> None:
    error = budget_denied(denied)
    assert (error.status, error.code) == (429, code)
    headers = error.all_headers()
    assert headers["x-should-retry"] == ("true" if retries else "false")
    if retries:
        assert denied.retry_after_s is not None
        assert int(headers["retry-after-ms"]) >= denied.retry_after_s * 1000
        assert int(headers["retry-after"]) >= denied.retry_after_s
    else:
        assert "retry-after" not in headers
        assert "retry-after-ms" not in headers
    for number in (denied.limit.amount, denied.wanted, denied.available):
        assert str(number) in error.message
    assert denied.limit.meter.value in error.message


@pytest.mark.parametrize(
    ("exception", "status", "code"),
    [
        (KeyRejected("revoked"), 401, "invalid_api_key"),
        (DatabaseUnavailable("password=hunter2 host=db"), 503, "database_unavailable"),
        (QuotaStoreUnavailable("redis://secret@cache"), 503, "quota_store_unavailable"),
        (NotFound("tenant", "acme"), 404, "not_found"),
        (Invalid("weight", "must be positive"), 400, "invalid_value"),
        (RuntimeError("secret at /srv/x.py line 3"), 500, "internal_error"),
    ],
)
def test_domain_errors_have_one_place_in_the_table_and_no_driver_speaks(
    exception: Exception, status: int, code: str
) -> None:
    error = as_api_error(exception, "req_1")
    assert (error.status, error.code) == (status, code)
    text = error.body().decode()
    assert not any(word in text for word in ("hunter2", "secret", "/srv"))
    if status == 503:
        assert "retry-after" in error.all_headers()
    if status == 500:
        assert "req_1" in error.message
