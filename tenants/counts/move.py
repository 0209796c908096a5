"""A move of a control loop's knob, as stored. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from tenants.directory.records import from_us

MAX_MODEL_CHARACTERS = 256
MAX_KNOB_CHARACTERS = 32
MAX_REASON_CHARACTERS = 200


class StoredMove(msgspec.Struct, frozen=True):
    """One knob, moved or advised to."""

    move_id: str
    """Sorts by the order in which one gateway moved."""
    at_us: int
    """Microseconds since 1970."""
    gateway_id: str
    model: str
    knob: str
    before: float
    after: float
    reason: str
    is_made: bool
    """False: only advised."""
    mode: str
    """Of the control loop then."""
    knobs: dict[str, float]
    """All knobs of this model right after the observation that led to this move."""

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.move_id,
            "object": "control_move",
            "at": from_us(self.at_us).isoformat(),
            "gateway_id": self.gateway_id,
            "model": self.model,
            "knob": self.knob,
            "before": self.before,
            "after": self.after,
            "reason": self.reason,
            "is_made": self.is_made,
            "mode": self.mode,
            "knobs": self.knobs,
        }
