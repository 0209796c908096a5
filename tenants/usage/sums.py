"""Sums of charges: which rows of `usage_sums` a ledger row adds to, and how much. Pure.

Each charging row (settle, credit, adjust) adds to its UTC hour, its UTC day, and that day by key and
labels."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from operator import add, sub
from typing import Any, NamedTuple

import msgspec

from tenants.types import Meter

HOUR_US = 3_600_000_000
DAY_US = 24 * HOUR_US
MOST_WAIT_US = 10**13
"""Longest wait that is summed, some 115 days: a broken clock does not overflow a sum."""

AMOUNTS = (
    "ended_requests",
    "requests",
    "input_tokens",
    "cached_tokens",
    "output_tokens",
    "cost_nanousd",
    "credit_nanousd",
    "gpu_ms",
    "waits",
    "wait_us",
    "first_tokens",
    "ttft_us",
)
"""Columns that are summed."""
NOTHING: tuple[int, ...] = (0,) * len(AMOUNTS)
COUNTED_AS: Mapping[Meter, tuple[str, ...]] = {
    Meter.TOTAL_TOKENS: ("input_tokens", "output_tokens"),
    Meter.INPUT_TOKENS: ("input_tokens",),
    Meter.OUTPUT_TOKENS: ("output_tokens",),
    Meter.COST_NANOUSD: ("cost_nanousd",),
    Meter.REQUESTS: ("requests",),
    Meter.GPU_MS: ("gpu_ms",),
}
"""Sums of usage by meter."""


class Grain(StrEnum):
    HOUR = "hour"
    DAY = "day"
    KEY_DAY = "key_day"

    @property
    def span_us(self) -> int:
        return HOUR_US if self is Grain.HOUR else DAY_US


class SumKey(NamedTuple):
    """The key of a row of `usage_sums`."""

    grain: str
    start_us: int
    tenant_id: str
    project_id: str
    key_id: str
    model: str
    tier: str
    outcome: str
    label_set: str


class Charge(NamedTuple):
    ledger_id: int
    kind: str
    at_us: int
    tenant_id: str
    project_id: str
    key_id: str
    model: str
    tier: str
    outcome: str
    requests: int
    input_tokens: int
    output_tokens: int
    cost_nanousd: int
    gpu_ms: int
    detail: str
    """JSON."""
    labels: str | None
    """JSON."""

    def amounts(self) -> tuple[int, ...]:
        if self.kind != "settle":
            is_credit = self.kind == "credit"
            cost, credit = (0, -self.cost_nanousd) if is_credit else (self.cost_nanousd, 0)
            used = (self.requests, self.input_tokens, 0, self.output_tokens)
            return (0, *used, cost, credit, self.gpu_ms, 0, 0, 0, 0)
        said = _said(self.detail)
        return (
            1,
            self.requests,
            self.input_tokens,
            max(0, min(said.cached_tokens or 0, self.input_tokens)),
            self.output_tokens,
            self.cost_nanousd,
            0,
            self.gpu_ms,
            *_time(said.wait_s),
            *_time(said.ttft_s),
        )


@dataclass(slots=True)
class Sums:
    amounts: dict[SumKey, tuple[int, ...]] = field(default_factory=dict)
    labels: dict[str, dict[str, str]] = field(default_factory=dict)
    newest_us: int = 0

    def add(self, charge: Charge, hours_from_us: int = 0) -> None:
        """`hours_from_us`: hours that began earlier are gone."""
        amounts = charge.amounts()
        self.newest_us = max(self.newest_us, charge.at_us)
        if amounts == NOTHING:
            return
        set_id = ""
        if charge.labels is not None:
            set_id, labels = label_set(charge.labels)
            if set_id:
                self.labels[set_id] = labels
        hour_us, day_us = (charge.at_us // span_us * span_us for span_us in (HOUR_US, DAY_US))
        coarse = (charge.tenant_id, "", "", charge.model, charge.tier, charge.outcome, "")
        fine = (charge.tenant_id, charge.project_id, charge.key_id, *coarse[3:6], set_id)
        keys = [SumKey(Grain.DAY.value, day_us, *coarse), SumKey(Grain.KEY_DAY.value, day_us, *fine)]
        if hour_us >= hours_from_us:
            keys.append(SumKey(Grain.HOUR.value, hour_us, *coarse))
        for key in keys:
            self.amounts[key] = plus(self.amounts.get(key, NOTHING), amounts)


def sums_of(charges: Iterable[Charge], hours_from_us: int = 0) -> Sums:
    sums = Sums()
    for charge in charges:
        sums.add(charge, hours_from_us)
    return sums


def plus(amounts: Sequence[int], others: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(add, amounts, others))


def minus(amounts: Sequence[int], others: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(sub, amounts, others))


@lru_cache(maxsize=4096)
def label_set(labels: str) -> tuple[str, dict[str, str]]:
    """The name of a set of labels, independent of order, and the labels; an empty name for none."""
    values = labels_of(labels)
    if not values:
        return "", {}
    packed = msgspec.json.encode(values, order="sorted")
    return hashlib.sha256(packed).hexdigest()[:32], values


@lru_cache(maxsize=4096)
def labels_of(labels: str | None) -> dict[str, str]:
    return {} if labels is None else msgspec.json.decode(labels, type=dict[str, str])


class _Said(msgspec.Struct):
    cached_tokens: int | None = None
    wait_s: float | None = None
    ttft_s: float | None = None


_decode = msgspec.json.Decoder(_Said).decode


def _said(detail: str) -> _Said:
    try:
        return _decode(detail)
    except msgspec.MsgspecError:  # of a type that no version has written
        return _Said()


def _time(seconds: Any) -> tuple[int, int]:
    """Count (0 or 1), and microseconds."""
    if seconds is None:
        return 0, 0
    return 1, max(0, min(round(seconds * 1e6), MOST_WAIT_US))
