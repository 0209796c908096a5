"""Prices of a model in a tier: how they are set, what they are, how they are stored and shown. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Annotated, Any

import msgspec

from tenants.errors import Invalid
from tenants.fields import Field
from tenants.pricing.pricing import (
    FREE,
    MAX_NANOUSD_PER_TOKEN,
    MAX_THOUSANDTHS,
    Price,
    PriceEntry,
    TokenWeights,
)
from tenants.types import Tier

NANOUSD_PER_MILLION = 1_000
"""A dollar per million tokens is so many nano-dollars a token."""


def _money(says: str, option: str, label: str) -> Field:
    schema = {"minimum": 0, "maximum": MAX_NANOUSD_PER_TOKEN}
    unit = "$ per million tokens"
    return Field(says, label, option, schema=schema, unit=unit, scale=NANOUSD_PER_MILLION, form_help="")


def _factor(says: str, option: str = "", form_help: str = "") -> Field:
    schema = {"minimum": 0, "maximum": MAX_THOUSANDTHS}
    return Field(says, option=option, schema=schema, scale=1_000, hundred=1, form_help=form_help)


class PriceSet(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Sets prices of a model. Money in nano-dollars a token; multiplier and weights in thousandths."""

    model: Annotated[str, Field(is_argument=True)]
    tier: Annotated[str | None, Field("Only this tier; left out: all.", choices=tuple(Tier))] = None
    input_nanousd: Annotated[int | None, _money("Nano-dollars for a token of input.", "--input", "Input")] = (
        None
    )
    cached_input_nanousd: Annotated[
        int | None,
        _money(
            "The same for input in the prefix cache; of a new model, left out: as input.",
            *("--cached", "Cached input"),
        ),
    ] = None
    output_nanousd: Annotated[int | None, _money("The same for output.", "--output", "Output")] = None
    multiplier: Annotated[
        int | None,
        _factor(
            "Thousandths of the price that the tier costs; of a new model as `tier_prices`.",
            form_help="Of the price, in this tier: 1, 0.5 or 50 %.",
        ),
    ] = None
    input_weight: Annotated[
        int | None,
        _factor(
            "Thousandths of a token that a token of input counts for limits.",
            form_help="What a token of input counts for limits: 1, 0.5 or 50 %.",
        ),
    ] = None
    cached_input_weight: Annotated[int | None, _factor("The same, if cached.", "--cached-weight")] = None
    output_weight: Annotated[int | None, _factor("The same for output.")] = None
    reasoning_weight: Annotated[int | None, _factor("The same for output that is reasoning.")] = None
    free: Annotated[bool, Field("It costs nothing, on purpose.", form_help="The model costs nothing.")] = (
        False
    )


MONEY = tuple(field.name for field in fields(Price))
WEIGHTS = {f"{field.name}_weight": field.name for field in fields(TokenWeights)}
"""Of a column, and of the record."""


def entry_columns(entry: PriceEntry) -> dict[str, int]:
    return {
        **{name: getattr(entry.price, name) for name in MONEY},
        "multiplier": entry.multiplier,
        **{column: getattr(entry.weights, name) for column, name in WEIGHTS.items()},
    }


def entry_of(row: Mapping[Any, Any]) -> PriceEntry:
    """From its columns. Raises `Invalid`."""
    return PriceEntry(
        Price(**{name: row[name] for name in MONEY}),
        row["multiplier"],
        TokenWeights(**{name: row[column] for column, name in WEIGHTS.items()}),
    )


@dataclass(frozen=True, slots=True)
class PriceRow:
    """Prices of a model and tier in a version: nano-dollars a token; multiplier, weights: thousandths."""

    version: int
    model: str
    tier: Tier
    entry: PriceEntry
    created_at: datetime

    def as_json(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "model": self.model,
            "tier": self.tier.value,
            **entry_columns(self.entry),
            "created_at": self.created_at.isoformat(),
        }


def as_stored(rows: Sequence[PriceRow]) -> dict[str, Any] | None:
    """The current rows of one model, for the audit and its entity tag; None: it has no price."""
    return {row.tier.value: row.as_json() for row in rows} or None


def changed(old: PriceEntry | None, wanted: PriceSet, default_multiplier: int) -> PriceEntry:
    """The entry after `wanted`; `old` None: the model had no price in this tier. Raises `Invalid`."""
    before = entry_columns(old or PriceEntry(FREE, default_multiplier))
    given = {name: value for name in before if (value := getattr(wanted, name)) is not None}
    if wanted.free:
        if any(given.get(name) for name in MONEY):
            raise Invalid("free", "give prices or free, not both")
        return entry_of(before | given | dict.fromkeys(MONEY, 0))
    if old is None:
        for name in ("input_nanousd", "output_nanousd"):
            if name not in given:
                raise Invalid(
                    name,
                    f"is missing: model {wanted.model!r} has no price yet; give input and output, or mark it"
                    " free",
                )
        before["cached_input_nanousd"] = given["input_nanousd"]
    return entry_of(before | given)
