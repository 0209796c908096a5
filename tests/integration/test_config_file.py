"""A configuration file is planned, applied as one transaction, and exported again, on real databases."""

from __future__ import annotations

import asyncio
import inspect
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import select

from tenants.admin.admin import Admin
from tenants.admin.platform.policy import StoredPolicy
from tenants.admin.transaction import Transactions
from tenants.config_file import config_file
from tenants.config_file.base import ConfigInvalid
from tenants.config_file.config_file import ConfigFile
from tenants.config_file.document import Configuration
from tenants.config_file.export import as_yaml
from tenants.config_file.plan import PlanTerms
from tenants.config_file.yaml_reader import read_file
from tenants.directory import queries
from tenants.directory.directory import Directory
from tenants.errors import PreconditionFailed
from tenants.nouns.key import KeyCreate
from tenants.nouns.limit import LimitSet
from tenants.nouns.tenant import TenantChange, TenantCreate
from tenants.pricing.pricing import DEFAULT_MULTIPLIERS
from tenants.resources.all import RESOURCES
from tenants.storage import tables
from tenants.storage.database import Database, open_database
from tests.support.config_files import FULL, acts_since
from tests.support.quota import Clock

ACTOR = "cli:tester"
TERMS = PlanTerms(DEFAULT_MULTIPLIERS, StoredPolicy("hybrid"))


def wanted(text: str) -> Configuration:
    return read_file(text.encode()).wanted


class Installation:
    """One database with its acts and its file."""

    def __init__(self, database: Database, pepper: bytes) -> None:
        self.database = database
        self.clock = Clock()
        self.admin = Admin(Transactions(database, pepper, self.clock))
        self.file = ConfigFile(database, self.admin, TERMS, self.clock)

    async def apply(self, text: str) -> list[str]:
        """Applies a file; returns the secrets of the keys that it made."""
        plan = await self.file.plan(wanted(text))
        return [key.secret for key in await self.file.apply(ACTOR, plan)]

    async def text(self) -> str:
        return as_yaml((await self.file.export()).wanted)

    async def steps(self, text: str) -> list[str]:
        return [step.act for step in (await self.file.plan(wanted(text))).steps]

    async def revision(self) -> int:
        return await self.database.read(queries.revision)


@pytest.fixture
def here(database: Database, pepper: bytes) -> Installation:
    return Installation(database, pepper)


@pytest.fixture
async def elsewhere(tmp_path: Path, _sqlite_template: Path, pepper: bytes) -> AsyncIterator[Installation]:
    """A second, empty installation."""
    database = open_database(f"sqlite:///{shutil.copy(_sqlite_template, tmp_path / 'elsewhere.db')}")
    yield Installation(database, pepper)
    await database.close()


async def test_a_file_is_applied_once_and_then_there_is_nothing_to_do(
    here: Installation, pepper: bytes
) -> None:
    secrets = await here.apply(FULL)
    assert len(secrets) == 2
    assert await here.steps(FULL) == []
    revision = await here.revision()
    assert await here.apply(FULL) == []
    assert await here.revision() == revision
    assert (await here.file.plan(wanted(FULL))).unnamed == ()
    directory = Directory(here.database, pepper)
    await directory.refresh()
    principal = directory.authenticate(secrets[0], here.clock())
    assert principal.tenant_name == "acme"
    assert sorted((limit.kind.value, limit.meter.value, limit.amount) for limit in principal.limits) == [
        ("end_user", "cost_nanousd", 5_000_000_000),
        ("end_user", "requests", 60),
        ("key", "concurrency", 4),
        ("platform", "gpu_ms", 3_000_000),
        ("project", "requests", 10),
        ("tenant", "output_tokens", 4_000),
        ("tenant", "requests", 6),
        ("tenant", "total_tokens", 1_000_000),
    ]


async def test_an_export_makes_the_same_installation_elsewhere(
    here: Installation, elsewhere: Installation
) -> None:
    await here.apply(FULL)
    text = await here.text()
    assert await here.steps(text) == []
    await elsewhere.apply(text)
    assert await elsewhere.text() == text
    assert await elsewhere.steps(text) == await elsewhere.steps(FULL) == []


async def test_the_audit_has_what_the_plan_said(here: Installation) -> None:
    await here.apply("version: 1\ntenants:\n- name: acme\n  keys: [{name: ops, scopes: [admin:read]}]\n")
    known = len(await acts_since(here.admin, 0))
    plan = await here.file.plan(wanted(FULL))
    before = await here.revision()
    await here.file.apply(ACTOR, plan, is_rehearsal=True)
    assert await here.revision() == before
    assert len(await acts_since(here.admin, 0)) == known
    await here.file.apply(ACTOR, plan)
    assert await here.revision() == before + 1
    acts = await acts_since(here.admin, known)
    assert acts == [(step.act, dict(step.changes)) for step in plan.steps]


