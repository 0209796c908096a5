"""Actions of a learned policy: one vector of scheduling knobs for a macro-state."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, structs

from gateway.flow.deadline_check import STRICT
from gateway.flow.knobs import DEFAULT_BOUNDS, Knob


class Actions(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=False):
    """Where knobs rest in a macro-state; defaults as `hybrid`. Out of bounds: `msgspec.ValidationError`."""

    slots: Annotated[float, Meta(ge=0.25, le=1)] = 1.0
    """Share of an engine's sequences that a step gives decode tokens to; 1: all that its tokens allow."""
    token_budget: Annotated[float, Meta(ge=0.25, le=1)] = 1.0
    """Share of a step's tokens."""
    partial_prefills: Annotated[int, Meta(ge=1, le=16)] = 4
    """Prompts of a tenant that may be unfinished."""
    long_share: Annotated[float, Meta(ge=0.1, le=1)] = 0.5
    """Share of an engine that the long lane may hold."""
    admission: Annotated[float, Meta(ge=0, le=STRICT)] = 0.0
    """Strictness towards targets; 0: none refuses a request."""
    reserve_permille: Annotated[int, Meta(ge=0, le=1000)] = 500
    """Thousandths of the predicted remaining output for which memory is set aside."""
    ageing: Annotated[float, Meta(ge=0.25, le=1)] = 1.0
    """Factor on the times after which requests move up a tier."""

    def knobs(self) -> dict[Knob, float]:
        return {Knob(name): float(value) for name, value in structs.asdict(self).items()}


HYBRID = Actions()
"""Used outside of what a table was fitted on."""
ACTION_BOUNDS = {name: DEFAULT_BOUNDS[Knob(name)] for name in Actions.__struct_fields__}
