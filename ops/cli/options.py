"""Durations and instants on the command line."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from pathlib import Path

import click

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


class Duration(click.ParamType[float]):
    """`90s`, `30m`, `12h`, `30d`, `2w`, or plain seconds. The value is in seconds, above 0."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return float(value)
        match = re.fullmatch(r"(\d{1,9})([smhdw]?)", str(value).strip().lower())
        if match is None or int(match[1]) == 0:
            self.fail(f"{value!r} is not a duration such as 90s, 30m, 12h, 30d or 2w", param, ctx)
        return float(int(match[1]) * _UNITS[match[2] or "s"])


class PastInstant(click.ParamType[str]):
    """An instant with a time zone (ISO 8601), or how long ago it was: `90s`, `24h`, `7d`; kept as text."""

    name = "instant"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value).strip()
        if re.fullmatch(r"\d+[smhdw]", text.lower()):
            ago_s = Duration().convert(text, param, ctx)
            try:
                return datetime.fromtimestamp(time.time() - ago_s, UTC).isoformat()
            except (OverflowError, ValueError):
                self.fail(f"{text!r} ago is before the first year", param, ctx)
        try:
            if datetime.fromisoformat(text).tzinfo is None:
                raise ValueError
        except ValueError:
            self.fail(
                f"{text[:40]!r} is not an instant with a time zone, such as 2026-01-31T18:00:00+01:00,"
                " nor a time ago, such as 24h",
                param,
                ctx,
            )
        return text


SINCE = click.option("--from", "since", type=PastInstant(), help="From then on: an instant, or 24h, 7d ago.")
UNTIL = click.option("--to", "until", type=PastInstant(), help="Before then: an instant, or 24h, 7d ago.")
OUTPUT = click.option(
    "--output",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write to this file, which is there complete or not at all.  [default: stdout]",
)
