"""Ids of requests, sequences and sessions."""

from __future__ import annotations

import hashlib
import os
import re

REQUEST_ID_PREFIX = "req_"
CHAT_ID_PREFIX = "chatcmpl-"
TEXT_ID_PREFIX = "cmpl-"
RESPONSE_ID_PREFIX = "resp_"
MESSAGE_ID_PREFIX = "msg_"
"""As OpenAI's and Anthropic's; the rest is the request's own."""
SHOWN_PREFIXES = (
    *(REQUEST_ID_PREFIX, CHAT_ID_PREFIX, TEXT_ID_PREFIX),
    *(RESPONSE_ID_PREFIX, MESSAGE_ID_PREFIX),
)
"""Of all ids that users have of a request."""
RANDOM_BYTES = 10
_DRAWN_AT_ONCE = 400
"""Drawn at once: asking the operating system for each id's bytes costs more than all else about it."""
_SESSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:~@=+-]{0,63}")
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_PAIRS = [high + low for high in _ALPHABET for low in _ALPHABET]
_SHIFTS = range(120, -1, -10)


def new_request_id(unix_s: float) -> str:
    """`req_` and a ULID: 48 bits of milliseconds, 80 random bits, in Crockford's base 32."""
    value = (int(unix_s * 1000) & (2**48 - 1)) << 80 | int.from_bytes(_random_bytes())
    return REQUEST_ID_PREFIX + "".join([_PAIRS[value >> shift & 1023] for shift in _SHIFTS])


_drawn: list[bytes] = []
# A forked process would draw the same ones.
os.register_at_fork(after_in_child=_drawn.clear)


def _random_bytes() -> bytes:
    try:
        return _drawn.pop()
    except IndexError:
        drawn = os.urandom(RANDOM_BYTES * _DRAWN_AT_ONCE)
        _drawn.extend(drawn[at : at + RANDOM_BYTES] for at in range(0, len(drawn), RANDOM_BYTES))
        return _drawn.pop()


def shown_id(request_id: str, prefix: str) -> str:
    """The id of its answer."""
    return prefix + request_id.removeprefix(REQUEST_ID_PREFIX)


def request_id_of(shown: str) -> str:
    for prefix in SHOWN_PREFIXES:
        if shown.startswith(prefix):
            return REQUEST_ID_PREFIX + shown.removeprefix(prefix)
    return shown


def session_id(named: str | None) -> str | None:
    """The session that a client names; a digest of what cannot stand in a path or is too long; None: none."""
    if not named or _SESSION.fullmatch(named):
        return named or None
    return "sha256:" + hashlib.sha256(named.encode(errors="surrogatepass")).hexdigest()[:32]


def sequence_id(request_id: str, index: int) -> str:
    return f"{request_id}.{index}"
