"""Ledger rows and sums over them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from typing import Any, Literal

import msgspec
from sqlalchemy import ColumnElement, Table, select

from tenants.storage.tables import ledger
from tenants.types import Amounts, Limit

Kind = Literal["reserve", "top_up", "settle", "credit", "adjust"]
KINDS = frozenset({"reserve", "top_up", "settle", "credit", "adjust"})
AMOUNT_FIELDS = ("input_tokens", "output_tokens", "cost_nanousd", "requests", "gpu_ms")


class LedgerRow(msgspec.Struct, frozen=True):
    """What was held (reserve row), held in addition (top-up; detail: used by then), or charged (settle)."""

    request_id: str
    kind: Kind
    tenant_id: str
    project_id: str
    key_id: str
    gateway_id: str
    tier: str
    model: str
    amounts: Amounts
    outcome: str
    at: datetime
    """UTC, with its time zone set."""
    detail: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """Numbers and short strings (never prompts or answers); JSON."""
    charged_to: tuple[str, ...] = ()
    """The counters that the request will be charged to (`Granted.charged_to`; top-up rows: of later limits).
    Counters are rebuilt from it: a request without it counts against no limit after a restart."""
    number: int = 0
    """Top-up rows: 1, 2, … within their request."""
    counted_input: int | None = None
    counted_output: int | None = None
    """Weighted tokens, as limits count them; None: not weighted."""
    counted_cost: int | None = None
    """Nano-dollars as limits count them; None: as billed."""
    price_version: int = 0
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The request's, in each of its rows, so that charges can be grouped by them."""

    @property
    def counted(self) -> Amounts:
        """The amounts as limits count them."""
        own = {
            "input_tokens": self.counted_input,
            "output_tokens": self.counted_output,
            "cost_nanousd": self.counted_cost,
        }
        counted = {name: amount for name, amount in own.items() if amount is not None}
        return msgspec.structs.replace(self.amounts, **counted) if counted else self.amounts

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "number": self.number,
            "at": self.at.isoformat(),
            "gateway_id": self.gateway_id,
            "tier": self.tier,
            "model": self.model,
            **msgspec.structs.asdict(self.amounts),
            "outcome": self.outcome,
            "labels": dict(self.labels),
            "detail": dict(self.detail),
        }


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A reserved request, usually unsettled, with its top-ups."""

    reserve: LedgerRow
    top_ups: tuple[LedgerRow, ...] = ()
    """By number."""

    @property
    def request_id(self) -> str:
        return self.reserve.request_id

    @property
    def held(self) -> Amounts:
        return sum_of([self.reserve.counted, *(row.counted for row in self.top_ups)])

    @property
    def charged_to(self) -> tuple[str, ...]:
        return (*self.reserve.charged_to, *(name for row in self.top_ups for name in row.charged_to))

    @property
    def used(self) -> Amounts:
        """By the last top-up, as limits count it; zero before the first."""
        return amounts_from(self.top_ups[-1].detail.get("used")) if self.top_ups else Amounts(requests=0)

    @property
    def worst(self) -> Amounts:
        """The worst case in the reserve row, or what is held if that is more."""
        noted = as_list(amounts_from(self.reserve.detail.get("most")))
        return Amounts(*map(max, noted, as_list(self.held)))

    @property
    def may_be_cut(self) -> bool:
        """Whether its worst case was not promised."""
        return bool(self.reserve.detail.get("may_be_cut", True))


@dataclass(frozen=True, slots=True)
class Standing:
    """Values of all counters and all open requests, at one instant."""

    used: list[tuple[Limit, int]]
    open_requests: list[OpenRequest]


@dataclass(frozen=True, slots=True)
class Total:
    tenant_id: str
    tier: str
    model: str
    requests: int
    input_tokens: int
    output_tokens: int
    cost_nanousd: int


_amounts = attrgetter(*AMOUNT_FIELDS)


def less(amounts: Amounts, other: Amounts) -> Amounts:
    return Amounts(**{name: getattr(amounts, name) - getattr(other, name) for name in AMOUNT_FIELDS})


def as_list(amounts: Amounts) -> list[int]:
    """Amounts for a row's detail, in the order of `AMOUNT_FIELDS`."""
    return list(_amounts(amounts))


def amounts_from(noted: Any) -> Amounts:
    """Inverse of `as_list`; zero for anything else."""
    if not isinstance(noted, list) or len(noted) != len(AMOUNT_FIELDS):
        return Amounts(requests=0)
    return Amounts(**{name: int(value) for name, value in zip(AMOUNT_FIELDS, noted, strict=True)})


def in_doubt(detail: Mapping[str, Any]) -> Amounts:
    """What limits count that may not have been used, by the detail of a settle row."""
    return amounts_from(detail.get("in_doubt"))


def sum_of(amounts: Iterable[Amounts]) -> Amounts:
    total = [0] * len(AMOUNT_FIELDS)
    for part in amounts:
        total = [sum_ + getattr(part, name) for sum_, name in zip(total, AMOUNT_FIELDS, strict=True)]
    return Amounts(**dict(zip(AMOUNT_FIELDS, total, strict=True)))


def is_settled(rows: Table) -> ColumnElement[bool]:
    """SQL condition: the request of this row of `rows` has a settle row."""
    other = ledger.alias("other")
    return (
        select(other.c.id).where(other.c.request_id == rows.c.request_id, other.c.kind == "settle").exists()
    )
