"""API errors in OpenAI's shape, {"error": {"message", "type", "param", "code"}}: their kinds and texts.

`message` names the subject, the limit and the remedy. SDKs obey `x-should-retry`, then `retry-after-ms`, then
`retry-after`, and by default retry 408, 409, 429 and 5xx. So each of those says whether a retry helps: yes,
and when, if nothing was charged and waiting helps; no if it would be refused again or charged twice. Driver
texts, stack traces and other tenants' data never appear: unknown exceptions become one neutral sentence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import msgspec

LONGEST_RETRY_S = 120.0
"""SDKs sleep for the whole `Retry-After`, one without bound: a longer wait is a spent budget."""

MOST_MESSAGE_CHARACTERS = 5_000
MOST_PARAM_CHARACTERS = 200
"""Quoted text is cut, or a refusal could be as large as its request."""
INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
_TYPES = {403: "permission_error", 429: "requests"}
"""By status; otherwise `invalid_request_error`."""
RETRY_SOON_S = 2.0


@dataclass(frozen=True, slots=True)
class Lacked:
    """The limit that refuses a request and how much it lacked, for records."""

    limit_id: str
    wanted: int
    available: int
    of_platform: bool = False


@dataclass
class ApiError(Exception):
    """An error response. `code` is stable and from a closed set: metrics use it as a label."""

    status: int
    code: str
    message: str
    type: str = ""
    """Empty: by status."""
    param: str | None = None
    retry_after_s: float | None = None
    should_retry: bool | None = None
    headers: dict[str, str] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    fallback: dict[str, Any] | None = None
    """Of a chain of which no pool took the request: which were tried, and why not."""
    lacked: Lacked | None = None

    def __post_init__(self) -> None:
        if not self.type:
            self.type = SERVER_ERROR if self.status >= 500 else _TYPES.get(self.status, INVALID_REQUEST)

    def __str__(self) -> str:
        return f"{self.status} {self.code}: {self.message}"

    def body(self) -> bytes:
        return msgspec.json.encode(self.payload())

    def payload(self) -> dict[str, dict[str, Any]]:
        param = None if self.param is None else _shortened(self.param, MOST_PARAM_CHARACTERS)
        message = _shortened(self.message, MOST_MESSAGE_CHARACTERS)
        said = {"message": message, "type": self.type, "param": param, "code": self.code}
        body: dict[str, dict[str, Any]] = {"error": said | self.details}
        if self.fallback is not None:
            body["fairgate"] = {"fallback": self.fallback}
        return body

    def late_payload(self) -> dict[str, dict[str, Any]]:
        """The error object within a stream, with what can no longer be sent as headers."""
        body = self.payload()
        body["error"] |= {
            "status": self.status,
            "retry_after_ms": None if self.retry_after_s is None else _milliseconds(self.retry_after_s),
            "should_retry": self.should_retry,
        }
        return body

    def all_headers(self) -> dict[str, str]:
        headers = dict(self.headers)
        if self.retry_after_s is not None:
            headers["retry-after-ms"] = str(_milliseconds(self.retry_after_s))
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.should_retry is not None:
            headers["x-should-retry"] = "true" if self.should_retry else "false"
        return headers


def _shortened(text: str, most: int) -> str:
    """Cuts the middle: the problem is at the start, the remedy at the end."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-(most // 4) :]}"


def _milliseconds(seconds: float) -> int:
    """Never 0: SDKs ignore that."""
    return max(1, math.ceil(seconds * 1000))


