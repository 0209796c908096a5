"""Checks of the values that admin acts set. Pure; each error names the field, the bound and the remedy.

The counts below keep the directory small enough for memory and a reservation for one atomic step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tenants.errors import Invalid
from tenants.networks import Network, network_of
from tenants.nouns.checks import MAX_MODEL_CHARS as MAX_MODEL_CHARS
from tenants.nouns.checks import MAX_REASON_CHARS as MAX_REASON_CHARS
from tenants.nouns.checks import MAX_ZONE_CHARS as MAX_ZONE_CHARS
from tenants.nouns.checks import NAME as NAME
from tenants.nouns.checks import ZONE as ZONE
from tenants.nouns.checks import choice as choice
from tenants.nouns.checks import finite as finite
from tenants.nouns.checks import iana_zone as iana_zone
from tenants.nouns.checks import instant as instant
from tenants.nouns.checks import model as model
from tenants.nouns.checks import models as models
from tenants.nouns.checks import name as name
from tenants.nouns.checks import plain_text as plain_text
from tenants.nouns.checks import reason as reason
from tenants.nouns.checks import seconds as seconds
from tenants.nouns.checks import whole as whole
from tenants.types import SCOPES, Labels, Tier

MAX_TENANTS = 10_000
MAX_PROJECTS_PER_TENANT = 200
MAX_KEYS_PER_TENANT = 1_000
MAX_SECRETS_PER_KEY = 4
MAX_NETWORKS = 32
MAX_LABELS = 8
MAX_LABEL_VALUES = 64
MAX_LABEL_CHARS = 64

MIN_WEIGHT = 0.01
MAX_WEIGHT = 1_000.0
MAX_RESERVED_TOKENS_PER_S = 1e9

MAX_EXPIRY_S = 10 * 366 * 86_400
MAX_GRACE_S = 30 * 86_400
ALL_TIERS = "all"
"""Of a reservation that is not for one tier."""


def weight(value: float) -> float:
    if not MIN_WEIGHT <= finite("weight", value) <= MAX_WEIGHT:
        raise Invalid("weight", f"must lie between {MIN_WEIGHT} and {MAX_WEIGHT:g}")
    return float(value)


def reserved(value: float) -> float:
    name = "reserved_tokens_per_s"
    finite(name, value, "a finite number of cost tokens per second (0: no reservation)")
    if not 0 <= value <= MAX_RESERVED_TOKENS_PER_S:
        raise Invalid(name, f"must lie between 0 (no reservation) and {MAX_RESERVED_TOKENS_PER_S:g}")
    return float(value)


def reserved_tier(value: str, tokens_per_s: float) -> Tier | None:
    """None: all tiers."""
    if value == ALL_TIERS:
        return None
    if value not in list(Tier):
        raise Invalid("reserved_tier", f"{value!r} is not one of {', '.join(Tier)}, {ALL_TIERS}")
    if not tokens_per_s:
        raise Invalid(
            "reserved_tier", f"nothing is reserved for {value!r}: give reserved_tokens_per_s above 0, too"
        )
    return Tier(value)


def tiers(default: Tier, values: Iterable[str] | None) -> frozenset[Tier]:
    """None: the default tier and those served after it, not the better ones."""
    if values is None:
        order = list(Tier)
        return frozenset(order[order.index(default) :])
    chosen = frozenset(choice("tiers", Tier, value) for value in values)
    if default not in chosen:
        raise Invalid("tiers", f"must hold the default tier {default.value!r}")
    return chosen


def scopes(values: Iterable[str]) -> frozenset[str]:
    chosen = frozenset(values)
    if not chosen or chosen - SCOPES:
        wrong = ", ".join(sorted(map(repr, chosen - SCOPES))) or "none"
        raise Invalid("scopes", f"{wrong} given; choose from {', '.join(sorted(SCOPES))}")
    return chosen


def networks(values: Iterable[str] | None) -> tuple[Network, ...]:
    """None: anywhere."""
    try:
        chosen = dict.fromkeys(network_of(value) for value in values or ())
    except ValueError as error:
        raise Invalid("allow_from", str(error)) from None
    if len(chosen) > MAX_NETWORKS:
        raise Invalid("allow_from", f"{len(chosen)} networks; the most is {MAX_NETWORKS}: name larger ones")
    return tuple(chosen)


def labels(before: Labels, wanted: Mapping[str, Iterable[str]]) -> Labels:
    """Each label that is `wanted` has these values, or is dropped where there are none; the others stay."""
    after = dict(before)
    for key, values in wanted.items():
        chosen = tuple(sorted({_label(value) for value in values}))
        if chosen:
            after[_label_key(key)] = chosen
        elif after.pop(key, None) is None:
            known = ", ".join(map(repr, before)) or "none"
            raise Invalid(
                "labels", f"{key[:MAX_LABEL_CHARS]!r} is not there to be dropped; there are: {known}"
            )
    for key, chosen in after.items():
        if len(chosen) > MAX_LABEL_VALUES:
            raise Invalid("labels", f"{key!r} has {len(chosen)} values; the most is {MAX_LABEL_VALUES}")
    if len(after) > MAX_LABELS:
        raise Invalid("labels", f"{len(after)} of them; the most is {MAX_LABELS}: drop one that is not used")
    return after


def _label_key(text: str) -> str:
    if "," in text or "=" in text:
        raise Invalid("labels", f"{text[:MAX_LABEL_CHARS]!r}: keys have no ',' and no '='")
    return _label(text)


def _label(text: str) -> str:
    if not 0 < len(text) <= MAX_LABEL_CHARS or not text.isprintable() or text != text.strip():
        raise Invalid(
            "labels",
            f"{text[:MAX_LABEL_CHARS]!r}: keys and values have 1 to {MAX_LABEL_CHARS} printable characters,"
            " without spaces around them",
        )
    return text


def expires_us(now_us: int, expires: int | None, expires_in_s: float | None) -> int | None:
    """An instant in microseconds, or so many seconds from now; None: no end."""
    if expires is None:
        return None if expires_in_s is None else now_us + round(expires_in_s * 1e6)
    if expires_in_s is not None:
        raise Invalid("expires", "say when the key ends once: give expires or expires_in_s")
    if not now_us + 1_000_000 <= expires <= now_us + MAX_EXPIRY_S * 1_000_000:
        raise Invalid("expires", f"must lie 1 second to {MAX_EXPIRY_S // 86_400} days ahead")
    return expires