async def test_each_kind_of_removal_and_change_is_audited_as_planned(here: Installation) -> None:
    made = {step.act for step in (await here.file.plan(wanted(FULL))).steps}
    await here.apply(FULL)
    known = len(await acts_since(here.admin, 0))
    text = """\
version: 1
policy: {state: absent}
prices:
- {model: small, input_nanousd: 200}
targets:
- {tier: interactive, metric: ttft, state: absent}
aliases:
- {name: big, state: absent}
platform_limits:
- {meter: gpu_ms, window: hour, state: absent}
tenants:
- name: acme
  status: suspended
  weight: 1
  models: all
  reserved_tokens_per_s: 0
  labels: {team: [ads]}
  projects: [{name: old, status: active}, {name: web, status: suspended}, {name: new}]
  keys:
  - {name: ops, state: absent}
  - {name: web-prod, allow_from: [], default_tier: tenant}
  limits:
  - {meter: total_tokens, window: day, amount: 5, time_zone: UTC}
  - {meter: requests, rate_per_s: 3, project: web, state: absent}
  - {meter: concurrency, amount: 5, key: web-prod}
- name: beta
  status: active
"""
    plan = await here.file.plan(wanted(text))
    await here.file.apply(ACTOR, plan)
    acts = await acts_since(here.admin, known)
    assert acts == [(step.act, dict(step.changes)) for step in plan.steps]
    assert [act for act, _ in acts] == [
        *("policy.from_settings", "price.set", "slo.remove", "alias.remove", "limit.remove"),
        *("tenant.update", "tenant.suspend", "project.resume", "project.suspend", "project.create"),
        *("key.revoke", "key.update", "limit.remove", "limit.set", "limit.remove", "limit.set"),
        "tenant.resume",
    ]
    # A kind of step that no plan of these tests has may leave no row.
    code = inspect.getsource(config_file)
    of_sections = {act for one in RESOURCES if (part := one.document) for act in (part.set, part.remove)}
    by_hand = {"price.set", *re.findall(r'case "([a-z_.]+)"', code)}
    assert made | {act for act, _ in acts} == of_sections | by_hand
    assert await here.steps(text) == []
    assert (
        "acme: limit cost_nanousd per month of end user ann@example.com"
        in (await here.file.plan(wanted(text))).unnamed
    )


async def test_what_an_act_refuses_at_the_end_undoes_the_beginning(here: Installation) -> None:
    before, rows = await here.text(), await acts_since(here.admin, 0)
    limits = "".join(
        f"  - {{meter: requests, window: day, amount: 1, above_tokens: {number}}}\n" for number in range(33)
    )
    text = f"version: 1\ntenants:\n- name: first\n- name: acme\n  keys: [{{name: a}}]\n  limits:\n{limits}"
    read = read_file(text.encode())
    plan = await here.file.plan(read.wanted)
    for is_rehearsal in (True, False):
        with pytest.raises(ConfigInvalid) as refused:
            await here.file.apply(ACTOR, plan, is_rehearsal=is_rehearsal)
        assert "at most 32 limits" in str(refused.value)
        assert read.bad(refused.value).line == len(text.splitlines())
        assert (await here.text(), await acts_since(here.admin, 0)) == (before, rows)
    assert await here.database.read(lambda c: c.execute(select(tables.key_secrets)).all()) == []


async def test_of_two_applies_at_once_one_wins(here: Installation, pepper: bytes) -> None:
    other = open_database(here.database.url)
    try:
        both = (here, Installation(other, pepper))
        plans = [
            await each.file.plan(wanted(f"version: 1\ntenants: [{{name: acme, weight: {weight}}}]\n"))
            for weight, each in enumerate(both, 2)
        ]
        done = await asyncio.gather(
            *(each.file.apply(ACTOR, plan) for each, plan in zip(both, plans, strict=True)),
            return_exceptions=True,
        )
    finally:
        await other.close()
    assert [type(each) for each in done if isinstance(each, Exception)] == [PreconditionFailed]
    assert len(await here.admin.tenants.all()) == 1
    assert await here.revision() == 1


async def test_acts_in_one_transaction_wait_for_nothing_else(here: Installation) -> None:
    async def acts(inside: Admin) -> None:
        await inside.tenants.create(ACTOR, TenantCreate(name="acme"))
        await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="nothing but acts"):
        await here.admin.in_one_transaction(acts)
    assert (await here.admin.tenants.all(), await here.revision()) == ([], 0)


async def test_a_plan_is_refused_after_any_other_act(here: Installation) -> None:
    await here.admin.tenants.create(ACTOR, TenantCreate(name="acme"))
    empty = await here.file.plan(wanted("version: 1\ntenants: [{name: acme, weight: 1}]\n"))
    assert empty.steps == ()
    plan = await here.file.plan(wanted("version: 1\ntenants: [{name: acme, weight: 7}]\n"))
    await here.admin.tenants.update(ACTOR, "acme", TenantChange(weight=2))
    for each in (plan, empty):
        with pytest.raises(PreconditionFailed) as refused:
            await here.file.apply(ACTOR, each)
        assert refused.value.current == {"revision": 2}
    assert (await here.admin.tenants.show("acme")).tenant.weight == 2


async def test_keys_that_a_file_cannot_name_are_left_out_and_said(here: Installation) -> None:
    await here.admin.tenants.create(ACTOR, TenantCreate(name="acme"))
    keys = [
        (await here.admin.keys.create(ACTOR, KeyCreate(tenant="acme", name=name)))[0]
        for name in ("", "twin", "twin", "own")
    ]
    await here.admin.limits.set(
        ACTOR, LimitSet(tenant="acme", key=keys[0].key_id, meter="concurrency", amount=1)
    )
    export = await here.file.export()
    assert [key.name for key in export.wanted.tenants[0].keys] == ["own"]
    assert export.wanted.tenants[0].limits == []
    assert len(export.left_out) == 4
    assert await here.steps(as_yaml(export.wanted)) == []
    with pytest.raises(ConfigInvalid, match=r"tenants\[0\]\.keys\[0\]\.name: 2 keys of acme have this name"):
        await here.steps("version: 1\ntenants: [{name: acme, keys: [{name: twin}]}]\n")


async def test_a_key_whose_end_has_passed_is_not_made_again(here: Installation) -> None:
    await here.apply(FULL)
    here.clock.now_s = 2_000_000_000.0
    assert await here.steps(FULL) == []
    export = await here.file.export()
    assert [key.name for key in export.wanted.tenants[0].keys] == ["ops"]
