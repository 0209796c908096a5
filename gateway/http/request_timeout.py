"""The longest wait for a turn that a request's headers allow.

`X-Fairgate-Timeout-S` sets it. SDKs send their read timeout (`x-stainless-read-timeout`), before which a
refusal must be out. The smallest counts, the tier's own limit included, which yields to the header in batch.
"""

from __future__ import annotations

from gateway import errors
from gateway.http.asgi import is_number

HEADER = "X-Fairgate-Timeout-S"
SDK_HEADER = "x-stainless-read-timeout"
LONGEST_S = 86_400.0
MARGIN_S = 1.0
"""Before an SDK's read timeout; of a short one, a tenth."""


def timeout_s(asked: str | None, sdk_read_timeout: str | None) -> float | None:
    """Seconds from arrival; None: no header. Raises `ApiError` (400) naming the header."""
    found: list[float] = []
    if asked is not None:
        said_s = _seconds(HEADER, asked)
        if said_s > LONGEST_S:
            raise errors.bad_header(HEADER, asked, f"It must be at most {LONGEST_S:.0f} seconds, a day.")
        found.append(said_s)
    if sdk_read_timeout is not None:
        read_s = min(_seconds(SDK_HEADER, sdk_read_timeout), LONGEST_S)
        found.append(read_s - min(MARGIN_S, read_s / 10))
    return min(found, default=None)


def _seconds(name: str, text: str) -> float:
    value = float(text) if is_number(text) else 0.0
    if not value > 0:
        raise errors.bad_header(
            name, text, "It must be a number of seconds above 0; a deadline that has passed cannot be met."
        )
    return value
