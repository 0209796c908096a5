"""Headers that bound the estimate: `X-Fairgate-Max-Wait-S` (p90 of its wait), `X-Fairgate-Max-Cost-Usd`.

A request above either is refused before anything is held (`dispatch/admission.py`). Unlike
`X-Fairgate-Timeout-S` they end no wait.
"""

from __future__ import annotations

from decimal import Decimal

from gateway import errors
from gateway.dispatch.admission import COST_HEADER, WAIT_HEADER
from gateway.http.asgi import is_number

NANOUSD_PER_USD = 10**9
HIGHEST_USD = 10**9


def max_wait_s(text: str | None) -> float | None:
    """None: no bound. Raises `ApiError` (400)."""
    if text is None:
        return None
    if not is_number(text):
        raise errors.bad_header(WAIT_HEADER, text, "It must be a number of seconds, 0 or more.")
    return float(text)


def max_cost_nanousd(text: str | None) -> int | None:
    """Rounded down; None: no bound. Raises `ApiError` (400)."""
    if text is None:
        return None
    text = text.strip()
    if not is_number(text):
        raise errors.bad_header(COST_HEADER, text, "It must be a decimal number of dollars, 0 or more: 0.05.")
    return int(min(Decimal(text), Decimal(HIGHEST_USD)) * NANOUSD_PER_USD)
