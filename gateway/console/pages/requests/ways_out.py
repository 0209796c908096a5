"""What a refusal says: its cause in short, and what to do, for each code. Pure."""

from __future__ import annotations

_SENTENCES: tuple[tuple[str, str], ...] = (
    (
        "insufficient_quota",
        "The budget is spent, or has less left than the request wants: raise the limit, wait for its next"
        " window, or ask for fewer tokens.",
    ),
    ("rate_limit_exceeded", "Come back after the time that the answer names, or raise the limit."),
    (
        "requests_keep_failing upstream_request_failed",
        "The server of the model answers other requests and fails at these: the message says how.",
    ),
    ("too_many_end_users", "Wait until a counter of another end user is free."),
    (
        "tenant_queue_full queue_full queue_timeout deadline_unreachable target_unreachable",
        "Too much waits: send it later, with more time, or in a lower tier. Nothing was charged.",
    ),
    (
        "estimate_exceeds",
        "The estimate is above what the client allows: allow more, or take one of the quotes in the answer.",
    ),
    ("invalid_api_key", "The key is missing, misspelt, revoked or expired: use one that is in force."),
    ("tenant_suspended project_suspended", "The tenant or project is suspended: an operator can resume it."),
    ("service_tier_not_allowed", "The key may not use this tier: allow the tier, or ask for another."),
    ("tier_has_limits", "Its tiers have limits of their own: send it anew in the tier wanted."),
    ("insufficient_permissions", "The key lacks the scope: make one that has it."),
    (
        "address_not_allowed",
        "The key is bound to networks: allow the address, or use the key from within them.",
    ),
    ("model_not_found", "The model does not exist here, or the key may not use it."),
    ("model_not_priced", "The model has no price yet: an operator sets one."),
    (
        "context_length_exceeded request_too_large head_too_large",
        "The request is too long for the model or the server: send less.",
    ),
    (
        "invalid_value invalid_label invalid_header invalid_json unknown_parameter unsupported_parameter"
        " unsupported_media_type unsupported_content_encoding malformed_http method_not_allowed not_found"
        " precondition_failed already_exists",
        "The answer names what is wrong with the request: send it again as the server takes it.",
    ),
    (
        "quote_expired quote_invalid quote_mismatch quote_redeemed quote_pending estimates_off",
        "The quote does not hold for this request: ask for a new one, or send it without.",
    ),
    (
        "idempotency_key_reused idempotent_run_in_progress idempotent_run_lost idempotent_answer_too_large",
        "The idempotency key belongs to another request, or to one that runs: use a new key to run it again.",
    ),
    (
        "request_not_found request_not_waiting request_elsewhere",
        "The request that it names is not there, has ended, or is with another gateway.",
    ),
    (
        "request_cancelled client_left slow_reader request_timeout",
        "Its client, its tenant or an operator ended it, or its client was too slow.",
    ),
    (
        "address_has_too_many too_many_connections large_bodies_full",
        "Too many connections or large bodies at a time: use fewer, or try again later.",
    ),
    (
        "capability_unavailable engine_unavailable engine_failed engine_lost upstream_error upstream_full"
        " database_unavailable quota_store_unavailable settlement_pending shutting_down internal_error",
        "Something here was away or failed: try again shortly; operators find it under Upstreams and in the"
        " log.",
    ),
)
"""Codes separated by spaces, and their sentence."""
WAYS_OUT = {code: sentence for codes, sentence in _SENTENCES for code in codes.split()}


def way_out(code: str) -> str:
    """For an unknown code: where to look."""
    return WAYS_OUT.get(code, "The message of the answer says what to do.")


_CAUSES = {
    "insufficient_quota": "budget spent",
    "rate_limit_exceeded": "too fast",
    "invalid_api_key": "wrong key",
    "context_length_exceeded": "prompt too long",
    "tenant_queue_full": "its queue is full",
    "queue_timeout": "waited too long",
    "invalid_value": "invalid request",
}


def cause_of(code: str) -> str:
    """In a few words."""
    return _CAUSES.get(code, code.replace("_", " "))
