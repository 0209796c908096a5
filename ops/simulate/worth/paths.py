"""Where the knobs stood around a move, and where they would have stood without it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gateway.flow.control_rules import Knob
from tenants.moves.move import StoredMove


@dataclass(frozen=True, slots=True)
class KnobChange:
    """A knob that is turned."""

    at_us: int
    """Microseconds since 1970."""
    knob: Knob
    value: float


@dataclass(frozen=True, slots=True)
class KnobPath:
    """Where all knobs stand during a replay."""

    start: Mapping[Knob, float]
    changes: tuple[KnobChange, ...] = ()
    """In the order of their instants."""


@dataclass(frozen=True, slots=True)
class MovePaths:
    """The three replays of one move."""

    as_it_was: KnobPath
    """With every move that was made meanwhile."""
    without: KnobPath
    """All knobs as before the move, to the end."""
    with_it: KnobPath
    """The same until the move; from then on with it."""


def paths_of(move: StoredMove, moves: Iterable[StoredMove], since_us: int, until_us: int) -> MovePaths:
    """Of a move; `moves` are those of its model and gateway between the two instants, in any order.

    An advised move is taken as if it had been made, and it alone: the other knobs stand where they really
    stood. Of several moves at one instant each is undone by itself.
    """
    knob, real = Knob(move.knob), known(move.knobs)
    held = real | {knob: move.before}
    made = sorted(
        (each for each in moves if each.is_made and since_us <= each.at_us < until_us),
        key=lambda each: (each.at_us, each.move_id),
    )
    start = dict(real)
    for each in reversed([each for each in made if each.at_us <= move.at_us]):
        start |= known({each.knob: each.before})
    changes = tuple(
        KnobChange(each.at_us, knob_of_it, value)
        for each in made
        for knob_of_it, value in known({each.knob: each.after}).items()
    )
    return MovePaths(
        KnobPath(start, changes),
        KnobPath(held),
        KnobPath(held, (KnobChange(move.at_us, knob, move.after),)),
    )


def known(knobs: Mapping[str, float]) -> dict[Knob, float]:
    """The knobs that this version knows: what another one wrote may name more."""
    names = {knob.value for knob in Knob}
    return {Knob(name): value for name, value in knobs.items() if name in names}
