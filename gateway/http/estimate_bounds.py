"""What a request's headers allow its estimate to be: a longest wait, a highest cost.

`X-Fairgate-Max-Wait-S` bounds the p90 of the wait that it would be told, `X-Fairgate-Max-Cost-Usd` the most
that it could cost. A request above either is refused before anything is held (`dispatch/admission.py`).
Unlike `X-Fairgate-Timeout-S` they end no wait.
"""

from __future__ import annotations

import math
from decimal import Decimal, InvalidOperation

from gateway import errors
from gateway.dispatch.admission import COST_HEADER, WAIT_HEADER

NANOUSD_PER_USD = 10**9
HIGHEST_USD = 10**9
"""A higher cost bounds nothing."""


def max_wait_s(text: str | None) -> float | None:
    """Seconds; None: not said. Raises `ApiError` (400)."""
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value >= 0:
        raise errors.bad_header(WAIT_HEADER, text, "It must be a number of seconds, 0 or more.")
    return value


def max_cost_nanousd(text: str | None) -> int | None:
    """Nano-dollars, rounded down; None: not said. Raises `ApiError` (400)."""
    if text is None:
        return None
    try:
        value = Decimal(text.strip())
    except InvalidOperation:
        value = Decimal("nan")
    if value.is_nan() or value < 0:
        raise errors.bad_header(COST_HEADER, text, "It must be a decimal number of dollars, 0 or more: 0.05.")
    return int(min(value, Decimal(HIGHEST_USD)) * NANOUSD_PER_USD)