class Retry(Enum):
    """What a refusal tells SDKs about a retry."""

    UNSAID = "unsaid"
    NEVER = "never"
    SOON = "soon"
    AFTER = "after"
    """After the error's time."""
    IF_FREE = "if free"
    """Soon if `charged_tokens` is 0; otherwise the caller decides whether to pay again."""


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """A kind of refusal. Calling it with its template's fields makes the error."""

    status: int
    retry: Retry
    code: str
    template: str
    param: str | None = None
    """None: given in the call."""
    headers: Mapping[str, str] = field(default_factory=dict)

    def __call__(
        self, *, param: str | None = None, retry_after_s: float | None = None, **fields: object
    ) -> ApiError:
        values = {"param": param, **fields}
        should_retry = None if self.retry is Retry.UNSAID else self.retry is not Retry.NEVER
        if self.retry is Retry.IF_FREE:
            should_retry = values["charged_tokens"] == 0
        if self.retry in (Retry.SOON, Retry.IF_FREE):
            retry_after_s = RETRY_SOON_S
        return ApiError(
            self.status,
            self.code,
            self.template.format_map(values),
            param=param if self.param is None else self.param,
            retry_after_s=retry_after_s,
            should_retry=should_retry,
            headers=dict(self.headers),
        )


_CLOSE = {"connection": "close"}
"""The rest of the connection is not read, or cannot be parsed."""
_unavailable = partial(ErrorKind, 503, Retry.NEVER)
_unavailable_now = partial(ErrorKind, 503, Retry.SOON)
_unavailable_until = partial(ErrorKind, 503, Retry.AFTER)
_invalid = partial(ErrorKind, 400, Retry.UNSAID)
_forbidden = partial(ErrorKind, 403, Retry.UNSAID)
_too_slow = partial(ErrorKind, 408, Retry.NEVER)
_too_large = partial(ErrorKind, 413, Retry.NEVER, "request_too_large")
_conflict = partial(ErrorKind, 409, Retry.NEVER)
_upstream_failure = partial(ErrorKind, 502, Retry.IF_FREE)

# ---------------------------------------------------------------- errors of the caller

broken_json = _invalid("invalid_json", "The request body could not be parsed as JSON: {message}")
invalid_label = _invalid(
    "invalid_label",
    "Invalid '{param}': '{value}' is not a declared value of this label. Allowed: {allowed}. Send one of"
    " these, or leave the label out.",
)
input_too_long = _invalid(
    "context_length_exceeded",
    "The model's context is {context_tokens} tokens; '{param}' has {tokens}. Shorten it, or send"
    " 'truncate_prompt_tokens' if the server supports it.",
)
estimates_off = _invalid(
    "estimates_off",
    "This server makes no estimates (setting gateway.estimates is no, or SIGUSR2 switched them off), so"
    " {consequence}.",
)
malformed_http = ErrorKind(
    400, Retry.NEVER, "malformed_http", "This is not a valid HTTP/1.1 request.", headers=_CLOSE
)
head_too_large = ErrorKind(
    431,
    Retry.NEVER,
    "head_too_large",
    "The request line and headers are larger than {max_head_bytes} bytes or more than {max_headers}"
    " headers, the limit of this server. Send fewer or shorter headers, or a shorter URL.",
    headers=_CLOSE,
)
head_too_slow = _too_slow(
    "request_timeout", "The request line and headers did not arrive within {timeout_s:g} s.", headers=_CLOSE
)
body_too_slow = _too_slow(
    "request_timeout", "The request body did not arrive within {timeout_s:g} s.", headers=_CLOSE
)
body_too_large = _too_large(
    "The request body is larger than {max_body_bytes} bytes, the limit of this server.", headers=_CLOSE
)
text_too_large = _too_large(
    "Without its images the request is larger than {max_text_bytes} bytes, the limit of this server."
)
wrong_content_encoding = ErrorKind(
    415,
    Retry.NEVER,
    "unsupported_content_encoding",
    "The request has 'Content-Encoding: {encoding:.64}', but compressed bodies are not supported. Send it"
    " uncompressed and without this header.",
    headers={"accept-encoding": "identity"},
)
model_not_found = ErrorKind(
    404,
    Retry.UNSAID,
    "model_not_found",
    "The model '{name:.128}' does not exist or your key may not use it. GET /v1/models lists yours.",
    "model",
)
scope_missing = _forbidden(
    "insufficient_permissions",
    "This API key lacks the scope '{scope}'. Create a key that has it: fairgate key create --scope {scope}",
)
tier_not_allowed = _forbidden(
    "service_tier_not_allowed",
    "service_tier '{asked}' means tier {tier}, which this key may not use. Allowed tiers: {allowed}.",
    "service_tier",
)
already_exists = _conflict("already_exists", "{message}", "name")

