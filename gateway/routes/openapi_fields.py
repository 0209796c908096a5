"""Ranges and enumerations of the OpenAPI document, from the constants that check them.

A field's name means the same in every body unless the body is named before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gateway.domain.tiers import SERVICE_TIERS
from gateway.requests.inputs import media
from gateway.requests.parse import LEFT_OUT_PARTS, MAX_METADATA, ROLES
from gateway.requests.schemas import RANGES, Range
from gateway.requests.vectors import calls
from tenants.admin import validation
from tenants.admin.brakes import MAX_BRAKE_S
from tenants.admin.slos import MAX_TARGET_S, MIN_TARGET_S
from tenants.outbox.address import MAX_URL_CHARS
from tenants.outbox.kinds import SUBJECTS
from tenants.people.roles import Role
from tenants.slo.slo import METRICS
from tenants.types import MAX_END_USER_CHARS, SCOPES, LimitMode, Meter, OnLowBudget, Tier, Window


def between(lowest: float, highest: float | None = None) -> dict[str, Any]:
    """Both included."""
    return {"minimum": lowest} | ({} if highest is None else {"maximum": highest})


def one_of(values: Iterable[str]) -> dict[str, Any]:
    return {"enum": list(values)}


def _range(bounds: Range) -> dict[str, Any]:
    if bounds.is_above:
        return {"exclusiveMinimum": bounds.lowest, "maximum": bounds.highest}
    return between(bounds.lowest, bounds.highest)


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
    "encoding_format": one_of(calls.ENCODINGS),
    "dimensions": between(1, calls.MAX_DIMENSIONS),
    "top_n": between(1),
    "EmbeddingRequest.truncate_prompt_tokens": between(-1),
    "RerankRequest.truncate_prompt_tokens": between(-1),
    "weight": between(validation.MIN_WEIGHT, validation.MAX_WEIGHT),
    "tier": one_of(Tier),
    "tiers": {"items": {"type": "string"} | one_of(Tier)},
    "scopes": {"items": {"type": "string"} | one_of(sorted(SCOPES))},
    "on_low_budget": one_of(OnLowBudget),
    "reserved_tokens_per_s": between(0, validation.MAX_RESERVED_TOKENS_PER_S),
    "reserved_tier": one_of([*Tier, validation.ALL_TIERS]),
    "meter": one_of(Meter),
    "window": one_of(Window),
    "mode": one_of(LimitMode),
    "amount": between(0, validation.MAX_AMOUNT),
    "above_tokens": between(0, validation.MAX_ABOVE_TOKENS),
    "expires_in_s": {"exclusiveMinimum": 0, "maximum": validation.MAX_EXPIRY_S},
    "grace_s": between(0, validation.MAX_GRACE_S),
    "LimitOverride.for_s": {"exclusiveMinimum": 0, "maximum": validation.MAX_OVERRIDE_S},
    "BrakeSet.for_s": between(1, MAX_BRAKE_S),
    "share": {"exclusiveMinimum": 0, "maximum": 1},
    "PersonInvite.role": one_of(Role),
    "PersonChange.role": one_of(Role),
    "subjects": {"items": {"type": "string"} | one_of(SUBJECTS)},
    "WebhookAdd.url": {"maxLength": MAX_URL_CHARS},
    "DeliveryAgain.seq": between(1, 2**63 - 1),
    "metric": one_of(METRICS),
    "target_s": between(MIN_TARGET_S, MAX_TARGET_S),
}


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
