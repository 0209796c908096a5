"""Knobs inside engines, each with its setter, all sent together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from msgspec.structs import replace

from engine.messages import EngineKnobs
from gateway.flow.knobs import Knob

SHARES = {Knob.TOKEN_BUDGET: "token_share", Knob.SLOTS: "slot_share"}
NUMBERS = {Knob.PARTIAL_PREFILLS: "partial_prefills", Knob.RESERVE_PERMILLE: "reserve_permille"}
ENGINE_KNOBS = frozenset({*SHARES, *NUMBERS})


def engine_setters(
    send: Callable[[EngineKnobs], None], own: Callable[[], Mapping[Knob, float]] = dict
) -> Mapping[Knob, Callable[[float], None]]:
    """Setters of the knobs of all engines of a pool, or of a simulated one. `own`: the policy's numbers; at
    these an engine uses its policy's option."""
    stand = EngineKnobs()

    def turn(name: str, value: float | None) -> None:
        nonlocal stand
        stand = replace(stand, **{name: value})
        send(stand)

    def number(knob: Knob, value: float) -> None:
        turn(NUMBERS[knob], None if value == own().get(knob) else round(value))

    return {
        **{knob: partial(turn, name) for knob, name in SHARES.items()},
        **{knob: partial(number, knob) for knob in NUMBERS},
    }