# ---------------------------------------------------------------- limits, queue and estimates

no_price = _unavailable(
    "model_not_priced",
    "This model has no price yet, and nothing is served unmetered. Ask the operator to set one.",
)
too_many_connections = _unavailable_now(
    "too_many_connections",
    "All {most} connections of this server are in use. Try again shortly.",
    headers=_CLOSE,
)
queue_full = _unavailable_until("queue_full", "{message}")
tenant_queue_full = ErrorKind(429, Retry.AFTER, "tenant_queue_full", "{message}")
queue_timeout = _unavailable_now(
    "queue_timeout",
    "The request waited {waited_s:.1f} s in tier {tier} without a turn; nothing was charged."
    " Try again later or in a higher tier.",
)
estimate_exceeds = _conflict(
    "estimate_exceeds",
    "{estimate}, but '{param}' allows {allowed}. Nothing was held or charged. Allow more, ask for another"
    " tier, or try again later.",
)
deadline_unreachable = _unavailable_until(
    "deadline_unreachable",
    "The request may wait {allowed_s:.1f} s, but {what} is expected only after {expected_s:.1f} s"
    " (median). Nothing was charged. Allow more time, ask for a higher tier, or try again later.",
)
target_unreachable = _unavailable_until(
    "target_unreachable",
    "Too many requests are waiting: the request's {what} may take {expected_s:.1f} s (p90), and its target"
    " is {target_s:g} s. Nothing was charged. Try again later, ask for a higher tier, or send"
    " fewer requests at once.",
)

# ---------------------------------------------------------------- outages

engine_unavailable = _unavailable_now(
    "engine_unavailable",
    "No server of this model is ready. Nothing was charged. Try again shortly.",
)
engine_drained = _unavailable_now(
    "engine_unavailable",
    "An operator has drained every running server of this model. Nothing was charged. Try again shortly.",
)
capability_unavailable = _unavailable_now(
    "capability_unavailable",
    "No running server of this model can do what the request needs ({what}): {who}."
    " Nothing was charged. Try again shortly, or leave it out.",
)
engine_lost = ErrorKind(
    503,
    Retry.IF_FREE,
    "engine_lost",
    "The server of this model stopped while it generated this answer."
    " Only the {charged_tokens} tokens that arrived were charged.",
)
engine_failed = ErrorKind(
    500, Retry.NEVER, "engine_failed", "The server of this model failed to generate this answer."
)
upstream_error = _upstream_failure(
    "upstream_error",
    "The server of this model did not answer properly. Only the {charged_tokens} tokens that arrived were"
    " charged.",
)
upstream_request_failed = _upstream_failure(
    "upstream_request_failed",
    "The server of this model answers other requests, but failed on this one: {failure}. Only the"
    " {charged_tokens} tokens that arrived were charged.",
)
upstream_key_refused = ErrorKind(
    502,
    Retry.NEVER,
    "upstream_error",
    "The server of this model rejects this gateway's key (401). Nothing was charged. Only the operator of"
    " this gateway can fix that (api_key_env).",
)
upstream_full = _unavailable_now(
    "upstream_full",
    "The server of this model is full (429). Nothing was charged. Try again shortly.",
)
requests_keep_failing = ErrorKind(
    429,
    Retry.AFTER,
    "requests_keep_failing",
    "Your tenant's last {failures} requests to this model failed at its server, which answers other"
    " requests. It says about the last one: {why}. Nothing was charged. Fix the request, and try again in"
    " {pause_s:.3g} s; one success ends the pauses.",
)
settlement_pending = _unavailable(
    "settlement_pending",
    "The answer was generated, but its charge could not be recorded yet; it will be, exactly once.",
)
shutting_down = _unavailable_now("shutting_down", "This server is shutting down. Try again shortly.")
internal = ErrorKind(
    500,
    Retry.NEVER,
    "internal_error",
    "The server had an error while it processed your request. Its id is {request_id}.",
)

# ---------------------------------------------------------------- a request that runs, and repeated ones

