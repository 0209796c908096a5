"""Numbers, durations and times on the command line."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from tenants.typed import DAYS, SECONDS, instant_typed, number_typed

SHORT_TIMES = "yesterday, 2026-01-31, 24h (ago)"
TIMES = f"{SHORT_TIMES}, 2026-01-31T18:00:00+01:00"
"""Examples of times; dates and days are UTC."""


class Number(click.ParamType[float]):
    """A number as people type it: `1000`, `1,000`, `1.5k`, `1m`; where it has a hundred, `50 %`."""

    name = "number"

    def __init__(
        self,
        kind: type[int] | type[float],
        low: float | None = None,
        high: float | None = None,
        *,
        low_open: bool = False,
        hundred: int = 0,
    ) -> None:
        """`low_open`: it must be above `low`. `hundred`: what 100 % is; 0: no per cent."""
        self.kind, self.low, self.high, self.low_open, self.hundred = kind, low, high, low_open, hundred

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = number_typed(value, self.hundred) if isinstance(value, str) else value
        if number is None or (self.kind is int and number != int(number)):
            what = (
                "a whole number, such as 1000, 1,000 or 1.5k"
                if self.kind is int
                else "a number, such as 12.5"
            )
            self.fail(f"{value!r} is not {what}{' or 50 %' * bool(self.hundred)}.{_unit(param)}", param, ctx)
        low, high = self.low, self.high
        if (low is not None and (number < low or (self.low_open and number == low))) or (
            high is not None and number > high
        ):
            bounds = [
                "" if low is None else f"{'above' if self.low_open else 'at least'} {low:,}",
                "" if high is None else f"at most {high:,}",
            ]
            self.fail(f"{value} is not {' and '.join(filter(None, bounds))}.{_unit(param)}", param, ctx)
        return self.kind(number)


def _unit(param: click.Parameter | None) -> str:
    """The option's help, which says the unit."""
    words = (getattr(param, "help", None) or "").partition("  [")[0]
    return f" {param.opts[0]}: {words}" if words and param is not None else ""


class Duration(click.ParamType[float]):
    """`90s`, `30m`, `12h`, `30d`, `2w`, or plain seconds. The value is in seconds, above 0."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return float(value)
        match = re.fullmatch(r"([0-9]{1,9})([smhdw]?)", str(value).strip().lower())
        if match is None or int(match[1]) == 0:
            self.fail(f"{value!r} is not a duration such as 90s, 30m, 12h, 30d or 2w", param, ctx)
        return float(int(match[1]) * SECONDS[match[2] or "s"])


class PastInstant(click.ParamType[str]):
    """A time in the past, in one of the forms of `TIMES`. The value is text: ISO 8601."""

    name = "time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value).strip()
        at = instant_typed(text, datetime.now(UTC))
        if at is None:
            self.fail(f"{text[:40]!r} is not a time. Give one like these: {TIMES}", param, ctx)
        return text if "T" in text else at.isoformat()


class PastStart(PastInstant):
    """The same. A time ago is rounded down to the hour, one of whole days to the day; a date stays a date, of
    the time zone that is asked for."""

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value).strip().lower()
        at = datetime.fromisoformat(super().convert(value, param, ctx))
        if "-" in text:
            return str(value).strip()
        ago_s = 0 if text in DAYS else Duration().convert(text.removesuffix("ago").strip(), param, ctx)
        whole_s = 3_600 if ago_s % 86_400 else 86_400
        return datetime.fromtimestamp(at.timestamp() // whole_s * whole_s, UTC).isoformat()


OUTPUT = click.option(
    "--output",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write to this file (only complete files take its name).  [default: stdout]",
)
