"""What exists and a configuration file does not name: it stays. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tenants.config_file.document import ConfigLimit, ConfigTarget, ConfigTenant, Configuration
from tenants.config_file.plan_limits import described, described_target, name_in_file
from tenants.config_file.plan_tenants import DEFAULT_PROJECT


def unnamed(there: Configuration, wanted: Configuration) -> Iterator[str]:
    """Things of `there` (the state as a file) that `wanted` does not name; of unnamed tenants the tenants
    alone."""
    if there.policy is not None and wanted.policy is None:
        yield f"scheduling policy {there.policy.name}"
    priced = {each.model for each in wanted.prices}
    models = dict.fromkeys(each.model for each in there.prices)
    yield from (f"prices of {model}" for model in models if model not in priced)
    yield from _targets("", there.targets, wanted.targets)
    yield from _limits("", there.platform_limits, wanted.platform_limits)
    tenants = {each.name: each for each in wanted.tenants}
    for each in there.tenants:
        if each.name in tenants:
            yield from _of_tenant(each, tenants[each.name])
        else:
            yield f"tenant {each.name}"


def _of_tenant(there: ConfigTenant, wanted: ConfigTenant) -> Iterator[str]:
    name = there.name
    projects = {DEFAULT_PROJECT, *(each.name for each in wanted.projects)}
    yield from (f"{name}: project {each.name}" for each in there.projects if each.name not in projects)
    keys = {each.name for each in wanted.keys}
    yield from (f"{name}: key {each.name}" for each in there.keys if each.name not in keys)
    yield from _limits(name, there.limits, wanted.limits)
    yield from _targets(name, there.targets, wanted.targets)


def _limits(tenant: str, there: Sequence[ConfigLimit], wanted: Sequence[ConfigLimit]) -> Iterator[str]:
    named = {name_in_file(tenant, each) for each in wanted}
    for each in there:
        name = name_in_file(tenant, each)
        if name not in named:
            yield described(tenant, name)


def _targets(tenant: str, there: Sequence[ConfigTarget], wanted: Sequence[ConfigTarget]) -> Iterator[str]:
    named = {(each.tier, each.metric) for each in wanted}
    for each in there:
        if (each.tier, each.metric) not in named:
            yield described_target(tenant, each.tier, each.metric)
