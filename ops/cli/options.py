"""Durations on the command line."""

from __future__ import annotations

import re

import click

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


class Duration(click.ParamType[float]):
    """`90s`, `30m`, `12h`, `30d`, `2w`, or plain seconds. The value is in seconds, above 0."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds."""
        if isinstance(value, int | float):
            return float(value)
        match = re.fullmatch(r"(\d{1,9})([smhdw]?)", str(value).strip().lower())
        if match is None or int(match[1]) == 0:
            self.fail(f"{value!r} is not a duration such as 90s, 30m, 12h, 30d or 2w", param, ctx)
        return float(int(match[1]) * _UNITS[match[2] or "s"])
