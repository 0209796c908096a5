"""How does a refusal look on the wire? One table from what went wrong to OpenAI's error shape.

    {"error": {"message", "type", "param", "code"}}

`message` names the thing, the limit and the way out. What the SDKs do next is decided by headers: they
obey `x-should-retry`, then `retry-after-ms`, then `retry-after`, and look at nothing else. Text of drivers,
stack traces and other tenants' data never get here: unknown exceptions become one neutral sentence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
RETRY_SOON_S = 2.0


@dataclass
class ApiError(Exception):
    """A refusal, ready for the wire. `code` is stable and one of a closed set: metrics count by it."""

    status: int
    code: str
    message: str
    type: str = INVALID_REQUEST
    param: str | None = None
    retry_after_s: float | None = None
    should_retry: bool | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.status} {self.code}: {self.message}"

    def body(self) -> bytes:
        """The JSON body."""
        return msgspec.json.encode(self.payload())

    def payload(self) -> dict[str, dict[str, str | None]]:
        """The error object as streams carry it."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def all_headers(self) -> dict[str, str]:
        """Own headers plus what tells a client whether and when to come back."""
        headers = dict(self.headers)
        if self.retry_after_s is not None:
            headers["retry-after-ms"] = str(max(1, math.ceil(self.retry_after_s * 1000)))
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.should_retry is not None:
            headers["x-should-retry"] = "true" if self.should_retry else "false"
        return headers


# ---------------------------------------------------------------- what the caller got wrong


