"""Random directories: what is exported makes the same directory elsewhere, and what is applied is so."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tenants.admin.admin import Admin
from tenants.admin.platform.policy import StoredPolicy
from tenants.admin.transaction import Transactions
from tenants.config_file.config_file import ConfigFile
from tenants.config_file.document import (
    ConfigKey,
    ConfigLimit,
    ConfigPolicy,
    ConfigPrice,
    ConfigProject,
    ConfigTarget,
    ConfigTenant,
    Configuration,
)
from tenants.config_file.export import as_yaml
from tenants.config_file.plan import PlanTerms
from tenants.config_file.plan_limits import name_in_file
from tenants.config_file.yaml_reader import read_file
from tenants.pricing.pricing import DEFAULT_MULTIPLIERS
from tenants.storage.database import open_database
from tenants.types import Tier
from tests.support.config_files import acts_since
from tests.support.quota import Clock

TIERS = [tier.value for tier in Tier]
TERMS = PlanTerms(DEFAULT_MULTIPLIERS, StoredPolicy("hybrid"))
EXAMPLES = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
MANY = settings(deadline=None, suppress_health_check=list(HealthCheck))
WORDS = st.sampled_from(["yes", "null", "1e3", "a: b", "- x", "#", "ü\U0001f600", "it's", '"', "0x1F", "~"])
LABEL = WORDS | st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=6)
LABEL_KEY = LABEL.filter(lambda key: not set(",=") & set(key))
"""What a question about usage can name."""

prices = st.builds(
    ConfigPrice,
    model=st.sampled_from(["m", "true"]),
    tier=st.sampled_from([None, *TIERS]),
    input_nanousd=st.integers(5, 9),
    cached_input_nanousd=st.integers(0, 5),
    output_nanousd=st.integers(0, 9),
    multiplier=st.none() | st.sampled_from([400, 1_000]),
    output_weight=st.none() | st.sampled_from([1_000, 2_000]),
)
targets = st.builds(
    ConfigTarget,
    tier=st.sampled_from(TIERS),
    metric=st.sampled_from(["ttft", "e2e"]),
    target_s=st.sampled_from([0.0001, 0.3, 12.5]),
    percentile=st.sampled_from([95.0, 99.9]),
)


SUBJECTS: list[dict[str, Any]] = [
    {},
    {"project": "web"},
    {"key": "prod"},
    {"end_user": "null"},
    {"end_user": "é"},
    {"each_end_user": True},
]


@st.composite
def limits(draw: st.DrawFn, *, of_platform: bool = False) -> ConfigLimit:
    shape = draw(
        st.sampled_from(
            [
                {"meter": "total_tokens", "window": "day", "amount": 10, "time_zone": "Europe/Berlin"},
                {"meter": "total_tokens", "window": "day", "amount": 20},
                {"meter": "requests", "rate_per_s": 2.5, "amount": 9},
                {"meter": "output_tokens", "rate_per_s": 2.5, "amount": 9},
                {"meter": "concurrency", "amount": 3},
                {"meter": "cost_nanousd", "window": "lifetime", "amount": 9_000_000_000_000_000},
            ]
        )
    )
    soft: dict[str, Any] = draw(st.sampled_from([{}, {"mode": "soft"}, {"mode": "soft", "thresholds": [7]}]))
    narrow: dict[str, Any] = draw(st.sampled_from([{}, {"tier": "batch"}, {"model": "m", "above_tokens": 5}]))
    own = {} if of_platform else draw(st.sampled_from(SUBJECTS))
    limit = ConfigLimit(**shape, **soft, **narrow, **own)
    if limit.meter == "output_tokens" and limit.tier == "batch" and not (soft or limit.each_end_user):
        limit.ceiling_per_s = draw(st.sampled_from([None, 2.5, 9.125]))
    return limit


keys = st.builds(
    ConfigKey,
    name=st.just("prod"),
    project=st.sampled_from(["default", "web"]),
    scopes=st.sampled_from([["inference"], ["quote", "admin:read"]]),
    models=st.sampled_from([None, "all", ["m"]]),
    tiers=st.sampled_from([None, ["batch"], "tenant"]),
    default_tier=st.sampled_from([None, "batch", "tenant"]),
    allow_from=st.sampled_from([None, [], ["10.0.0.1"], ["::1/128", "10.0.0.0/8"]]),
    expires=st.sampled_from([None, "never", "2030-01-31T18:00:00.000001+01:00"]),
)


def distinct(parts: st.SearchStrategy[Any], key: Any, most: int) -> st.SearchStrategy[list[Any]]:
    return st.lists(parts, unique_by=key, max_size=most)


@st.composite
def tenants(draw: st.DrawFn) -> ConfigTenant:
    reserved = draw(st.sampled_from([0.0, 0.1, 1e9]))
    return ConfigTenant(
        name=draw(st.sampled_from(["acme", "beta", "0x1F"])),
        status=draw(st.sampled_from(["active", "suspended"])),
        weight=draw(st.sampled_from([0.01, 1.0, 1e3, 1 / 3])),
        tier=draw(st.sampled_from(["standard", "batch"])),
        tiers=draw(st.sampled_from([["standard", "batch"], TIERS])),
        models=draw(st.sampled_from(["all", ["m"], ["m", "true"]])),
        on_low_budget=draw(st.sampled_from(["refuse", "truncate"])),
        reserved_tokens_per_s=reserved,
        reserved_tier=draw(st.sampled_from(["all", *TIERS])) if reserved else "all",
        labels=draw(st.dictionaries(LABEL_KEY, st.lists(LABEL, min_size=1, max_size=3), max_size=3)),
        projects=[ConfigProject(name="web", status=draw(st.sampled_from(["active", "suspended"])))],
        keys=[draw(keys)],
        limits=draw(distinct(limits(), lambda each: name_in_file("x", each), 4)),
        targets=draw(distinct(targets, lambda each: (each.tier, each.metric), 3)),
    )


configurations = st.builds(
    Configuration,
    version=st.just(1),
    policy=st.none() | st.builds(ConfigPolicy, name=st.just("vtc"), options=st.just({"slots": 4, "a": "1"})),
    prices=distinct(prices, lambda each: (each.model, each.tier), 4),
    targets=distinct(targets, lambda each: (each.tier, each.metric), 3),
    platform_limits=distinct(limits(of_platform=True), lambda each: name_in_file("", each), 3),
    tenants=distinct(tenants(), lambda each: each.name, 3),
)


@pytest.fixture
def places(tmp_path: Path, _sqlite_template: Path) -> Any:
    """Makes new, empty databases."""
    numbers = count()

    @contextmanager
    def place() -> Iterator[str]:
        path = shutil.copy(_sqlite_template, tmp_path / f"{next(numbers)}.db")
        yield f"sqlite:///{path}"
        for each in tmp_path.glob(f"{Path(path).name}*"):
            each.unlink()

    return place


def file_of(url: str) -> tuple[Any, Admin, ConfigFile]:
    database, clock = open_database(url), Clock()
    admin = Admin(Transactions(database, b"a pepper of 32 bytes for tests..", clock))
    return database, admin, ConfigFile(database, admin, TERMS, clock)


async def goes_round(here: str, elsewhere: str, first: Configuration, second: Configuration) -> None:
    database, admin, file = file_of(here)
    other, _, copy = file_of(elsewhere)
    try:
        for wanted in (first, second):
            known = len(await acts_since(admin, 0))
            plan = await file.plan(wanted)
            await file.apply("cli:test", plan)
            acts = await acts_since(admin, known)
            assert acts == [(step.act, dict(step.changes)) for step in plan.steps]
            assert (await file.plan(wanted)).steps == ()
        text = as_yaml((await file.export()).wanted)
        again = read_file(text.encode()).wanted
        assert (await file.plan(again)).steps == ()
        await copy.apply("cli:test", await copy.plan(again))
        assert as_yaml((await copy.export()).wanted) == text
    finally:
        await database.close()
        await other.close()


def same_projects(first: Configuration, second: Configuration) -> Configuration:
    """The second file with the keys in the projects that the first one has them in: no act changes that."""
    before = {each.name: each.keys for each in first.tenants}
    for tenant in second.tenants:
        for key, old in zip(tenant.keys, before.get(tenant.name, ()), strict=False):
            key.project = old.project
    return second


def test_an_export_makes_the_same_directory_elsewhere(places: Any) -> None:
    check(places, EXAMPLES)


@pytest.mark.long
def test_an_export_of_many_directories_makes_the_same_elsewhere(places: Any) -> None:
    check(places, MANY)


def check(places: Any, examples: settings) -> None:
    @examples
    @given(first=configurations, second=configurations)
    def run(first: Configuration, second: Configuration) -> None:
        with places() as here, places() as elsewhere:
            asyncio.run(goes_round(here, elsewhere, first, same_projects(first, second)))

    run()
