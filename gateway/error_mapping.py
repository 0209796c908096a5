"""The one table from domain exceptions to API errors and request outcomes."""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import replace

from litestar.exceptions import HTTPException

from gateway import errors, key_errors
from gateway.budget.holds import BudgetDenied, EndUserRefused
from gateway.budget.top_up import AccountsLost
from gateway.dispatch.admission import DeadlineUnreachable, EstimateExceeds, TargetUnreachable
from gateway.dispatch.dispatcher import Closing, NoEngineAvailable, QueueExpired, QueueRefused
from gateway.dispatch.failing_tenants import TenantHeldOff
from gateway.domain.fallback import NoneTook
from gateway.errors import INVALID_REQUEST, LONGEST_RETRY_S, ApiError, Lacked
from gateway.fair_threads import TooManyWaiting
from gateway.requests.execution import StoppedByEngine
from gateway.requests.finish import SettlementFailed, SettlementPending
from gateway.requests.run import Closed, Interrupted, Run
from gateway.response_headers import go_duration, limit_headers
from gateway.upstream.base import (
    CapabilityLost,
    NotBegun,
    SequenceRefused,
    UpstreamBusy,
    UpstreamFailed,
    UpstreamLost,
    UpstreamUnavailable,
)
from gateway.upstream.capabilities import FIELD_NEED
from tenants.admin.transaction import etag_of
from tenants.errors import (
    AlreadyExists,
    DatabaseUnavailable,
    Invalid,
    KeyRejected,
    NotFound,
    NotWritten,
    PreconditionFailed,
    UnknownPrice,
)
from tenants.outcomes import RequestOutcome
from tenants.quota.rules import is_platforms
from tenants.quota.store import Denied, QuotaStoreUnavailable
from tenants.types import Limit, Meter, Window

log = logging.getLogger("fairgate.gateway")

_ENGINE_REFUSALS = {"context_length_exceeded": "messages", "too_large": "max_tokens", "invalid_request": None}
"""Engine error codes caused by the caller, and the parameter concerned."""


def as_api_error(exception: BaseException, request_id: str) -> ApiError:
    """An unknown exception is logged with its traceback and becomes a neutral 500."""
    match exception:
        case ApiError():
            return exception
        case KeyRejected(reason=reason):
            return key_errors.key_rejected(reason)
        case NoneTook(first=first, fallback=fallback):
            return replace(as_api_error(first, request_id), fallback=fallback.as_json())
        case BudgetDenied(denied=denied, fitting_max_tokens=fitting_max_tokens):
            return budget_denied(denied, fitting_max_tokens)
        case EndUserRefused(end_user=end_user, most=most, retry_after_s=retry_after_s):
            return errors.too_many_end_users(end_user, most, retry_after_s)
        case QueueRefused(full=full):
            return _queue_full(full.limit, "are waiting", full.retry_after_s, of_tenant=full.of_tenant)
        case TooManyWaiting(most=most, of_tenant=of_tenant):
            return _queue_full(most, "are waiting to be read", errors.RETRY_SOON_S, of_tenant=of_tenant)
        case DeadlineUnreachable(late=late):
            return errors.deadline_unreachable(
                what="its turn" if late.what == "wait" else "its answer",
                allowed_s=late.allowed_s,
                expected_s=late.expected_s,
                retry_after_s=min(late.retry_after_s, LONGEST_RETRY_S),
            )
        case EstimateExceeds(header=header, allowed=allowed, told=told):
            return errors.estimate_exceeds(param=header, allowed=allowed, estimate=told)
        case TargetUnreachable(late=late):
            return errors.target_unreachable(
                what=late.what,
                target_s=late.allowed_s,
                expected_s=late.expected_s,
                retry_after_s=min(late.retry_after_s, LONGEST_RETRY_S),
            )
        case CapabilityLost(need=need):
            return errors.capability_unavailable(
                what=need.removeprefix(FIELD_NEED), who="the servers that could are away, or no longer can"
            )
        case NoEngineAvailable(is_drained=is_drained):
            return errors.engine_drained() if is_drained else errors.engine_unavailable()
        case UpstreamBusy():
            return errors.upstream_full()
        case UpstreamUnavailable():
            return errors.engine_unavailable()
        case TenantHeldOff(failures=failures, why=why, retry_after_s=retry_after_s):
            return errors.requests_keep_failing(
                failures=failures, why=why, pause_s=retry_after_s, retry_after_s=retry_after_s
            )
        case Closing():
            return errors.shutting_down()
        case UpstreamFailed():
            return _upstream_failed(exception, 0)
        case UpstreamLost():
            return errors.engine_unavailable()
        case SequenceRefused(code=code, message=message, param=param):
            if code in _ENGINE_REFUSALS:
                return errors.bad_request(_sentence(message), param or _ENGINE_REFUSALS[code], code=code)
            if code != "engine_full":
                log.error("request %s: the engine refuses it: %s: %s", request_id, code, message)
            return errors.engine_unavailable()
        case QuotaStoreUnavailable():
            return errors.accounts_unavailable("quota_store")
        case NotWritten(reason=reason):
            return errors.accounts_unavailable("database", f"cannot be written: {reason}")
        case DatabaseUnavailable():
            return errors.accounts_unavailable("database")
        case UnknownPrice():
            log.error("request %s: %s", request_id, exception)
            return errors.no_price()
        case NotFound():
            return ApiError(404, "not_found", _sentence(str(exception)), param=exception.what)
        case AlreadyExists():
            return errors.already_exists(message=_sentence(str(exception)))
        case PreconditionFailed(current=current):
            etag = None if current is None else etag_of(current)
            return errors.precondition_failed(
                f"'If-Match' does not match: {exception}. Nothing was changed.", current, etag
            )
        case Invalid(field=field):
            return errors.bad_request(_sentence(str(exception)), field)
        case HTTPException() if exception.status_code < 500:
            return ApiError(
                exception.status_code, "invalid_request", _sentence(exception.detail), INVALID_REQUEST
            )
    log.error("request %s failed", request_id, exc_info=exception)
    return errors.internal(request_id=request_id)


