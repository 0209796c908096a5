"""Errors about API keys."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

from gateway.errors import ApiError

_INCORRECT = "Incorrect API key provided"
"""What clients look for in OpenAI's 401."""
_KEY_MESSAGES = {
    "missing": "You didn't provide an API key. Send it as 'Authorization: Bearer fg_live_...'.",
    "two_keys": "'Authorization', 'api-key' and 'x-api-key' hold different keys. Send one of these headers.",
    "malformed": f"{_INCORRECT}: it is malformed. Keys look like 'fg_live_<public id>_<secret>'.",
    "unknown": f"{_INCORRECT}: it does not exist. Ask the operator of this server for one.",
    "revoked": f"{_INCORRECT}: it has been revoked. Ask the operator of this server for another.",
    "expired": f"{_INCORRECT}: it has expired. Ask the operator of this server for another.",
}
_KEPT_OUT = {
    "tenant_suspended": ("tenant_suspended", "The tenant of this API key is suspended."),
    "project_suspended": ("project_suspended", "The project of this API key is suspended."),
    "no_tier": (
        "service_tier_not_allowed",
        "The tenant of this API key may no longer use any of the key's tiers.",
    ),
}
"""By the directory's reason, for an otherwise valid key: code and message."""


def key_rejected(reason: str) -> ApiError:
    """403 for a valid key that is kept out, else 401; `reason` as the directory names it."""
    if reason not in _KEPT_OUT:
        return invalid_api_key(reason)
    code, message = _KEPT_OUT[reason]
    return ApiError(403, code, f"{message} Ask the operator of this server.", should_retry=False)


def invalid_api_key(reason: str) -> ApiError:
    message = _KEY_MESSAGES.get(reason, _KEY_MESSAGES["unknown"])
    return ApiError(
        401, "invalid_api_key", message, headers={"www-authenticate": "Bearer"}, should_retry=False
    )


def address_not_allowed(address: IPv4Address | IPv6Address | None) -> ApiError:
    """403: a valid key used from outside its networks, which are not named. None: an unknown address."""
    seen = (
        f"from {address}. An administrator can allow it: fairgate key set KEY_ID --allow-from {address}"
        if address is not None
        else "from here: the client's address cannot be read from the proxy's 'X-Forwarded-For' or"
        " 'Forwarded' header"
    )
    return ApiError(403, "address_not_allowed", f"This API key may not be used {seen}.")


def key_withdrawn(reason: str, charged_tokens: int) -> ApiError:
    """401: the key was revoked, or its project or tenant suspended, after admission."""
    code, message = _KEPT_OUT.get(reason, ("invalid_api_key", _KEY_MESSAGES.get(reason, "")))
    charged = f"The {charged_tokens} tokens that were generated were charged" if charged_tokens else ""
    return ApiError(
        401,
        code,
        f"{message} The request was stopped. {charged or 'Nothing was charged'}.",
        should_retry=False,
    )
