"""Exact sums of usage that pages add up and compare. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from decimal import Decimal
from typing import Any

from gateway.console.formats import exact_dollars, money, number, seconds


@dataclass(frozen=True, slots=True)
class SummedUsage:
    """Sums of one group, named as the ledger's sums."""

    ended_requests: int = 0
    requests: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    cost_nanousd: int = 0
    credit_nanousd: int = 0
    gpu_ms: int = 0

    @property
    def net_nanousd(self) -> int:
        return self.cost_nanousd - self.credit_nanousd

    def plus(self, other: SummedUsage) -> SummedUsage:
        return SummedUsage(*(getattr(self, name) + getattr(other, name) for name in NAMES))


NAMES = tuple(column.name for column in fields(SummedUsage))


def amounts_of(row: Mapping[str, Any]) -> SummedUsage:
    return SummedUsage(*(int(row[name]) for name in NAMES))


def sum_of(many: Iterable[SummedUsage]) -> SummedUsage:
    total = SummedUsage()
    for usage in many:
        total = total.plus(usage)
    return total


@dataclass(frozen=True)
class Measure:
    words: str
    field: str
    unit: str = ""

    def of(self, amounts: SummedUsage) -> int:
        value: int = getattr(amounts, self.field)
        return value

    def exact(self, value: int) -> str:
        """For charts and files: all digits, dollars or seconds."""
        if self.unit == "$":
            return exact_dollars(value)
        return f"{Decimal(value) / 1000:f}" if self.unit == "s" else str(value)

    def shown(self, value: int) -> str:
        if self.unit == "$":
            return money(value)
        return seconds(value / 1000) if self.unit == "s" else number(value)


MEASURES = {
    "charged": Measure("Charged", "cost_nanousd", "$"),
    "requests": Measure("Requests", "ended_requests"),
    "input": Measure("Input tokens", "input_tokens"),
    "output": Measure("Output tokens", "output_tokens"),
    "device": Measure("Device time", "gpu_ms", "s"),
}
"""By parameter name."""


def change(now: int, before: int) -> str:
    if now == before:
        return "as before"
    if not before:
        return "new"
    percent = 100 * (now - before) / before
    return f"{percent:+,.0f} %" if abs(percent) >= 1 else f"{'more' if now > before else 'less'} by below 1 %"
