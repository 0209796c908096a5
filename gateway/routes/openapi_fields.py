"""Ranges, forms and enumerations of the OpenAPI document, from the constants that check them.

A field's name means the same in every body unless the body is named before it, a parameter's in every route
unless the route says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from gateway.domain.tiers import SERVICE_TIERS
from gateway.requests.inputs import media
from gateway.requests.parse import LEFT_OUT_PARTS, MAX_METADATA, ROLES
from gateway.requests.schemas import RANGES, Range
from gateway.requests.vectors import calls
from tenants.admin.commands import BRAKED_TIERS
from tenants.admin.cursor import CURSOR, DEFAULT_PAGE, MAX_PAGE
from tenants.admin.platform.brakes import MAX_BRAKE_S
from tenants.counts import refusal_store
from tenants.fields import fields_of
from tenants.nouns import checks
from tenants.nouns.key import KeyChange
from tenants.nouns.tenant import TenantChange
from tenants.resources.query import MOST, Filter, Kind, ListQuery, filters_of
from tenants.types import MAX_END_USER_CHARS, Tier


def between(lowest: float, highest: float | None = None) -> dict[str, Any]:
    """Both included."""
    return {"minimum": lowest} | ({} if highest is None else {"maximum": highest})


def one_of(values: Iterable[str]) -> dict[str, Any]:
    return {"enum": list(values)}


def form(pattern: re.Pattern[str], most: int | None = None) -> dict[str, Any]:
    """A text that matches as a whole; `most`: characters."""
    return {"pattern": f"^({pattern.pattern})$"} | ({} if most is None else {"maxLength": most})


def text(most: int) -> dict[str, Any]:
    """1 to `most` printable characters; a pattern can only say that none of them is a control."""
    return {"minLength": 1} | form(_UNCONTROLLED, most)


def groups(known: Iterable[str], *, some: bool = False) -> dict[str, Any]:
    """Words with commas between them; or none, unless `some`."""
    word = "|".join(known)
    return form(re.compile(f"({word})(,({word}))*" if some else f"(({word})(,({word}))*)?"))


def _range(bounds: Range) -> dict[str, Any]:
    if bounds.is_above:
        return {"exclusiveMinimum": bounds.lowest, "maximum": bounds.highest}
    return between(bounds.lowest, bounds.highest)


_UNCONTROLLED = re.compile(r"[^\x00-\x1f\x7f-\x9f]+")
_NOT_BLANK = {"pattern": r"\S"}
_REASON = {"maxLength": checks.MAX_REASON_CHARS}
_INSTANT = {"format": "date-time"}
PARAMETERS: dict[str, dict[str, Any]] = {
    "cursor": form(CURSOR),
    "since": _INSTANT,
    "tier": one_of(Tier),
    **dict.fromkeys(("tenant", "project", "key"), text(MOST[Kind.TENANT])),
    "model": text(checks.MAX_MODEL_CHARS),
    "request_id": text(refusal_store.MAX_ID_CHARACTERS),
    "replica": text(Filter().most),
    "end_user": {"maxLength": MAX_END_USER_CHARS},
}
FIELDS: dict[str, dict[str, Any]] = {name: _range(bounds) for name, bounds in RANGES.items()} | {
    "logit_bias": {"additionalProperties": {"type": "number"} | _range(RANGES["logit_bias"])},
    "max_tokens": between(1),
    "max_completion_tokens": between(1),
    "n": between(1),
    "seed": between(-(2**63), 2**63 - 1),
    "metadata": {"maxProperties": MAX_METADATA},
    "service_tier": one_of(SERVICE_TIERS),
    "role": one_of(sorted(ROLES)),
    "user": {"maxLength": MAX_END_USER_CHARS},
    "safety_identifier": {"maxLength": MAX_END_USER_CHARS},
    "ContentPart.type": one_of(["text", *media.TYPES, *LEFT_OUT_PARTS]),
    "MediaUrl.detail": one_of(media.DETAILS),
    "ChatCompletionRequest.messages": {"minItems": 1},
    "CompletionRequest.prompt": {"minLength": 1, "minItems": 1},
    "encoding_format": one_of(calls.ENCODINGS),
    "dimensions": between(1, calls.MAX_DIMENSIONS),
    "top_n": between(1),
    "EmbeddingRequest.truncate_prompt_tokens": between(-1),
    "RerankRequest.truncate_prompt_tokens": between(-1),
    **dict.fromkeys(("ConfigTenant.name", "ConfigProject.name", "ConfigKey.name"), form(checks.NAME)),
    **dict.fromkeys(
        ("PriceSet.model", "ConfigPrice.model"),
        _NOT_BLANK | {"maxLength": checks.MAX_MODEL_CHARS},
    ),
    "reason": _REASON,
    "LedgerAdjust.reason": _REASON | _NOT_BLANK,
    "tier": one_of(Tier),
    **{f"ConfigTenant.{one.name}": one.json_schema for one in fields_of(TenantChange)},
    **{f"ConfigKey.{one.name}": one.json_schema for one in fields_of(KeyChange) if one.kind is list},
    "BrakeSet.tier": one_of(BRAKED_TIERS),
    "BrakeSet.for_s": between(1, MAX_BRAKE_S),
    "share": {"exclusiveMinimum": 0, "maximum": 1},
}


def query_parameters(query: type[ListQuery], *, is_own: bool, is_whole: bool) -> list[dict[str, Any]]:
    """The parameters of a list: its filters, but for the tenant of a tenant's own list, and its pages, but
    for those of a file."""
    schemas = {
        one.name: _of_filter(one.filter) | ({"default": one.default} if one.default else {})
        for one in filters_of(query)
        if not (is_own and one.filter.kind is Kind.TENANT)
    }
    if not is_whole:
        schemas["cursor"] = {"type": "string"} | PARAMETERS["cursor"]
        schemas["limit"] = {"type": "integer", "default": DEFAULT_PAGE} | between(1, MAX_PAGE)
    words = {one.name: one.filter.help for one in filters_of(query) if one.filter.help}
    return [
        {"name": name, "in": "query", "required": False, "schema": schema}
        | ({"description": words[name]} if name in words else {})
        for name, schema in schemas.items()
    ]


def _of_filter(one: Filter) -> dict[str, Any]:
    match one.kind:
        case Kind.FLAG:
            return {"type": "boolean"}
        case Kind.CHOICE:
            return {"type": "string"} | one_of(one.choices)
        case Kind.WORDS:
            return {"type": "string"} | groups(one.choices)
        case Kind.SINCE | Kind.UNTIL:
            return {"type": "string"} | _INSTANT
        case _:
            return {"type": "string"} | (text(one.most) if one.schema is None else dict(one.schema))


def annotate(schemas: dict[str, Any], structs: Iterable[type[msgspec.Struct]]) -> None:
    """Completes bodies by what their fields declare."""
    for struct in structs:
        for one in fields_of(struct):
            narrow(schemas[struct.__name__]["properties"][one.name], one.json_schema)


def complete(schemas: dict[str, Any]) -> None:
    for struct, schema in schemas.items():
        for name, field in schema.get("properties", {}).items():
            known = FIELDS.get(f"{struct}.{name}", FIELDS.get(name))
            if known is not None:
                narrow(field, known)


def narrow(field: dict[str, Any], known: dict[str, Any]) -> None:
    """Adds `known` to a field's schema; if it may be null, to the other kind."""
    kinds = [kind for kind in field.get("anyOf", [field]) if kind.get("type") != "null"]
    for kind in kinds:
        kind.update(known)