def refusal_of(run: Run, closed: Closed) -> ApiError | None:
    """The error for the client of a finished request; None: the answer is complete."""
    match closed.cause:
        case None:
            return None
        case Interrupted(outcome=RequestOutcome.SHUTDOWN) | asyncio.CancelledError():
            return errors.shutting_down()
        case Interrupted(outcome=RequestOutcome.SLOW_READER):
            return errors.slow_reader(charged_tokens=run.output_tokens)
        case Interrupted(outcome=RequestOutcome.CANCELLED):
            return errors.request_cancelled(run.output_tokens)
        case Interrupted(outcome=RequestOutcome.WITHDRAWN):
            return key_errors.key_withdrawn(run.withdrawn_because, run.output_tokens)
        case Interrupted():
            return errors.client_left()
        case SettlementPending():
            return errors.settlement_pending()
        case AccountsLost(cause=cause):
            return as_api_error(cause, run.call.request_id)
        case UpstreamFailed() as failed:
            return _upstream_failed(failed, run.output_tokens)
        case StoppedByEngine(finish="cancelled") | UpstreamLost():
            return errors.engine_lost(charged_tokens=run.output_tokens)
        case StoppedByEngine():
            return errors.engine_failed()
        case QueueExpired():
            waited_s = (run.times.ended_s or 0.0) - run.times.arrived_s
            return errors.queue_timeout(tier=run.call.tier.value, waited_s=waited_s)
    if isinstance(closed.cause, SettlementFailed) or closed.account.outcome == RequestOutcome.FAILED.value:
        return errors.internal(request_id=run.call.request_id)  # logged where it happened
    return as_api_error(closed.cause, run.call.request_id)


def _upstream_failed(failed: UpstreamFailed, charged_tokens: int) -> ApiError:
    if isinstance(failed, NotBegun) and failed.code == "key":
        return errors.upstream_key_refused()
    if failed.is_requests and failed.message:
        return errors.upstream_request_failed(failure=failed.message, charged_tokens=charged_tokens)
    return errors.upstream_error(charged_tokens=charged_tokens)


def _queue_full(most: int, wait: str, retry_after_s: float, *, of_tenant: bool) -> ApiError:
    kind = errors.tenant_queue_full if of_tenant else errors.queue_full
    whose = "of this tenant " if of_tenant else ""
    message = f"{most} requests {whose}{wait}, the limit. Try again shortly."
    return kind(message=message, retry_after_s=retry_after_s)


