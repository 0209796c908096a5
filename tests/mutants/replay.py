"""Mutants of replays of recorded traffic, and the test that has to notice each."""

from __future__ import annotations

from tests.mutants.mutations import Broken, mutations_of

WHATIF = "tests/integration/test_whatif.py"

_BROKEN: list[Broken] = [
    (
        "ops/simulate/figures/stated_error.py",
        "a request has a part in its own simulated times",
        "for row, each in residuals.items() if row not in own)",
        "for each in residuals.values())",
        "tests/unit/ops/simulate/test_stated_error.py",
    ),
    (
        "ops/simulate/figures/stated_error.py",
        "what never ends in its simulation is left out",
        "        rows = list(real.done())\n",
        "        rows = list(residuals)\n",
        WHATIF,
    ),
    (
        "ops/simulate/origin.py",
        "several servers are replayed as one",
        "    if len(set(common.values())) > 1:\n",
        "    if False:\n",
        WHATIF,
    ),
    (
        "tenants/ledger/timelines.py",
        "a description goes before the timelines that refer to it",
        "case((newer > descriptions.c.used_us, newer), else_=descriptions.c.used_us)",
        "descriptions.c.used_us",
        "tests/integration/test_slo_store.py",
    ),
    (
        "ops/simulate/budget.py",
        "a simulated answer is charged nothing",
        "held.sizes(output_tokens, held.cached_tokens)",
        "held.sizes(0)",
        "tests/unit/ops/simulate/test_budget.py",
    ),
    (
        "ops/simulate/changed_terms.py",
        "weights in place of those that served are named and not simulated",
        "weights.get(answer.tenant, terms.weight)",
        "terms.weight",
        "tests/unit/ops/simulate/test_changed_terms.py",
    ),
    (
        "ops/simulate/changed_terms.py",
        "limits of a file are added to those that count the same",
        "for limit in terms.limits if _name(limit) not in names]",
        "for limit in terms.limits]",
        WHATIF,
    ),
]

REPLAY_MUTATIONS = mutations_of("replay", _BROKEN)
