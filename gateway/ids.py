"""How are requests named?"""

from __future__ import annotations

import re
import secrets

REQUEST_ID_PREFIX = "req_"
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def new_request_id(unix_s: float) -> str:
    """`req_` and 26 characters: 48 bits of milliseconds, 80 random bits, in Crockford's base 32 (a ULID).

    Ids sort by time, and no two gateways agree on one beforehand.
    """
    value = (int(unix_s * 1000) & (2**48 - 1)) << 80 | secrets.randbits(80)
    digits = []
    for _ in range(26):
        value, digit = divmod(value, 32)
        digits.append("0123456789abcdefghjkmnpqrstvwxyz"[digit])
    return REQUEST_ID_PREFIX + "".join(reversed(digits))


def sequence_id(request_id: str, index: int) -> str:
    """The engine's name for one stream of tokens of a request."""
    return f"{request_id}.{index}"


def trace_context(traceparent: str | None) -> str | None:
    """The caller's W3C trace context, if it is one."""
    if traceparent is None or not _TRACEPARENT.fullmatch(traceparent):
        return None
    return traceparent
