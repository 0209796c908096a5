"""Mutants of what is learned on the simulator, and the test that has to notice each."""

from __future__ import annotations

from tests.mutants.mutations import Broken, mutations_of

_BROKEN: list[Broken] = [
    (
        "ops/simulate/learn/judge.py",
        "a table wins by less than the seeds differ",
        "return self.gain > self.spread and self.gain > 0",
        "return self.gain > 0",
        "tests/unit/ops/simulate/learn/test_search.py::test_a_table_wins_only_by_more_than_the_seeds_differ",
    ),
    (
        "ops/simulate/learn/search.py",
        "a change is kept that the seeds do not agree on",
        "return gain > max(LEAST_GAIN, spread)",
        "return gain > LEAST_GAIN",
        "tests/unit/ops/simulate/learn/test_search.py::test_a_change_is_kept_only_beyond_the_spread_of_the_seeds",
    ),
    (
        "ops/simulate/learn/segments.py",
        "what is held out is learned from",
        "half = stretches.index(number // pieces_a_stretch) % 2",
        "half = number % 2",
        "tests/unit/ops/simulate/learn/test_segments.py::test_a_trace_of_days_is_held_out_by_the_hour",
    ),
    (
        "ops/simulate/learn/objective.py",
        "refusing a request improves the sum",
        "sum(not slo.met(records, row) for row in rows) / count",
        "sum(not slo.met(records, row) for row in rows if not records.refused[row]) / count",
        "tests/unit/ops/simulate/learn/test_objective.py",
    ),
    (
        "ops/cli/policy/policy_learn.py",
        "a table that does not win is written",
        "    if not outcome.wins:\n        notes.append",
        "    if out is not None:\n        _write(out, outcome.table.encode())\n    if not outcome.wins:\n"
        "        notes.append",
        "tests/unit/ops/cli/test_policy_learn.py"
        "::test_a_table_that_does_not_win_is_not_written_and_the_answer_says_so",
    ),
    (
        "ops/simulate/control/steering.py",
        "a table is in force outside of what it was fitted on",
        "rests = self._own_rests if self.switch.is_outside else actions.knobs()",
        "rests = self.switch.table.entries[-1].actions.knobs()",
        "tests/unit/ops/simulate/test_steering.py::test_outside_of_what_was_fitted_the_run_is_hybrids",
    ),
]
LEARN_MUTATIONS = mutations_of("learn", _BROKEN)
