"""What the benchmark of the committed learned table serves."""

from __future__ import annotations

from gateway.flow.learned.actions import ACTION_BOUNDS
from ops.bench.policies.learned import JUDGED_TRACES, MACHINE, SETUP, is_one_vector, one_vector, table


def test_the_committed_table_is_for_the_machine_that_serves_and_won_on_what_was_held_out() -> None:
    found = table()
    assert (found.model, found.machine) == (SETUP.model, MACHINE.name)
    assert found.judged is not None
    assert found.judged.hybrid - found.judged.learned > found.judged.spread
    for entry in found.entries:
        for name, bounds in ACTION_BOUNDS.items():
            assert bounds.lowest <= getattr(entry.actions, name) <= bounds.highest


def test_of_its_own_trace_only_what_was_held_out_is_served() -> None:
    own, *others = JUDGED_TRACES
    [piece] = own.pieces()
    assert piece.name.startswith(f"{table().trace} from ")
    assert piece.number % 2 == 1, "every other stretch was learned from, the first one too"
    assert own.is_own
    assert not any(each.is_own for each in others)
    assert all(sum(map(len, each.pieces())) >= 850 for each in JUDGED_TRACES)


def test_one_vector_is_said_in_every_state() -> None:
    actions = {entry.actions for entry in one_vector().entries}
    assert len(actions) == 1
    assert actions <= {entry.actions for entry in table().entries}
    assert is_one_vector() == (actions == {entry.actions for entry in table().entries})