request_elsewhere = _conflict(
    "request_elsewhere",
    "This request is at gateway {gateway}, which does not answer. Send this to that gateway, or try again.",
    "request_id",
)
not_waiting = _conflict(
    "request_not_waiting",
    "The request cannot change its tier: its status is '{status}'. Only a waiting request can.",
    "request_id",
)
client_left = ErrorKind(499, Retry.NEVER, "client_left", "The client closed the connection.")
slow_reader = _too_slow(
    "slow_reader",
    "The client stopped reading the answer for too long, so it was ended."
    " Only the {charged_tokens} tokens that were generated were charged.",
)
idempotency_key_reused = _conflict(
    "idempotency_key_reused",
    "This 'Idempotency-Key' was used for a request with another body or route. Use a new key.",
    "Idempotency-Key",
)
idempotent_run_in_progress = ErrorKind(
    409,
    Retry.AFTER,
    "idempotent_run_in_progress",
    "A request with this 'Idempotency-Key' is still running. Try again shortly for its answer.",
    "Idempotency-Key",
)
idempotent_run_lost = _conflict(
    "idempotent_run_lost",
    "The request with this 'Idempotency-Key' ({request_id}) was cut off by a failure: {charged_tokens}"
    " tokens were charged and its answer is lost. Use a new key to run it again.",
    "Idempotency-Key",
)
idempotent_answer_too_large = _conflict(
    "idempotent_answer_too_large",
    "The request with this 'Idempotency-Key' ({request_id}) has run and was charged, but its answer was too"
    " large to keep. Use a new key to run it again.",
    "Idempotency-Key",
)

# ---------------------------------------------------------------- texts that depend on more than their fields


