"""Mutants of brakes, and the test that has to notice each."""

from __future__ import annotations

from tests.mutants.mutations import Broken, mutations_of

POOL = "tests/property/test_flow_brakes.py"
ENGINE = "tests/unit/engine/core/test_brakes.py"
IN_FORCE = "tests/integration/test_brakes_in_force.py"

_BROKEN: list[Broken] = [
    (
        "gateway/flow/placement.py",
        "a braked tier is sent more than its share",
        "        if rank in self.brakes.shares:\n",
        "        if rank not in self.brakes.shares:\n",
        POOL,
    ),
    (
        "gateway/flow/controller.py",
        "a braked tier evades its brake by ageing",
        "math.inf if tier in braked else",
        "math.inf if not tier and tier in braked else",
        POOL,
    ),
    (
        "engine/scheduling/room.py",
        "a braked tier takes the whole step",
        "return min(self.tokens, self.tier_tokens.get(tier, self.tokens))",
        "return self.tokens",
        ENGINE,
    ),
    (
        "engine/core/scheduler.py",
        "a braked tier holds up the tiers below",
        "                self._braked.add(entry.tier)\n                continue\n            rank",
        "                return\n            rank",
        ENGINE,
    ),
    (
        "gateway/flow/shared/lua/6_placement.lua",
        "a shared queue knows no brake",
        "return share == 1 or sequences == 0\n",
        "return share <= 1 or sequences == 0\n",
        "tests/property/test_flow_shared.py",
    ),
    (
        "gateway/cluster/brakes_in_force.py",
        "a brake outlasts its time",
        "for each in self._stored if not each.is_over(now_us)",
        "for each in self._stored if now_us",
        IN_FORCE,
    ),
    (
        "tenants/admin/brakes.py",
        "every gateway writes the end",
        "        if before is None or not before.is_over(now_us):\n",
        "        if before is None:\n            return Change(None, _target(tier), None)\n"
        "        if not before.is_over(now_us):\n",
        IN_FORCE,
    ),
]

BRAKE_MUTATIONS = mutations_of("brakes", _BROKEN)
