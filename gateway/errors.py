"""API errors in OpenAI's shape: one constructor for each refusal.

{"error": {"message", "type", "param", "code"}}

`message` names the subject, the limit and the remedy. SDKs decide by headers: they obey `x-should-retry`,
then `retry-after-ms`, then `retry-after`, and nothing else. By default they retry 408, 409, 429 and 5xx, so
each of those says whether a retry helps: yes, and when, where nothing was charged and waiting helps; no where
it would be refused again or charged twice. Driver texts, stack traces and other tenants' data never get here:
unknown exceptions become one neutral sentence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address
from typing import Any

import msgspec

LONGEST_RETRY_S = 120.0
"""SDKs sleep as long as this says (one of them without bound): a longer wait is a spent budget."""

MOST_MESSAGE_CHARACTERS = 5_000
MOST_PARAM_CHARACTERS = 200
"""What a request is quoted with is cut, or its refusal could be as large as the request."""
INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
RETRY_SOON_S = 2.0


@dataclass(frozen=True, slots=True)
class Lacked:
    """The limit that refuses a request, and how much it lacked. For records: answers say it in words."""

    limit_id: str
    wanted: int
    available: int
    of_platform: bool = False
    """The limit is on all tenants together."""


@dataclass
class ApiError(Exception):
    """An error response. `code` is stable and from a closed set: metrics are labelled with it."""

    status: int
    code: str
    message: str
    type: str = INVALID_REQUEST
    param: str | None = None
    retry_after_s: float | None = None
    should_retry: bool | None = None
    headers: dict[str, str] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    """Further members of the error object."""
    fallback: dict[str, Any] | None = None
    """Of a chain of which no pool took the request: which were tried, and why not."""
    lacked: Lacked | None = None
    """None: no limit refuses it."""

    def __str__(self) -> str:
        return f"{self.status} {self.code}: {self.message}"

    def body(self) -> bytes:
        """The JSON body."""
        return msgspec.json.encode(self.payload())

    def payload(self) -> dict[str, dict[str, Any]]:
        """The error object, and beside it what is ours."""
        param = None if self.param is None else _shortened(self.param, MOST_PARAM_CHARACTERS)
        message = _shortened(self.message, MOST_MESSAGE_CHARACTERS)
        said = {"message": message, "type": self.type, "param": param, "code": self.code}
        found: dict[str, dict[str, Any]] = {"error": said | self.details}
        if self.fallback is not None:
            found["fairgate"] = {"fallback": self.fallback}
        return found

    def late_payload(self) -> dict[str, dict[str, Any]]:
        """The error object of a stream that has begun, with what can no longer be sent as headers."""
        found = self.payload()
        found["error"] |= {
            "status": self.status,
            "retry_after_ms": None if self.retry_after_s is None else _milliseconds(self.retry_after_s),
            "should_retry": self.should_retry,
        }
        return found

    def all_headers(self) -> dict[str, str]:
        """Its own headers, and those that tell a client whether and when to retry."""
        headers = dict(self.headers)
        if self.retry_after_s is not None:
            headers["retry-after-ms"] = str(_milliseconds(self.retry_after_s))
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.should_retry is not None:
            headers["x-should-retry"] = "true" if self.should_retry else "false"
        return headers


def _shortened(text: str, most: int) -> str:
    """Without its middle where it is longer: what is wrong stands at the beginning, the remedy at the end."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-(most // 4) :]}"


def _milliseconds(seconds: float) -> int:
    """Never 0: SDKs ignore that."""
    return max(1, math.ceil(seconds * 1000))


# ---------------------------------------------------------------- errors of the caller


