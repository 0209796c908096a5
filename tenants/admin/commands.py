"""Commands of admin acts, one struct each: shared by HTTP body, command line and method.

Types only; the acts check ranges and rules between fields. None: not given."""

from __future__ import annotations

import msgspec


class BrakeSet(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`PUT /admin/v1/brake`."""

    tier: str
    share: float
    """Of places, KV cache and step tokens, above 0 and at most 1."""
    for_s: float
    """A brake ends by itself."""
    reason: str = ""


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
