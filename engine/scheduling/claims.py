"""Promises that a scheduling choice can make: each names in `claims` those that it keeps.

The contract and property suites hold it to them. A policy keeps what all four of its choices claim.
"""

from __future__ import annotations

WORK_CONSERVATION = "work_conservation"
"""If something may run and fits, something runs. An operator's brake on a tier is excepted."""
NO_STARVATION = "no_starvation"
"""Every entry gets its turn, under an endless stream of shorter, cached or higher-ranked ones of its tier."""
FAIRNESS_BOUND = "fairness_bound"
"""Backlogged tenants of one tier differ in service per weight by at most 2U / min(weight)."""
EXACTNESS = "exactness"
"""The tokens of an answer do not depend on what else ran."""
BLOCK_CONSERVATION = "block_conservation"
"""No KV block leaks, none is shared by mistake."""
PROGRESS = "progress"
"""Preemptions of one sequence are bounded; work that exists advances."""

SAFE = frozenset({EXACTNESS, BLOCK_CONSERVATION, PROGRESS})
"""What every choice must keep."""
ALL = SAFE | {WORK_CONSERVATION, NO_STARVATION, FAIRNESS_BOUND}
