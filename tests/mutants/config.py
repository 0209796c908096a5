"""Mutants of configuration files, and the test that has to notice each."""

from __future__ import annotations

from tests.mutants.mutations import Broken, mutations_of

APPLIED = "tests/integration/test_config_file.py"
PLAN = "tests/unit/tenants/config_file/test_plan.py"
READER = "tests/unit/tenants/config_file/test_yaml_reader.py"

_BROKEN: list[Broken] = [
    (
        "tenants/admin/transaction.py",
        "a plan is applied at any state",
        "if at_revision not in (None, revision - 1):",
        "if False:",
        f"{APPLIED}::test_of_two_applies_at_once_one_wins",
    ),
    (
        "tenants/admin/transaction.py",
        "a dry run is not undone",
        "rehearsal if is_rehearsal else transaction",
        "transaction",
        f"{APPLIED}::test_the_audit_has_what_the_plan_said",
    ),
    (
        "tenants/config_file/config_file.py",
        "a limit on a new key is looked for by the key's name",
        "if key_made is not None:",
        "if False:",
        f"{APPLIED}::test_a_file_is_applied_once_and_then_there_is_nothing_to_do",
    ),
    (
        "tenants/config_file/plan_keys.py",
        "any key of a name is the one that is meant",
        "if len(found) > 1:",
        "if False:",
        f"{APPLIED}::test_keys_that_a_file_cannot_name_are_left_out_and_said",
    ),
    (
        "tenants/config_file/plan_keys.py",
        "a key's own default tier outlives its tiers",
        "        old = stored  # ",
        "        pass  # ",
        f"{PLAN}::test_a_key_that_is_there_is_changed",
    ),
    (
        "tenants/admin/drafts.py",
        "a key is changed to models beyond its tenant's",
        'check_models(owner, new.get("models"))',
        "check_models(owner, None)",
        "tests/integration/test_admin.py::test_what_a_key_may_do_is_changed_within_its_tenants",
    ),
    (
        "tenants/config_file/plan_tenants.py",
        "a tier that stays sets the tiers anew",
        "if wanted.tier is not None and wanted.tiers is None and wanted.tier == before.default_tier:",
        "if False:",
        f"{PLAN}::test_a_tier_that_is_as_it_should_be_leaves_the_tiers_alone",
    ),
    (
        "tenants/config_file/yaml_reader.py",
        "the last of two equal keys counts",
        "        if key in mapping:",
        "        if False:",
        READER,
    ),
    (
        "tenants/config_file/yaml_reader.py",
        "anchors and aliases are followed",
        'if kind == "AliasEvent" or event.anchor is not None:',
        'if kind == "AliasEvent":',
        READER,
    ),
]

CONFIG_MUTATIONS = mutations_of("config", _BROKEN)
