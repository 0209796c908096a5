"""Small learned tables made by hand, for tests of what looks them up."""

from __future__ import annotations

from gateway.flow.learned.actions import HYBRID, Actions
from gateway.flow.learned.macro_state import Borders, SeenRange
from gateway.flow.learned.table_file import FORMAT, VERSION, Judged, LearnedTable, TableEntry

STRICT_SLOTS = Actions(slots=0.5, token_budget=0.5, long_share=0.3, ageing=0.5, reserve_permille=250)
"""Something that `hybrid` does not do."""


def learned_table(
    by_state: dict[int, Actions] | None = None,
    *,
    model: str = "tiny",
    machine: str = "",
    fitted: SeenRange | None = None,
    borders: Borders | None = None,
    judged: Judged | None = None,
) -> LearnedTable:
    """A table with these actions, all other macro-states never seen. Without any: hybrid's while nothing
    waits, and `STRICT_SLOTS` in every queue."""
    chosen = by_state or {**dict.fromkeys(range(4), HYBRID), **dict.fromkeys(range(4, 12), STRICT_SLOTS)}
    return LearnedTable(
        format=FORMAT,
        version=VERSION,
        model=model,
        machine=machine,
        trace="by hand",
        seed=1,
        simulated_requests=0,
        borders=borders or Borders(),
        fitted=fitted or SeenRange(queued_per_place=8.0, kv_share=0.95, trend=6.0),
        entries=[TableEntry(state, actions, 1 / len(chosen)) for state, actions in chosen.items()],
        judged=judged,
    )