def budget_denied(denied: Denied, fitting_max_tokens: int | None = None) -> ApiError:
    """429: a rate limit if it refills soon, else a spent budget. `fitting_max_tokens`: see `BudgetDenied`."""
    is_ours = is_platforms(denied.limit)
    if not denied.limit.amount:
        error = _nothing_passes(denied, is_ours=is_ours)
    elif is_ours:
        error = platform_limit(denied.retry_after_s)
    else:
        error = _own_limit(denied, fitting_max_tokens)
    error.headers.update(limit_headers(denied.states))
    error.lacked = Lacked(denied.limit.limit_id, denied.wanted, denied.available, is_ours)
    return error


def platform_limit(retry_after_s: float | None) -> ApiError:
    """A limit on all tenants together: the answer has no numbers, only when to retry."""
    what = "The server's limit on all tenants together does not admit this request"
    if retry_after_s is None or retry_after_s > LONGEST_RETRY_S:
        when = "" if retry_after_s is None else f" for another {math.ceil(retry_after_s)} s"
        return errors.insufficient_quota(f"{what}{when}. Nothing was charged. A smaller request may fit.")
    return errors.rate_limited(
        f"{what} now. Nothing was charged. Please try again in {retry_after_s:.3g} s.",
        "platform",
        retry_after_s,
    )


def _nothing_passes(denied: Denied, *, is_ours: bool) -> ApiError:
    """A limit of 0, with the time to its reset, after which it may differ."""
    what = "the server's limit on all tenants together" if is_ours else _named(denied.limit)
    resets = [state.reset_s for state in denied.states if state.limit.identity == denied.limit.identity]
    reset_s = next((reset_s for reset_s in resets if 0 < reset_s < math.inf), None)
    until = "" if reset_s is None else f" It resets in {go_duration(reset_s)}."
    error = errors.insufficient_quota(
        _sentence(f"{what} is 0, so every request is refused. Nothing was charged.{until}")
    )
    error.retry_after_s = reset_s if reset_s is not None and reset_s <= LONGEST_RETRY_S else None
    return error


def _named(limit: Limit) -> str:
    over = f" in tier {limit.tier.value}" if limit.tier is not None else ""
    over += f" for model {limit.model}" if limit.model is not None else ""
    over += f" for requests of more than {limit.above_tokens} tokens" if limit.above_tokens else ""
    return f"the {limit.kind.value.replace('_', ' ')}'s {describe(limit)}{over}"


def _own_limit(denied: Denied, fitting_max_tokens: int | None) -> ApiError:
    limit = denied.limit
    what = _named(limit)
    numbers = f"Limit {limit.amount}, available {denied.available}, requested {denied.wanted}."
    if denied.wanted > limit.amount:
        numbers += (
            " The request is larger than the whole limit: ask for a shorter answer, or shorten the prompt."
        )
    if fitting_max_tokens:
        numbers += f" With max_tokens of at most {fitting_max_tokens} it would fit."
    elif fitting_max_tokens == 0 and denied.available:
        numbers += " Not even the prompt and one token fit: shorten the prompt."
    retry_after_s = denied.retry_after_s
    # Also for a budget that is not spent but held by requests that may not use all of it.
    if retry_after_s is not None and retry_after_s <= LONGEST_RETRY_S:
        return errors.rate_limited(
            f"Rate limit reached: {what}. {numbers} Please try again in {go_duration(retry_after_s)}.",
            _meter_type(limit.meter),
            retry_after_s,
        )
    until = f" It resets in {go_duration(retry_after_s)}." if retry_after_s is not None else ""
    state = "has less left than this request needs" if denied.available else "is spent"
    return errors.insufficient_quota(f"You exceeded your current quota: {what} {state}. {numbers}{until}")


def describe(limit: Limit) -> str:
    """`total_tokens per day`, `requests rate`, `concurrency`."""
    if limit.window is not None:
        every = "over its lifetime" if limit.window is Window.LIFETIME else f"per {limit.window.value}"
        return f"limit of {limit.meter.value} {every}"
    if limit.is_bucket:
        return f"rate of {limit.meter.value} ({limit.rate_per_s:g} per second)"
    return f"limit of {limit.meter.value}"


def _meter_type(meter: Meter) -> str:
    if meter in (Meter.REQUESTS, Meter.CONCURRENCY):
        return "requests"
    return {Meter.COST_NANOUSD: "cost", Meter.GPU_MS: "gpu_time"}.get(meter, "tokens")


def _sentence(text: str) -> str:
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".") if text else text
