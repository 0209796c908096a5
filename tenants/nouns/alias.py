"""A model alias: another name for a model, for several by weight, or for a chain of them. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from tenants.errors import Invalid
from tenants.fields import Field

MODEL = re.compile(r"[A-Za-z0-9._:/@+-]{1,128}")
MAX_ALIASES = 256
MAX_WEIGHT = 1_000_000
MAX_CHAIN = 8
"""Models of a chain, and of any alias that is stored."""
MAX_PRICE_RATIO = 1_000


@dataclass(frozen=True, slots=True)
class Chain:
    """Pools in the order in which they are tried."""

    pools: tuple[str, ...]
    max_price: float = 1.0
    """A pool dearer than this many times the first is passed over."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.pools) <= MAX_CHAIN:
            raise Invalid("chain", f"must name 1 to {MAX_CHAIN} models; it names {len(self.pools)}")
        for pool in self.pools:
            if self.pools.count(pool) > 1:
                raise Invalid("chain", f"names {pool!r} twice: leave the second one out")
        if not (math.isfinite(self.max_price) and 0 < self.max_price <= MAX_PRICE_RATIO):
            raise Invalid(
                "max_price",
                f"is {self.max_price:g}, and must be above 0 and at most {MAX_PRICE_RATIO}: how many times as"
                " dear as the first model another one may be (1: never dearer)",
            )


Alias = Mapping[str, int] | Chain
"""Weights of pools (0: gets nothing), or a chain."""


def alias_as_json(means: Alias) -> dict[str, Any]:
    if isinstance(means, Chain):
        return {"chain": list(means.pools), "max_price": means.max_price}
    return dict(means)


class AliasSet(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Sets an alias, in place of the stored one of that name."""

    name: Annotated[
        str,
        Field(
            "What requests call it.",
            "Alias",
            schema={"pattern": f"^{MODEL.pattern}$"},
            is_argument=True,
        ),
    ]
    means: Annotated[
        str,
        Field(
            "A model; several by weight (a = 3, b = 1); or a chain (a > b), where the next model takes what"
            " the one before it cannot.",
            is_argument=True,
        ),
    ]
    max_price: Annotated[
        float,
        Field(
            "Of a chain: how many times as dear as the first model another one may be (1: never dearer).",
            "Highest price",
            unit="times the first model's",
        ),
    ] = 1.0


@dataclass(frozen=True, slots=True)
class ModelAlias:
    """As it is stored."""

    id: str
    name: str
    means: str
    """As it is typed, in one way of writing."""
    max_price: float

    @property
    def alias(self) -> Alias:
        return read_alias(self.means, self.max_price)


def draft_of(wanted: AliasSet) -> ModelAlias:
    """Without id. Raises `Invalid`."""
    means = read_alias(wanted.means, wanted.max_price)
    models = means.pools if isinstance(means, Chain) else tuple(means)
    for field, name in (("name", wanted.name), *(("means", model) for model in models)):
        if not MODEL.fullmatch(name):
            raise Invalid(
                field,
                f"{name[:40]!r} is no name of a model, which has 1 to 128 letters, digits and . _ : / @ + -"
                " (a comma or > stands between two models)",
            )
    if wanted.name in models:
        raise Invalid("means", f"{wanted.name!r} cannot mean itself: name models")
    return ModelAlias("", wanted.name, as_text(means), float(wanted.max_price))


def read_alias(text: str, max_price: float = 1.0) -> Alias:
    """What is typed. Raises `Invalid`."""
    is_chain = ">" in text
    parts = [part.strip() for part in text.split(">" if is_chain else ",")]
    if len(parts) > MAX_CHAIN:
        raise Invalid("means", f"names {len(parts)} models; the most is {MAX_CHAIN}: leave some out")
    if is_chain:
        try:
            return Chain(tuple(parts), max_price)
        except Invalid as error:
            raise Invalid("means" if error.field == "chain" else error.field, error.message) from None
    if max_price != 1:
        raise Invalid("max_price", "goes with a chain, such as a > b: leave it at 1")
    weights: dict[str, int] = {}
    for part in parts:
        model, _, weight = (piece.strip() for piece in part.partition("="))
        if model in weights:
            raise Invalid("means", f"names {model!r} twice: leave the second one out")
        if "=" in part and not (weight.isdecimal() and len(weight) < 8 and int(weight) <= MAX_WEIGHT):
            raise Invalid(
                "means",
                f"the weight {weight[:40]!r} must be a whole number, 0 to {MAX_WEIGHT}, as in a = 3, b = 1",
            )
        weights[model] = int(weight or 1)
    if not any(weights.values()):
        raise Invalid("means", "gives no model a weight above 0")
    return weights


def as_text(means: Alias) -> str:
    """As it is typed."""
    if isinstance(means, Chain):
        return " > ".join(means.pools)
    if len(means) == 1:
        return next(iter(means))
    return ", ".join(f"{model} = {weight}" for model, weight in means.items())
