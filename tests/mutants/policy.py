"""Mutants of the policy in force and of its options, and the test that has to notice each."""

from __future__ import annotations

from tests.mutants.mutations import Broken, mutations_of

IN_FORCE = "gateway/cluster/policy_in_force.py"
TESTS = "tests/integration/test_policy_in_force.py"
SETTINGS = "tests/unit/ops/settings/test_policy_settings.py"

_BROKEN: list[Broken] = [
    (
        IN_FORCE,
        "the settings go before what is stored",
        "wanted = stored or self.settings",
        "wanted = self.settings",
        TESTS,
    ),
    (
        IN_FORCE,
        "what another gateway stores is not followed",
        "if revision == self._seen_revision:",
        "if revision >= self._seen_revision:",
        TESTS,
    ),
    (IN_FORCE, "what an engine refuses is stored", "if refused:\n", "if not refused and refused:\n", TESTS),
    (
        IN_FORCE,
        "an engine keeps what another one refused",
        "            await self._tell(before)\n            raise\n",
        "            raise\n",
        TESTS,
    ),
    (
        "engine/core/core.py",
        "a policy that does not go with the sizes is applied",
        "self.config = dataclasses.replace(self.config, policy=name, policy_options=kept)",
        "pass",
        "tests/unit/engine/core/test_core.py",
    ),
    (
        "ops/settings/policy.py",
        "a template goes before what was set",
        'if f"policy.{name}" not in given',
        "if name",
        SETTINGS,
    ),
    (
        "engine/scheduling/options.py",
        "an option has no upper bound",
        "value is not None and not option.least <= value <= option.most:",
        "value is not None and not option.least <= value:",
        "tests/unit/engine/scheduling/test_policy.py",
    ),
]

POLICY_MUTATIONS = mutations_of("policy", _BROKEN)