def bad_request(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    return ApiError(400, code, message, param=param)


def bad_header(name: str, value: str, wanted: str) -> ApiError:
    return ApiError(400, "invalid_header", f"Invalid '{name}': '{value[:64]}'. {wanted}", param=name)


def unknown_parameter(name: str) -> ApiError:
    shown = _shortened(name, MOST_PARAM_CHARACTERS)
    return ApiError(400, "unknown_parameter", f"Unknown parameter: '{shown}'.", param=name)


def unsupported_parameter(name: str, message: str) -> ApiError:
    return ApiError(400, "unsupported_parameter", message, param=name)


class ServerLacks(ApiError):
    """400: no server of this model can do what the request asks for; another model's may."""


def no_server_can(name: str, message: str) -> ServerLacks:
    return ServerLacks(400, "unsupported_parameter", message, param=name)


def wrong_content_type(sent: str, wanted: str = "application/json") -> ApiError:
    shown = f"'{sent[:80]}'" if sent else "nothing"
    message = f"The content type must be {wanted}; the request has {shown}."
    return ApiError(415, "unsupported_media_type", message)


def address_has_too_many(most: int, *, through_proxy: bool) -> ApiError:
    return ApiError(
        429,
        "address_has_too_many",
        f"Your address has {most} {'requests at a time' if through_proxy else 'connections'}, the limit for"
        " one address. Use fewer at a time, or ask the operator to raise"
        " gateway.max_connections_per_address.",
        retry_after_s=RETRY_SOON_S,
        should_retry=True,
        # A proxy's connection carries other clients' requests, too.
        headers={} if through_proxy else dict(_CLOSE),
    )


def large_bodies_full(most_bytes: int, *, of_tenant: bool) -> ApiError:
    whose = "Your requests with" if of_tenant else "All requests with"
    return ApiError(
        429 if of_tenant else 503,
        "large_bodies_full",
        f"{whose} large bodies that wait or run add up to the limit of {most_bytes} bytes. Try again when"
        " some have finished.",
        retry_after_s=RETRY_SOON_S,
        should_retry=True,
        headers=dict(_CLOSE),
    )


def context_too_long(
    context_tokens: int, prompt_tokens: int, max_tokens: int | None, param: str, *, is_least: bool = False
) -> ApiError:
    """Prompt, or prompt and answer, exceed the context. `is_least`: `prompt_tokens` is only a lower bound."""
    if max_tokens is None:
        least = "at least " if is_least else ""
        message = f"your prompt has {least}{prompt_tokens} tokens and leaves no room for an answer"
        advice = "Shorten the prompt."
    else:
        message = (
            f"you asked for {prompt_tokens + max_tokens} tokens ({prompt_tokens} in the prompt,"
            f" {max_tokens} for the answer)"
        )
        advice = f"Shorten the prompt or ask for at most {max(0, context_tokens - prompt_tokens)} tokens."
    return ApiError(
        400,
        "context_length_exceeded",
        f"This model's maximum context length is {context_tokens} tokens, but {message}. {advice}",
        param=param,
    )


def precondition_failed(message: str, current: Mapping[str, Any] | None, etag: str | None) -> ApiError:
    return ApiError(
        412,
        "precondition_failed",
        message,
        param="If-Match",
        should_retry=False,
        headers={} if etag is None else {"etag": f'"{etag}"'},
        details={"current": current},
    )


def insufficient_quota(message: str) -> ApiError:
    """A budget that does not refill soon: SDKs must not retry by themselves."""
    return ApiError(429, "insufficient_quota", message, type="insufficient_quota", should_retry=False)


def rate_limited(message: str, meter_type: str, retry_after_s: float) -> ApiError:
    return ApiError(
        429, "rate_limit_exceeded", message, type=meter_type, retry_after_s=retry_after_s, should_retry=True
    )


def too_many_end_users(end_user: str, most: int, retry_after_s: float | None) -> ApiError:
    is_soon = retry_after_s is not None and retry_after_s <= LONGEST_RETRY_S
    when = "" if retry_after_s is None else f" A place will be free in {math.ceil(retry_after_s)} s."
    return ApiError(
        429,
        "too_many_end_users",
        f"The end user '{end_user}' has no counter yet, and your tenant's limit of {most} end users with"
        f" counters is reached.{when} Requests of those continue. For more, ask the operator to raise"
        " gateway.max_end_users, or to set limits with shorter windows.",
        param="safety_identifier",
        retry_after_s=retry_after_s if is_soon else None,
        should_retry=is_soon,
    )


def accounts_unavailable(what: str, why: str = "cannot be reached") -> ApiError:
    """Database or quota store down: fail closed, never unmetered."""
    return ApiError(
        503,
        f"{what}_unavailable",
        f"The {what.replace('_', ' ')} {why}, and nothing is served unmetered. Try again shortly.",
        retry_after_s=RETRY_SOON_S,
        should_retry=True,
    )


def quote_refused(code: str, reason: str, *, conflict: bool = False) -> ApiError:
    return ApiError(
        409 if conflict else 400,
        code,
        f"The quote in 'X-Fairgate-Quote' cannot be used: {reason}. Get another from POST /v1/quotes, or"
        " leave the header out.",
        param="X-Fairgate-Quote",
        should_retry=False,
    )


def request_not_found(request_id: str, *, of_any_tenant: bool = False) -> ApiError:
    """Does not tell whether another tenant has such a request. `of_any_tenant`: an operator asked."""
    of_yours, route = ("", "/admin/v1/requests") if of_any_tenant else (" of yours", "/v1/requests")
    return ApiError(
        404,
        "request_not_found",
        f"There is no request '{request_id[:64]}'{of_yours}. GET {route} lists waiting and running requests.",
        param="request_id",
    )


def request_cancelled(charged_tokens: int) -> ApiError:
    return ApiError(
        499,
        "request_cancelled",
        "The request was cancelled."
        + (f" The {charged_tokens} tokens that were generated were charged." if charged_tokens else ""),
        should_retry=False,
    )


def tier_has_limits(tier: str, meter: str | None) -> ApiError:
    """A limit binds only one of the two tiers, and a hold cannot move between limits."""
    on_meter = f" on {meter}" if meter else ""
    return ApiError(
        409,
        "tier_has_limits",
        f"The request cannot change its tier: a limit{on_meter} applies only to tier {tier}."
        " Cancel it (DELETE /v1/requests/{id}) and send it again in the other tier.",
        param="service_tier",
        should_retry=False,
    )
