"""Numbers and instants as people type them: `1,000,000`, `1.5m`, `50 %`, `yesterday`, `24h`. Pure."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from tenants.errors import Invalid

NANO = 1_000_000_000
COST = "cost_nanousd"
"""The meter whose amounts people type in dollars."""
MOST = 10**18
_NUMBER = re.compile(
    r"\$?\s*(?P<digits>-?(?:[0-9]+(?:[, _\u00a0\u202f][0-9]{3})*(?:\.[0-9]*)?|\.[0-9]+))"
    r"(?P<power>e[+-]?[0-9]{1,2})?\s*(?P<unit>k|m|bn|%)?",
    re.IGNORECASE,
)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "bn": 10**9}
SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_AGO = re.compile(r"([0-9]{1,9})([smhdw])(?:\s+ago)?")
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?) ?([smhdw])")
DAYS = {"today": 0, "yesterday": 1}


def number_typed(text: str, hundred: int = 0) -> Decimal | None:
    """None: it is no number. Between digits, commas, spaces and underscores stand before three of them.
    `hundred`: what 100 % is; 0: no per cent."""
    found = _NUMBER.fullmatch(text.strip())
    if found is None:
        return None
    unit = (found["unit"] or "").lower()
    if unit == "%" and not hundred:
        return None
    value = Decimal(re.sub(r"[, _\u00a0\u202f]", "", found["digits"]) + (found["power"] or ""))
    return value * hundred / 100 if unit == "%" else value * _UNITS[unit]


def whole_typed(field: str, text: str, hundred: int = 0) -> int:
    """At least 0. Raises `Invalid`."""
    value = number_typed(text, hundred)
    if value is None or set("e$") & set(text.lower()) or not 0 <= value < MOST or value != int(value):
        raise Invalid(field, "give a whole number, such as 100000, 100,000 or 1.5m")
    return int(value)


def decimal_typed(field: str, text: str, hundred: int = 0) -> Decimal:
    """At least 0. Raises `Invalid`."""
    value = number_typed(text, hundred)
    if value is None or not 0 <= value < 10**15:
        raise Invalid(field, f"give a number from 0 on, such as 12.5{' or 50 %' if hundred else ' or 1.5k'}")
    return value


def amount_of(meter: str, text: str) -> int:
    """Cost in dollars, else a whole number. Raises `Invalid`."""
    if meter != COST:
        return whole_typed("amount", text)
    nanousd = decimal_typed("amount", text) * NANO
    if nanousd != int(nanousd):
        raise Invalid("amount", "give dollars with at most nine digits after the point")
    return int(nanousd)


def rate_of(meter: str, text: str, field: str = "rate_per_s") -> float:
    """Cost in dollars a second. Raises `Invalid` for the field."""
    value = decimal_typed(field, text)
    return float(value * NANO if meter == COST else value)


def duration_typed(text: str) -> float | None:
    """Seconds of `90s`, `30m`, `2h`, `1.5d`; None: it is none. Plain numbers are seconds elsewhere."""
    found = _DURATION.fullmatch(text.strip().lower())
    return None if found is None else float(Decimal(found[1]) * SECONDS[found[2]])


def instant_typed(text: str, now: datetime) -> datetime | None:
    """None: it is no instant. A date and `yesterday` are its midnight, in UTC."""
    text = text.strip()
    if (ago := _AGO.fullmatch(text.lower())) is not None:
        try:
            return now - timedelta(seconds=int(ago[1]) * SECONDS[ago[2]]) if int(ago[1]) else None
        except OverflowError:
            return None
    if text.lower() in DAYS:
        day = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        return day - timedelta(days=DAYS[text.lower()])
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return None
    if at.tzinfo is None:
        return at.replace(tzinfo=UTC) if re.fullmatch(r"\d{4}-\d\d-\d\d", text) else None
    return at
