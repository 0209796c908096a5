"""What a plan refuses, with the place, and what it leaves alone."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from tenants.admin.platform.policy import StoredPolicy
from tenants.config_file import plan as planning
from tenants.config_file.base import ConfigInvalid
from tenants.config_file.export import as_yaml, exported
from tenants.config_file.plan import PlanTerms, make_plan
from tenants.config_file.state import ConfigState, TenantState
from tenants.config_file.steps import ConfigPlan
from tenants.config_file.yaml_reader import read_file
from tenants.instants import from_us
from tenants.nouns.key import ApiKey, KeyChange
from tenants.nouns.project import Project
from tenants.nouns.tenant import TenantCreate, new_tenant
from tenants.pricing.pricing import DEFAULT_MULTIPLIERS, Price, PriceBook, PriceEntry, TokenWeights
from tenants.resources.all import RESOURCES
from tenants.types import Tier
from tests.support.config_files import FULL


def checked(wanted: StoredPolicy) -> StoredPolicy:
    if wanted.name not in ("hybrid", "vtc"):
        raise ValueError(f"there is no policy {wanted.name!r}")
    return wanted


LATER = "2024-01-01T00:00:00+00:00"
TERMS = PlanTerms(DEFAULT_MULTIPLIERS, StoredPolicy("hybrid"), checked)
EMPTY = ConfigState(1, 1_700_000_000_000_000)


def key(name: str, **fields: object) -> ApiKey:
    scopes = frozenset({"inference"})
    made = ApiKey(
        key_id=f"key_{name}",
        tenant_id="ten_a",
        project_id="prj_a",
        name=name,
        scopes=scopes,
        created_at=from_us(0),
    )
    return replace(made, **fields)  # type: ignore[arg-type]


def with_acme(*keys: ApiKey) -> ConfigState:
    tenant = new_tenant(TenantCreate(name="acme"))
    projects = {"default": Project("prj_a", "ten_a", "default", "active", from_us(0))}
    return replace(EMPTY, tenants={"acme": TenantState(tenant, projects, list(keys))})


def plan(text: str, state: ConfigState = EMPTY) -> ConfigPlan:
    return make_plan(state, read_file(text.encode()).wanted, TERMS)


ACME = "version: 1\ntenants:\n- name: acme\n"


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (f"{ACME}  weight: 0\n", 4, "weight: must lie between"),
        (f"{ACME}  tier: batch\n  tiers: [standard]\n", 5, "must hold the default tier"),
        (f"{ACME}  models: []\n", 4, "models: name 1 to 100 models"),
        (f"{ACME}  reserved_tier: batch\n", 4, "nothing is reserved"),
        (f"{ACME}  labels: {{' x': [a]}}\n", 4, "printable"),
        (f"{ACME}  state: absent\n", 4, "`status: suspended`"),
        (f"{ACME}- name: acme\n", 4, "tenant 'acme' stands at tenants[0] already"),
        ("version: 1\ntenants: [{name: 'a b'}]\n", 2, "name: use 1 to 64 letters"),
        (f"{ACME}  projects: [{{name: web}}, {{name: web}}]\n", 4, "project 'web' stands at"),
        (f"{ACME}  projects:\n  - {{name: web, state: absent}}\n", 5, "`status: suspended`"),
        (f"{ACME}  keys:\n  - {{name: a, project: web}}\n", 5, "no project 'web'"),
        (f"{ACME}  keys:\n  - {{name: a}}\n  - {{name: a}}\n", 6, "key 'a' stands at"),
        (f"{ACME}  keys:\n  - {{name: a, scopes: [all]}}\n", 5, "scopes"),
        (f"{ACME}  keys:\n  - {{name: a, tiers: [interactive]}}\n", 5, "must lie within the tenant's"),
        (f"{ACME}  keys:\n  - {{name: a, allow_from: [x]}}\n", 5, "allow_from"),
        (f"{ACME}  keys:\n  - {{name: a, expires: tomorrow}}\n", 5, "not an instant"),
        (f"{ACME}  keys:\n  - {{name: a, expires: '2999-01-01T00:00:00Z'}}\n", 5, "days ahead"),
        (f"{ACME}  limits:\n  - {{meter: requests, window: day}}\n", 5, "amount: is missing"),
        (f"{ACME}  limits:\n  - {{meter: requests, amount: 1}}\n", 5, "give a window"),
        (f"{ACME}  limits:\n  - {{meter: pears, amount: 1, window: day}}\n", 5, "'pears' is not one of"),
        (f"{ACME}  limits:\n  - {{meter: requests, amount: -1, window: day}}\n", 5, "amount: must lie"),
        (f"{ACME}  limits:\n  - {{meter: requests, amount: 0, rate_per_s: 1}}\n", 5, ".amount: must lie"),
        (f"{ACME}  limits:\n  - {{meter: requests, amount: 1, window: day, key: a}}\n", 5, "no key 'a'"),
        (f"{ACME}  limits:\n  - {{meter: requests, amount: 1, window: day, project: b}}\n", 5, "project 'b'"),
        (f"{ACME}  limits:\n  - {{meter: concurrency, amount: 1, key: a, end_user: b}}\n", 5, "one subject"),
        (
            f"{ACME}  limits:\n" + "  - {meter: concurrency, amount: 1}\n" * 2,
            6,
            "limit concurrency stands at",
        ),
        (f"{ACME}  targets:\n  - {{tier: batch, metric: e2e}}\n", 5, "target_s: is missing"),
        (f"{ACME}  targets:\n  - {{tier: batch, metric: e2e, target_s: 0}}\n", 5, "target_s: must lie"),
        ("version: 1\ntargets:\n- {tier: best, metric: e2e, target_s: 1}\n", 3, "'best' is not one of"),
        ("version: 1\nplatform_limits:\n- {meter: concurrency, amount: 1, key: a}\n", 3, "binds all tenants"),
        ("version: 1\nprices:\n- {model: m, input_nanousd: 1}\n", 3, "output_nanousd: is missing"),
        ("version: 1\nprices:\n- {model: m, tier: x}\n", 3, "'x' is not one of"),
        ("version: 1\nprices:\n- {model: m}\n- {model: m}\n", 4, "model 'm' in all tiers stands at"),
        ("version: 1\nprices:\n- {model: m, input_nanousd: -1, output_nanousd: 1}\n", 3, "input_nanousd"),
        ("version: 1\npolicy: {name: best}\n", 2, "there is no policy 'best'"),
        ("version: 1\npolicy: {options: {}}\n", 2, "name: is missing"),
    ],
)
def test_a_refusal_names_line_and_key(text: str, line: int, words: str) -> None:
    read = read_file(text.encode())
    with pytest.raises(ConfigInvalid) as refused:
        make_plan(EMPTY, read.wanted, TERMS)
    error = read.bad(refused.value)
    assert (error.line, words in str(error)) == (line, True), str(error)


def test_a_key_stays_in_its_project() -> None:
    text = f"{ACME}  projects: [{{name: web}}]\n  keys: [{{name: a, project: web}}]\n"
    with pytest.raises(ConfigInvalid, match="the key is of 'default', which no act changes"):
        plan(text, with_acme(key("a")))


@pytest.mark.parametrize(
    ("was", "fields", "command", "changes"),
    [
        ({}, "scopes: [quote]", KeyChange(scopes=["quote"]), {"scopes": (["inference"], ["quote"])}),
        ({}, "models: [m]", KeyChange(models=["m"]), {"models": (None, ["m"])}),
        ({"models": {"m"}}, "models: all", KeyChange(models=[]), {"models": (["m"], None)}),
        ({}, "tiers: [batch]", KeyChange(tiers=["batch"]), {"tiers": (None, ["batch"])}),
        ({"tiers": {Tier.BATCH}}, "tiers: tenant", KeyChange(tiers=[]), {"tiers": (["batch"], None)}),
        ({}, f"expires: '{LATER}'", KeyChange(expires=LATER), {"expires_at": (None, LATER)}),
        (
            {"expires_at": datetime.fromisoformat(LATER)},
            "expires: never",
            KeyChange(expires=""),
            {"expires_at": (LATER, None)},
        ),
        (  # The tenant does not have the key's own default tier any more, which no longer fits.
            {"tiers": {Tier.INTERACTIVE, Tier.BATCH}, "default_tier": Tier.INTERACTIVE},
            "tiers: tenant, default_tier: tenant",
            KeyChange(tiers=[], default_tier=""),
            {"tiers": (["interactive", "batch"], None), "default_tier": ("interactive", None)},
        ),
    ],
)
def test_a_key_that_is_there_is_changed(
    was: dict[str, Any], fields: str, command: KeyChange, changes: dict[str, Any]
) -> None:
    state = with_acme(key("a", **was))
    [step] = plan(f"{ACME}  keys: [{{name: a, {fields}}}]\n", state).steps
    assert (step.act, step.reference, step.command, step.changes) == ("key.update", "key_a", command, changes)


def test_a_change_of_a_key_obeys_the_rules_of_the_act() -> None:
    batch = key("a", tiers=frozenset({Tier.BATCH}))
    for fields, words in (
        ("default_tier: standard", "default_tier: 'standard' is not among"),
        ("expires: '2001-01-01T00:00:00Z'", "expires: must lie"),
        ("tiers: [interactive]", "tiers: must lie within the tenant's"),
    ):
        with pytest.raises(ConfigInvalid, match=words):
            plan(f"{ACME}  keys: [{{name: a, {fields}}}]\n", with_acme(batch))


def test_what_is_left_out_stays() -> None:
    state = with_acme(key("a", scopes=frozenset({"quote"}), models=frozenset({"m"})))
    text = f"{ACME}  keys: [{{name: a}}]\n"
    assert plan(text, state).steps == ()
    assert plan("version: 1\n", state) == ConfigPlan(1, (), ("tenant acme",))
    assert plan(ACME, state) == ConfigPlan(1, (), ("acme: key a",))


def test_a_tier_that_is_as_it_should_be_leaves_the_tiers_alone() -> None:
    tenant = new_tenant(TenantCreate(name="acme", tier="standard", tiers=["interactive", "standard"]))
    state = replace(EMPTY, tenants={"acme": TenantState(tenant)})
    assert plan(f"{ACME}  tier: standard\n", state).steps == ()
    [step] = plan(f"{ACME}  tier: interactive\n", state).steps
    assert step.changes == {
        "default_tier": ("standard", "interactive"),
        "tiers": (["interactive", "standard"], ["interactive", "standard", "batch"]),
    }


def test_a_key_that_goes_takes_no_limit() -> None:
    text = f"{ACME}  keys: [{{name: a, state: absent}}]\n"
    assert [step.act for step in plan(text, with_acme(key("a"))).steps] == ["key.revoke"]
    with pytest.raises(ConfigInvalid, match="no key 'a'"):
        plan(f"{text}  limits: [{{meter: concurrency, amount: 1, key: a}}]\n", with_acme(key("a")))


def test_a_key_is_seen_as_its_tenant_lets_it_be() -> None:
    state = with_acme(
        key("a", tiers=frozenset({Tier.INTERACTIVE, Tier.BATCH}), default_tier=Tier.INTERACTIVE)
    )
    text = as_yaml(exported(state, RESOURCES))
    assert "interactive" not in text
    assert plan(text, state).steps == ()
    wider = (
        f"{ACME}  tiers: [interactive, standard, batch]\n  keys: [{{name: a, tiers: [interactive, batch]}}]\n"
    )
    assert [step.act for step in plan(wider, state).steps] == ["tenant.update"]


def test_a_price_is_changed_where_it_differs_and_in_one_step_where_all_tiers_do() -> None:
    price = PriceEntry(Price(100, 50, 300), 1_000, TokenWeights())
    state = replace(EMPTY, prices=PriceBook({("m", tier): price for tier in Tier}, 1))
    begin = "version: 1\nprices:\n"
    assert plan(f"{begin}- {{model: m, input_nanousd: 100}}\n", state).steps == ()
    [all_tiers] = plan(f"{begin}- {{model: m, input_nanousd: 101}}\n", state).steps
    assert all_tiers.subject == "prices of m"
    assert sorted(all_tiers.changes) == [f"{tier}.input_nanousd" for tier in sorted(Tier)]
    mixed = f"{begin}- {{model: m, tier: batch, multiplier: 400}}\n- {{model: m, output_nanousd: 301}}\n"
    steps = plan(mixed, state).steps
    assert [sorted(step.changes) for step in steps] == [
        ["interactive.output_nanousd"],
        ["standard.output_nanousd"],
        ["batch.multiplier", "batch.output_nanousd"],
    ]


def test_the_policy_in_force_is_what_a_step_begins_with() -> None:
    text = "version: 1\npolicy: {name: vtc, options: {slots: 4}}\n"
    [step] = plan(text).steps
    assert step.changes == {"policy": ("hybrid", "vtc"), "options.slots": (None, 4)}
    stored = replace(EMPTY, policy=StoredPolicy("vtc", {"slots": 4}))
    assert plan(text, stored).steps == ()
    assert plan("version: 1\npolicy: {state: absent}\n").steps == ()
    [back] = plan("version: 1\npolicy: {state: absent}\n", stored).steps
    assert (back.act, back.changes) == (
        "policy.from_settings",
        {"policy": ("vtc", "hybrid"), "options.slots": (4, None)},
    )


def test_equal_files_make_equal_plans() -> None:
    assert plan(FULL) == plan(FULL)


def test_more_than_one_transaction_takes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "MAX_STEPS", 2)
    text = "version: 1\ntenants: [{name: a}, {name: b}, {name: c}]\n"
    with pytest.raises(ConfigInvalid, match=r"tenants\[2\]: is beyond the 2 acts"):
        plan(text)