def bad_request(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """A field whose value is not accepted."""
    return ApiError(400, code, message, param=param)


def broken_json(message: str) -> ApiError:
    """The body is not JSON."""
    return ApiError(400, "invalid_json", f"The request body could not be parsed as JSON: {message}")


def unknown_parameter(name: str) -> ApiError:
    """A field that the API does not know."""
    shown = _shortened(name, MOST_PARAM_CHARACTERS)
    return ApiError(400, "unknown_parameter", f"Unknown parameter: '{shown}'.", param=name)


def unsupported_parameter(name: str, message: str) -> ApiError:
    """A field that OpenAI knows and this server cannot honour."""
    return ApiError(400, "unsupported_parameter", message, param=name)


class ServerLacks(ApiError):
    """400: no server of this model can do what the request asks for; another model's may."""


def no_server_can(name: str, message: str) -> ServerLacks:
    """A field that no server of the model can honour."""
    return ServerLacks(400, "unsupported_parameter", message, param=name)


def wrong_content_type(found: str, wanted: str = "application/json") -> ApiError:
    """The content type is not JSON, or not another one that is wanted."""
    shown = f"'{found[:80]}'" if found else "nothing"
    return ApiError(
        415,
        "unsupported_media_type",
        f"The content type must be {wanted}; the request says {shown}.",
    )


def wrong_content_encoding(found: str) -> ApiError:
    """The body is compressed."""
    return ApiError(
        415,
        "unsupported_content_encoding",
        f"The request says 'Content-Encoding: {found[:64]}', and bodies are read only as they are. Send it"
        " without compression and without this header.",
        headers={"accept-encoding": "identity"},
        should_retry=False,
    )


def malformed_http() -> ApiError:
    """What arrived is no HTTP/1 request; the connection is closed, as its next request cannot be found."""
    return ApiError(
        400,
        "malformed_http",
        "What arrived is not a valid HTTP/1.1 request.",
        headers={"connection": "close"},
        should_retry=False,
    )


def head_too_large(max_head_bytes: int, max_headers: int) -> ApiError:
    """Request line and headers, or what follows a body, are larger than the server reads."""
    return ApiError(
        431,
        "head_too_large",
        f"The request line and headers are larger than {max_head_bytes} bytes or more than {max_headers}"
        " headers, the most that this server reads. Send fewer or shorter headers, or a shorter URL.",
        headers={"connection": "close"},
        should_retry=False,
    )


def head_too_slow(timeout_s: float) -> ApiError:
    """The head did not arrive in time."""
    return ApiError(
        408,
        "request_timeout",
        f"The request line and headers did not arrive within {timeout_s:g} s.",
        headers={"connection": "close"},
        should_retry=False,
    )


def too_many_connections(most: int) -> ApiError:
    """All connections that the server keeps have requests."""
    return ApiError(
        503,
        "too_many_connections",
        f"This server has its {most} connections, all of them in use. Try again shortly.",
        type=SERVER_ERROR,
        retry_after_s=RETRY_SOON_S,
        should_retry=True,
        headers={"connection": "close"},
    )


def address_has_too_many(most: int, *, through_proxy: bool) -> ApiError:
    """One address has as many connections as it may, or behind a proxy as many requests at a time."""
    return ApiError(
        429,
        "address_has_too_many",
        f"Your address has {most} {'requests at a time' if through_proxy else 'connections'}, the most that"
        " this server gives to one address. Use fewer at a time, or ask the operator to raise"
        " gateway.max_connections_per_address.",
        type="requests",
        retry_after_s=RETRY_SOON_S,
        should_retry=True,
        # A proxy's connection carries other clients' requests, too.
        headers={} if through_proxy else {"connection": "close"},
    )


def body_too_large(max_body_bytes: int) -> ApiError:
    """The body is larger than the server reads. The connection is closed, as the rest is not read."""
    return ApiError(
        413,
        "request_too_large",
        f"The request body is larger than {max_body_bytes} bytes, the most that this server reads.",
        headers={"connection": "close"},
        should_retry=False,
    )


def text_too_large(max_text_bytes: int) -> ApiError:
    """What a body has beside its images is larger than bodies without images may be."""
    return ApiError(
        413,
        "request_too_large",
        f"The request has more than {max_text_bytes} bytes beside its images, the most that this server"
        " reads.",
        should_retry=False,
    )


def large_bodies_full(most_bytes: int, *, of_tenant: bool) -> ApiError:
    """As many large bodies are here as may be. The connection is closed, as the rest is not read."""
    whose = "Your requests with" if of_tenant else "Requests with"
    return ApiError(
        429 if of_tenant else 503,
        "large_bodies_full",
        f"{whose} large bodies that wait or run have {most_bytes} bytes together, the most that this server"
        " takes at a time. Try again when some have ended.",
        type="requests" if of_tenant else SERVER_ERROR,
        retry_after_s=RETRY_SOON_S,
        should_retry=True,
        headers={"connection": "close"},
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


def input_too_long(context_tokens: int, tokens: int, param: str) -> ApiError:
    """One input of an embedding or rerank request exceeds the model's context."""
    return ApiError(
        400,
        "context_length_exceeded",
        f"The model's context is {context_tokens} tokens; '{param}' has {tokens}: shorten it, or send"
        " 'truncate_prompt_tokens' where the server takes that.",
        param=param,
    )


def context_too_long(
    context_tokens: int, prompt_tokens: int, max_tokens: int | None, param: str, *, is_least: bool = False
) -> ApiError:
    """The prompt, or prompt and answer together, exceed the model's context. `is_least`: the prompt was not
    counted, and `prompt_tokens` is the least number that it can have."""
    if max_tokens is None:
        least = "at least " if is_least else ""
        found = f"your prompt has {least}{prompt_tokens} tokens and leaves no room for an answer"
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
    """No such model, or none that this key may see."""
    return ApiError(
        404,
        "model_not_found",
        f"The model '{name[:128]}' does not exist or your key may not use it. GET /v1/models lists yours.",
        param="model",
    )


_INCORRECT = "Incorrect API key provided"
"""What clients look for in OpenAI's 401."""
_KEY_MESSAGES = {
    "missing": "You didn't provide an API key. Send it as 'Authorization: Bearer fg_live_...'.",
    "two_keys": "The headers 'Authorization' and 'api-key' hold different keys. Send one of them.",
    "malformed": f"{_INCORRECT}: it is malformed. Keys look like 'fg_live_<public id>_<secret>'.",
    "unknown": f"{_INCORRECT}: there is none like it. Ask the operator of this server for one.",
    "revoked": f"{_INCORRECT}: it has been revoked. Ask the operator of this server for another.",
    "expired": f"{_INCORRECT}: it has expired. Ask the operator of this server for another.",
}
_KEPT_OUT = {
    "tenant_suspended": ("tenant_suspended", "The tenant of this API key is suspended."),
    "project_suspended": ("project_suspended", "The project of this API key is suspended."),
    "no_tier": (
        "service_tier_not_allowed",
        "None of this API key's tiers is allowed to its tenant any more.",
    ),
}
"""By the directory's reason: code and message for a key that is right."""


def key_rejected(reason: str) -> ApiError:
    """403 for a right key that is kept out for now, else 401; `reason` as the directory names it."""
    if reason not in _KEPT_OUT:
        return invalid_api_key(reason)
    code, message = _KEPT_OUT[reason]
    return ApiError(
        403, code, f"{message} Ask the operator of this server.", type="permission_error", should_retry=False
    )


def invalid_api_key(reason: str) -> ApiError:
    """401: no key that opens anything."""
    message = _KEY_MESSAGES.get(reason, _KEY_MESSAGES["unknown"])
    return ApiError(
        401, "invalid_api_key", message, headers={"www-authenticate": "Bearer"}, should_retry=False
    )


def address_not_allowed(address: IPv4Address | IPv6Address | None) -> ApiError:
    """403: a valid key, used from an address outside its networks, which are not named. None: the address is
    unknown, which counts as outside."""
    seen = (
        f"from {address}. An administrator can allow it: fairgate key set KEY_ID --allow-from {address}"
        if address is not None
        else "from here: the client's address cannot be read from 'X-Forwarded-For' or 'Forwarded' as the"
        " proxy sent it"
    )
    return ApiError(
        403, "address_not_allowed", f"This API key may not be used {seen}.", type="permission_error"
    )


def invalid_label(key: str, value: str, allowed: tuple[str, ...]) -> ApiError:
    """A label whose value is none of those that its tenant has declared."""
    return bad_request(
        f"Invalid 'metadata.{key}': '{value}' is none of the values that your administrator has declared for"
        f" this label: {', '.join(allowed)}. Send one of these, or leave the label out.",
        f"metadata.{key}",
        "invalid_label",
    )


def scope_missing(scope: str) -> ApiError:
    """403: a valid key without the scope."""
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


def bad_header(name: str, value: str, wanted: str) -> ApiError:
    """A header of ours, or of an SDK, whose value is not accepted."""
    return ApiError(400, "invalid_header", f"Invalid '{name}': '{value[:64]}'. {wanted}", param=name)


def already_exists(message: str) -> ApiError:
    """A name that is taken: a retry will not help."""
    return ApiError(409, "already_exists", message, param="name", should_retry=False)


def precondition_failed(message: str, current: Mapping[str, Any] | None, etag: str | None) -> ApiError:
    """412: the object does not have the entity tag that the change was made for; nothing was changed. With
    its state and tag now."""
    return ApiError(
        412,
        "precondition_failed",
        message,
        param="If-Match",
        should_retry=False,
        headers={} if etag is None else {"etag": f'"{etag}"'},
        details={"current": current},
    )


_INSTEAD = {
    "responses": "use /v1/chat/completions",
    "assistants": "use /v1/chat/completions",
    "threads": "use /v1/chat/completions with the messages so far",
    "conversations": "use /v1/chat/completions with the messages so far",
    "realtime": "use /v1/chat/completions with 'stream': true",
    "edits": "use /v1/chat/completions",
    "engines": "use /v1/models",
    "batches": "use /v1/chat/completions with 'service_tier': 'flex' (batch) for each request",
    "files": "use /v1/chat/completions with 'service_tier': 'flex' (batch) for each request",
    "usage": "use /v1/limits and /v1/requests",
    "organization": "use /v1/limits and /v1/requests",
}
"""What serves instead of routes of OpenAI's API that are not here, by what follows `/v1/`."""
_NOT_SERVED = (
    *("moderations", "images", "audio", "videos", "fine_tuning", "fine-tunes", "uploads"),
    *("vector_stores", "evals", "containers", "graders"),
)
_BASE_URL = "The base URL of this server ends with one /v1."
_WITHOUT_PREFIX = frozenset(
    {"chat", "completions", "embeddings", "rerank", "models", "quotes", "limits", "requests"}
)


def not_found(path: str) -> ApiError:
    """No such route. One of OpenAI's names the route that serves instead, or says that there is none."""
    message = f"Nothing at {path[:200]}. GET /docs lists what is here."
    first, _, rest = path.strip("/").partition("/")
    resource = rest.partition("/")[0]
    if first == "v1" and resource == "v1":
        message = f"Nothing at {path[:200]}: use {path[3:200]}. {_BASE_URL}"
    elif first in _WITHOUT_PREFIX:
        message = f"Nothing at {path[:200]}: use /v1{path[:200]}. {_BASE_URL}"
    elif first == "v1" and resource in _INSTEAD:
        message = f"/v1/{resource} is not served here: {_INSTEAD[resource]}."
    elif first == "v1" and resource in _NOT_SERVED:
        message = f"/v1/{resource} is not served here, only text: /v1/chat/completions, /v1/completions."
    return ApiError(404, "not_found", message)


def method_not_allowed(method: str, path: str, allowed: str) -> ApiError:
    """A route, but not with this method. `allowed`: those that it has, separated by commas."""
    methods = ", ".join(sorted({each.strip() for each in allowed.split(",")}))
    message = f"{method[:16]} is not possible on {path[:200]}: use {methods}."
    return ApiError(405, "method_not_allowed", message, headers={"allow": methods})


# ---------------------------------------------------------------- limits, queue and engine's load


def insufficient_quota(message: str) -> ApiError:
    """A budget that does not refill soon: SDKs must not retry by themselves."""
    return ApiError(429, "insufficient_quota", message, type="insufficient_quota", should_retry=False)


def rate_limited(message: str, meter_type: str, retry_after_s: float) -> ApiError:
    """A rate that refills: retry then."""
    return ApiError(
        429, "rate_limit_exceeded", message, type=meter_type, retry_after_s=retry_after_s, should_retry=True
    )


def platform_limit(retry_after_s: float | None) -> ApiError:
    """A limit on all tenants together, of which a tenant reads only when to come again."""
    what = "The server's limit on all its tenants together does not admit this request"
    if retry_after_s is None or retry_after_s > LONGEST_RETRY_S:
        when = "" if retry_after_s is None else f" for another {math.ceil(retry_after_s)} s"
        return insufficient_quota(f"{what}{when}; nothing was charged. A smaller request may pass.")
    return rate_limited(
        f"{what} now; nothing was charged. Please try again in {retry_after_s:.3g} s.",
        "platform",
        retry_after_s,
    )


def too_many_end_users(end_user: str, most: int, retry_after_s: float | None) -> ApiError:
    """As many of the tenant's end users as may be have counters in use, and this one has none."""
    is_soon = retry_after_s is not None and retry_after_s <= LONGEST_RETRY_S
    when = "" if retry_after_s is None else f" The first place is free in {math.ceil(retry_after_s)} s."
    return ApiError(
        429,
        "too_many_end_users",
        f"The end user '{end_user}' has no counter yet, and {most} end users of your tenant have theirs in"
        f" use, which is the most.{when} Requests for those go on; for more at a time ask the operator to"
        " raise gateway.max_end_users, or to set limits with shorter windows.",
        type="requests",
        param="safety_identifier",
        retry_after_s=retry_after_s if is_soon else None,
        should_retry=is_soon,
    )


def limit_not_kept() -> ApiError:
    """A limit that the quota store cannot keep: nothing is served unmetered."""
    return ApiError(
        503,
        "limit_not_kept",
        "A limit on this request cannot be kept by the server's quota store, and nothing is served unmetered."
        " Ask the operator to remove it.",
        type=SERVER_ERROR,
        should_retry=False,
    )


def queue_full(message: str, retry_after_s: float, *, tenant: bool) -> ApiError:
    """The queue is full: for this tenant (429) or altogether (503)."""
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


# ---------------------------------------------------------------- outages


def engine_unavailable(retry_after_s: float = RETRY_SOON_S, *, is_drained: bool = False) -> ApiError:
    """Nothing that runs the model serves at the moment. `is_drained`: an operator has taken out of rotation
    what would."""
    because = (
        "Every server of this model that is up has been drained by an operator"
        if is_drained
        else "Nothing that runs this model is ready at the moment"
    )
    return ApiError(
        503,
        "engine_unavailable",
        f"{because}; nothing was charged. Try again shortly.",
        type=SERVER_ERROR,
        retry_after_s=retry_after_s,
        should_retry=True,
    )


def capability_unavailable(what: str, who: str, param: str | None = None) -> ApiError:
    """The only servers that can do what the request needs do not serve at the moment."""
    return ApiError(
        503,
        "capability_unavailable",
        f"The servers of this model that now serve cannot do what the request needs ({what}): {who}."
        " Nothing was charged. Try again shortly, or leave it out.",
        type=SERVER_ERROR,
        param=param,
        retry_after_s=RETRY_SOON_S,
        should_retry=True,
    )


def engine_lost(charged_tokens: int) -> ApiError:
    """The engine died under a running request. Once tokens were charged, the caller decides whether to pay
    for another attempt."""
    return ApiError(
        503,
        "engine_lost",
        "The server that runs this model stopped while it generated this answer."
        f" The {charged_tokens} tokens that arrived were charged, nothing else.",
        type=SERVER_ERROR,
        retry_after_s=RETRY_SOON_S,
        should_retry=charged_tokens == 0,
    )


def upstream_error(charged_tokens: int, requests_own: str = "") -> ApiError:
    """A server that is not ours failed to answer properly. As with an engine that died, the caller decides
    whether to pay for another attempt. `requests_own`: how it failed, where it answers other requests."""
    what = (
        f"The server that runs this model answers other requests, and failed at this one: {requests_own}."
        if requests_own
        else "The server that runs this model did not answer as it should."
    )
    return ApiError(
        502,
        "upstream_request_failed" if requests_own else "upstream_error",
        f"{what} The {charged_tokens} tokens that arrived were charged, nothing else.",
        type=SERVER_ERROR,
        retry_after_s=RETRY_SOON_S,
        should_retry=charged_tokens == 0,
    )


def upstream_key_refused() -> ApiError:
    """A server that is not ours does not take the gateway's key: a retry never helps."""
    return ApiError(
        502,
        "upstream_error",
        "The server that runs this model does not take this gateway's key (401); nothing was charged. Only"
        " the operator of this gateway can correct that (api_key_env).",
        type=SERVER_ERROR,
        should_retry=False,
    )


def upstream_full() -> ApiError:
    """A server that is not ours has as many requests as it takes, also of others."""
    return ApiError(
        503,
        "upstream_full",
        "The server that runs this model is full: it has as many requests as it takes (429). Nothing was"
        " charged. Try again shortly.",
        type=SERVER_ERROR,
        retry_after_s=RETRY_SOON_S,
        should_retry=True,
    )


def requests_keep_failing(failures: int, why: str, retry_after_s: float) -> ApiError:
    """429: too many of the tenant's own requests failed in a row at a server that answers others."""
    return ApiError(
        429,
        "requests_keep_failing",
        f"The last {failures} requests of your tenant to this model failed at the server that runs it, which"
        f" answers other requests. Of the last one it says: {why}. Nothing was charged. Mend the request, and"
        f" try again in {retry_after_s:.3g} s; one that succeeds ends the pauses.",
        type="requests",
        retry_after_s=retry_after_s,
        should_retry=True,
    )


def engine_failed() -> ApiError:
    """The engine gave up on this sequence, and would again."""
    return ApiError(
        500,
        "engine_failed",
        "The server that runs this model failed to generate this answer.",
        type=SERVER_ERROR,
        should_retry=False,
    )


def accounts_unavailable(what: str, why: str = "cannot be reached") -> ApiError:
    """Database or quota store down: fail closed, never unmetered."""
    return ApiError(
        503,
        f"{what}_unavailable",
        f"The {what.replace('_', ' ')} {why}, and nothing is served unmetered. Try again shortly.",
        type=SERVER_ERROR,
        retry_after_s=RETRY_SOON_S,
        should_retry=True,
    )


def no_price() -> ApiError:
    """The model has no price: nothing is served unmetered."""
    return ApiError(
        503,
        "model_not_priced",
        "This model has no price yet, and nothing is served unmetered. Ask the operator to set one.",
        type=SERVER_ERROR,
        should_retry=False,
    )


def quote_refused(code: str, reason: str, *, conflict: bool = False) -> ApiError:
    """A quote that does not bind this request: nothing was run, and nothing was charged."""
    return ApiError(
        409 if conflict else 400,
        code,
        f"The quote in 'X-Fairgate-Quote' cannot be used: {reason}. Ask POST /v1/quotes for another, or leave"
        " the header out.",
        param="X-Fairgate-Quote",
        should_retry=False,
    )


def estimates_off(consequence: str, param: str | None) -> ApiError:
    """Something was asked for that needs estimates, and this server makes none."""
    return bad_request(
        "This server makes no estimates (setting gateway.estimates is no, or SIGUSR2 switched them off), so"
        f" {consequence}.",
        param,
        "estimates_off",
    )


def estimate_exceeds(header: str, allowed: str, told: str) -> ApiError:
    """Refused on arrival: the estimate is above what its client allows. Not to be retried by itself: SDKs
    repeat a 409."""
    return ApiError(
        409,
        "estimate_exceeds",
        f"{told}, and '{header}' allows {allowed}; nothing was held or charged. Allow more, ask for another"
        " tier, or try again later.",
        param=header,
        should_retry=False,
    )


def deadline_unreachable(what: str, allowed_s: float, expected_s: float, retry_after_s: float) -> ApiError:
    """Refused on arrival: by the forecast it would miss its deadline. `what`: `wait` or `answer`."""
    thing = "its turn" if what == "wait" else "its answer"
    return ApiError(
        503,
        "deadline_unreachable",
        f"The request may wait {allowed_s:.1f} s, but {thing} is expected only after {expected_s:.1f} s"
        " (median); nothing was charged. Allow more time, ask for a higher tier, or try again later.",
        type=SERVER_ERROR,
        retry_after_s=retry_after_s,
        should_retry=True,
    )


def target_unreachable(what: str, target_s: float, expected_s: float, retry_after_s: float) -> ApiError:
    """Refused on arrival under overload: it would miss its target. `what`: `first token` or `answer`."""
    return ApiError(
        503,
        "target_unreachable",
        f"Too much is waiting: the request's {what} may be there only after {expected_s:.1f} s (p90), and"
        f" its target is {target_s:g} s; nothing was charged. Try again later, ask for a higher tier, or send"
        " fewer requests at once.",
        type=SERVER_ERROR,
        retry_after_s=retry_after_s,
        should_retry=True,
    )


# ---------------------------------------------------------------- cancelling and moving


def request_not_found(request_id: str, *, of_any_tenant: bool = False) -> ApiError:
    """No such request, or another tenant's: the answer does not tell which. `of_any_tenant`: an operator
    asked."""
    of_yours, route = ("", "/admin/v1/requests") if of_any_tenant else (" of yours", "/v1/requests")
    return ApiError(
        404,
        "request_not_found",
        f"There is no request '{request_id[:64]}'{of_yours}. GET {route} lists those that wait or run.",
        param="request_id",
    )


def request_elsewhere(gateway: str) -> ApiError:
    """Another gateway runs it, and could not be asked."""
    return ApiError(
        409,
        "request_elsewhere",
        f"This request is with gateway {gateway}, which does not answer. Send this to that gateway, or try"
        " again.",
        param="request_id",
        should_retry=False,
    )


def request_cancelled(charged_tokens: int) -> ApiError:
    """Cancelled by its tenant or an operator. 499: withdrawn by the client's side."""
    return ApiError(
        499,
        "request_cancelled",
        "The request was cancelled."
        + (f" The {charged_tokens} tokens that were generated were charged." if charged_tokens else ""),
        should_retry=False,
    )


def key_withdrawn(reason: str, charged_tokens: int) -> ApiError:
    """401: its key was revoked, or its project or tenant suspended, after the request was admitted; `reason`
    as the directory names it."""
    code, message = _KEPT_OUT.get(reason, ("invalid_api_key", _KEY_MESSAGES.get(reason, "")))
    charged = f"The {charged_tokens} tokens that were generated were charged" if charged_tokens else ""
    return ApiError(
        401,
        code,
        f"{message} The request was ended. {charged or 'Nothing was charged'}.",
        should_retry=False,
    )


def not_waiting(status: str) -> ApiError:
    """Only a waiting request can change its tier."""
    return ApiError(
        409,
        "request_not_waiting",
        f"The request cannot change its tier: its status is '{status}'. Only one that stands in line can.",
        param="request_id",
        should_retry=False,
    )


def tier_has_limits(tier: str, meter: str | None) -> ApiError:
    """A limit binds only one of the two tiers, and a hold cannot move from one limit to another."""
    on_meter = f" on {meter}" if meter else ""
    return ApiError(
        409,
        "tier_has_limits",
        f"The request cannot change its tier: a limit{on_meter} is set for tier {tier} alone."
        " Cancel it (DELETE /v1/requests/{id}) and send it again in the other tier.",
        param="service_tier",
        should_retry=False,
    )


def client_left() -> ApiError:
    """The client has disconnected, so this is not read. 499 as in other gateways' logs."""
    return ApiError(499, "client_left", "The client closed the connection.", should_retry=False)


def slow_reader(charged_tokens: int) -> ApiError:
    """The client did not read what was sent to it."""
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
    """It ran and was charged, but the answer is larger than what is stored."""
    return ApiError(
        409,
        "idempotent_answer_too_large",
        f"The request with this 'Idempotency-Key' ({request_id}) has run and was charged; its answer was too"
        " large to be kept. Use a new key to run it again.",
        param="Idempotency-Key",
        should_retry=False,
    )


def settlement_pending() -> ApiError:
    """Generated, but its settlement is not durable yet: a retry would be a second charge."""
    return ApiError(
        503,
        "settlement_pending",
        "The answer was generated, but its account could not be written yet; it will be, exactly once.",
        type=SERVER_ERROR,
        should_retry=False,
    )


def shutting_down() -> ApiError:
    """The gateway is shutting down."""
    return ApiError(
        503,
        "shutting_down",
        "This server is shutting down. Try again shortly.",
        type=SERVER_ERROR,
        retry_after_s=RETRY_SOON_S,
        should_retry=True,
    )


def internal(request_id: str) -> ApiError:
    """An unforeseen exception. Its text stays in the log. What was charged by then is not known here, so SDKs
    do not retry by themselves."""
    return ApiError(
        500,
        "internal_error",
        f"The server had an error while it processed your request. Its id is {request_id}.",
        type=SERVER_ERROR,
        should_retry=False,
    )
