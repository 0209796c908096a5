"""Mutants of the moves of control loops: how they are kept, and what they were worth."""

from __future__ import annotations

from tests.mutants.mutations import Broken, mutations_of

RECORDER = "gateway/records/move_recorder.py"
KEPT = "tests/integration/test_control_moves.py"
IN_ORDER = f"{KEPT}::test_moves_are_kept_in_their_order_with_their_reasons"
WORTH = "tests/unit/ops/simulate/worth/test_worth.py"

_BROKEN: list[Broken] = [
    (
        "gateway/flow/control_rules.py",
        "one needs no reason",
        "        if not self.reason:\n",
        "        if False:\n",
        f"{KEPT}::test_there_is_no_move_without_its_reason",
    ),
    (
        RECORDER,
        "the reason is not kept",
        "move.reason[:MAX_REASON_CHARACTERS]",
        '""',
        IN_ORDER,
    ),
    (
        RECORDER,
        "an advised one is kept as made",
        "                    move.is_made,\n",
        "                    True,\n",
        IN_ORDER,
    ),
    (
        RECORDER,
        "the newest is dropped",
        "            self._waiting.popleft()\n            self._dropped.inc()",
        "            self._waiting.pop()\n            self._dropped.inc()",
        f"{KEPT}::test_what_cannot_be_written_waits_and_the_oldest_give_way",
    ),
    (
        "tenants/moves/store.py",
        "they are kept for ever",
        "control_moves.c.at_us < round((now_s - KEPT_S) * 1e6)",
        "control_moves.c.at_us < 0",
        f"{KEPT}::test_old_ones_and_too_many_are_purged",
    ),
    (
        "ops/simulate/worth/paths.py",
        "a replay without one has it",
        "    held = real | {knob: move.before}",
        "    held = dict(real)",
        f"{WORTH}::test_a_move_that_lets_more_run_at_once_is_worth_it",
    ),
    (
        "ops/simulate/worth/verdict.py",
        "the simulator's error is none",
        "        if apart(before_s, after_s) > error_s:",
        "        if apart(before_s, after_s) > 0:",
        f"{WORTH}::test_the_first_figure_that_differs_by_more_than_the_error_decides",
    ),
    (
        "ops/simulate/worth/replay.py",
        "a knob that is not simulated is worth nothing",
        '        raise CannotReplay(f"a replay does not show',
        '        str(f"a replay does not show',
        f"{WORTH}::test_too_little_traffic_and_knobs_that_no_replay_shows_are_said",
    ),
    (
        "ops/simulate/recorded.py",
        "what was refused was served",
        "        if served.is_refused:\n",
        "        if False:\n",
        f"{WORTH}::test_refused_requests_come_evenly_and_are_like_those_of_their_tenant",
    ),
]
MOVE_MUTATIONS = mutations_of("moves", _BROKEN)
