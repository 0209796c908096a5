"""Commands of admin acts, one struct each: shared by HTTP body, command line and method.

Types only; the acts check ranges and rules between fields. None: not given."""

from __future__ import annotations

from typing import Annotated

import msgspec

from tenants.fields import Field
from tenants.types import Tier

BRAKED_TIERS = (Tier.STANDARD, Tier.BATCH)


class BrakeSet(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`PUT /admin/v1/brake`."""

    tier: Annotated[str, Field(choices=BRAKED_TIERS)]
    share: Annotated[
        float,
        Field(
            "Of places, KV cache and step tokens, such as 10 % (or 0.1).", "Share of each engine", hundred=1
        ),
    ]
    for_s: Annotated[float, Field("Such as 30m or 2h; at most 24h.", "For", is_duration=True)]
    """A brake ends by itself."""
    reason: Annotated[str, Field("Shown beside the brake and in the audit; may be empty.")] = ""


class BrakeEnd(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`DELETE /admin/v1/brake?tier={tier}`."""

    tier: str


class ReplicaDrain(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /admin/v1/upstreams/{replica}/drain`."""

    reason: str = ""


class LedgerAdjust(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /admin/v1/ledger/adjust`."""

    request_id: str
    reason: str