def bad_request(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """A field that cannot be taken as it is."""
    return ApiError(400, code, message, param=param)


def broken_json(message: str) -> ApiError:
    """The body is not JSON."""
    return ApiError(400, "invalid_json", f"The request body could not be parsed as JSON: {message}")


def unknown_parameter(name: str) -> ApiError:
    """A field that the API does not know."""
    return ApiError(400, "unknown_parameter", f"Unknown parameter: '{name}'.", param=name)


def unsupported_parameter(name: str, message: str) -> ApiError:
    """A field that OpenAI knows and this server cannot honour."""
    return ApiError(400, "unsupported_parameter", message, param=name)


def wrong_content_type(found: str) -> ApiError:
    """Something other than JSON."""
    shown = f"'{found[:80]}'" if found else "nothing"
    return ApiError(
        415,
        "unsupported_media_type",
        f"The content type must be application/json; the request says {shown}.",
    )


def body_too_large(max_body_bytes: int) -> ApiError:
    """More bytes than the server reads. The connection is closed: what follows is not read."""
    return ApiError(
        413,
        "request_too_large",
        f"The request body is larger than {max_body_bytes} bytes, the most that this server reads.",
        headers={"connection": "close"},
        should_retry=False,
    )


def body_too_slow(timeout_s: float) -> ApiError:
    """The body did not arrive in time."""
    return ApiError(
        408,
        "request_timeout",
        f"The request body did not arrive within {timeout_s:g} s.",
        headers={"connection": "close"},
        should_retry=False,
    )


def context_too_long(context_tokens: int, prompt_tokens: int, max_tokens: int | None, param: str) -> ApiError:
    """Prompt, or prompt and answer together, do not fit in the model's context."""
    if max_tokens is None:
        found = f"your prompt has {prompt_tokens} tokens and leaves no room for an answer"
        advice = "Shorten the prompt."
    else:
        found = (
            f"you asked for {prompt_tokens + max_tokens} tokens ({prompt_tokens} in the prompt,"
            f" {max_tokens} for the answer)"
        )
        advice = f"Shorten the prompt or ask for at most {max(0, context_tokens - prompt_tokens)} tokens."
    return ApiError(
        400,
        "context_length_exceeded",
        f"This model's maximum context length is {context_tokens} tokens, but {found}. {advice}",
        param=param,
    )


def model_not_found(name: str) -> ApiError:
    """No such model here, or none that this key may see."""
    return ApiError(
        404,
        "model_not_found",
        f"The model '{name[:128]}' does not exist or your key may not use it. GET /v1/models lists yours.",
        param="model",
    )


_KEY_MESSAGES = {
    "missing": "You didn't provide an API key. Send it as 'Authorization: Bearer fg_live_...'.",
    "malformed": "The API key is malformed: keys look like 'fg_live_<public id>_<secret>'.",
    "unknown": "Incorrect API key provided.",
    "revoked": "This API key has been revoked.",
    "expired": "This API key has expired.",
    "suspended": "The tenant of this API key is suspended.",
}


def invalid_api_key(reason: str) -> ApiError:
    """401: `reason` as the directory names it."""
    message = _KEY_MESSAGES.get(reason, _KEY_MESSAGES["unknown"])
    return ApiError(
        401, "invalid_api_key", message, headers={"www-authenticate": "Bearer"}, should_retry=False
    )


def scope_missing(scope: str) -> ApiError:
    """403: a valid key for other things."""
    return ApiError(
        403,
        "insufficient_permissions",
        f"This API key lacks the scope '{scope}'. Create one with: fairgate key create --scope {scope}",
        type="permission_error",
    )


def tier_not_allowed(asked: str, tier: str, allowed: list[str]) -> ApiError:
    """403: the key may not use the tier that `service_tier` names."""
    return ApiError(
        403,
        "service_tier_not_allowed",
        f"service_tier '{asked}' means tier {tier}, which this key may not use."
        f" Allowed tiers: {', '.join(allowed)}.",
        type="permission_error",
        param="service_tier",
    )


def not_found(path: str) -> ApiError:
    """No such route."""
    return ApiError(404, "not_found", f"Nothing at {path[:200]}. GET /docs lists what is here.")


def method_not_allowed(method: str, path: str) -> ApiError:
    """A route, but not with this method."""
    return ApiError(405, "method_not_allowed", f"{method[:16]} is not possible on {path[:200]}.")


# ---------------------------------------------------------------- what the contract refuses


def insufficient_quota(message: str) -> ApiError:
    """A budget that waiting does not refill soon: SDKs must not try again by themselves."""
    return ApiError(429, "insufficient_quota", message, type="insufficient_quota", should_retry=False)


def rate_limited(message: str, meter_type: str, retry_after_s: float) -> ApiError:
    """A rate that refills: come back then."""
    return ApiError(
        429, "rate_limit_exceeded", message, type=meter_type, retry_after_s=retry_after_s, should_retry=True
    )


def queue_full(message: str, retry_after_s: float, *, tenant: bool) -> ApiError:
    """Too much waiting: of this tenant (429), or altogether (503)."""
    if tenant:
        return ApiError(
            429, "tenant_queue_full", message, type="requests", retry_after_s=retry_after_s, should_retry=True
        )
    return ApiError(
        503, "queue_full", message, type=SERVER_ERROR, retry_after_s=retry_after_s, should_retry=True
    )


def queue_timeout(tier: str, waited_s: float, retry_after_s: float) -> ApiError:
    """The deadline in the queue passed."""
    return ApiError(
        503,
        "queue_timeout",
        f"The request waited {waited_s:.1f} s in tier {tier} without a turn; nothing was charged."
        " Try again later or in a higher tier.",
        type=SERVER_ERROR,
        retry_after_s=retry_after_s,
        should_retry=True,
    )


# ---------------------------------------------------------------- what we cannot do now


def engine_unavailable(retry_after_s: float = RETRY_SOON_S) -> ApiError:
    """No engine serves at the moment."""
    return ApiError(
        503,
        "engine_unavailable",
        "No engine is ready to serve this model at the moment; nothing was charged. Try again shortly.",
        type=SERVER_ERROR,
        retry_after_s=retry_after_s,
        should_retry=True,
    )


def engine_lost(charged_tokens: int) -> ApiError:
    """The engine died under a running request."""
    return ApiError(
        503,
        "engine_lost",
        "The engine stopped while it generated this answer."
        f" The {charged_tokens} tokens that arrived were charged, nothing else.",
        type=SERVER_ERROR,
        retry_after_s=RETRY_SOON_S,
    )


def engine_failed() -> ApiError:
    """The engine gave up on this sequence."""
    return ApiError(500, "engine_failed", "The engine failed to generate this answer.", type=SERVER_ERROR)


def accounts_unavailable(what: str) -> ApiError:
    """Database or quota store down: fail closed, never unmetered."""
    return ApiError(
        503,
        f"{what}_unavailable",
        f"The {what.replace('_', ' ')} cannot be reached, and nothing is served unmetered."
        " Try again shortly.",
        type=SERVER_ERROR,
        retry_after_s=RETRY_SOON_S,
        should_retry=True,
    )


def no_price() -> ApiError:
    """The operator forgot to price the model: nothing is served unmetered."""
    return ApiError(
        503,
        "model_not_priced",
        "This model has no price yet, and nothing is served unmetered. Ask the operator to set one.",
        type=SERVER_ERROR,
        should_retry=False,
    )


def client_left() -> ApiError:
    """Nobody reads this: the client has gone. 499 is what logs of other gateways call it."""
    return ApiError(499, "client_left", "The client closed the connection.", should_retry=False)


def slow_reader(charged_tokens: int) -> ApiError:
    """The client did not take what was sent to it."""
    return ApiError(
        408,
        "slow_reader",
        "The answer was not read for too long, so it was stopped."
        f" The {charged_tokens} tokens that were generated were charged, nothing else.",
        should_retry=False,
    )


def idempotency_key_reused() -> ApiError:
    """The same key for another request."""
    return ApiError(
        409,
        "idempotency_key_reused",
        "This 'Idempotency-Key' was used for a request with another body or route. Use a new key for it.",
        param="Idempotency-Key",
        should_retry=False,
    )


def idempotent_run_in_progress(retry_after_s: float) -> ApiError:
    """The first request with this key has not ended."""
    return ApiError(
        409,
        "idempotent_run_in_progress",
        "A request with this 'Idempotency-Key' is still running. Try again shortly for its answer.",
        param="Idempotency-Key",
        retry_after_s=retry_after_s,
        should_retry=True,
    )


def idempotent_run_lost(request_id: str, charged_tokens: int) -> ApiError:
    """The gateway died with the answer; the account was settled."""
    return ApiError(
        409,
        "idempotent_run_lost",
        f"The request with this 'Idempotency-Key' ({request_id}) was cut off by a failure: {charged_tokens}"
        " tokens were charged and its answer is lost. Use a new key to run it again.",
        param="Idempotency-Key",
        should_retry=False,
    )


def idempotent_answer_too_large(request_id: str) -> ApiError:
    """It ran and was charged, but the answer is larger than what is kept."""
    return ApiError(
        409,
        "idempotent_answer_too_large",
        f"The request with this 'Idempotency-Key' ({request_id}) has run and was charged; its answer was too"
        " large to be kept. Use a new key to run it again.",
        param="Idempotency-Key",
        should_retry=False,
    )


def settlement_pending() -> ApiError:
    """Generated, but the account of it is not durable yet: a retry would be a second charge."""
    return ApiError(
        503,
        "settlement_pending",
        "The answer was generated, but its account could not be written yet; it will be, exactly once.",
        type=SERVER_ERROR,
        should_retry=False,
    )


def shutting_down() -> ApiError:
    """The gateway stops."""
    return ApiError(
        503,
        "shutting_down",
        "This server is shutting down. Try again shortly.",
        type=SERVER_ERROR,
        retry_after_s=RETRY_SOON_S,
        should_retry=True,
    )


def internal(request_id: str) -> ApiError:
    """An exception that nobody foresaw. Its text stays in the log."""
    return ApiError(
        500,
        "internal_error",
        f"The server had an error while it processed your request. Its id is {request_id}.",
        type=SERVER_ERROR,
    )
