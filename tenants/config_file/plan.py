"""Plans a configuration file: the steps that make the directory as the file says.

Pure: the same state and file make the same steps, in the order of the file; a state as in the file makes
none. Nothing is removed without `state: absent`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tenants.admin.platform.policy import StoredPolicy
from tenants.config_file.base import ConfigInvalid, Place
from tenants.config_file.document import ConfigLimit, ConfigPolicy, ConfigTenant, Configuration
from tenants.config_file.export import exported
from tenants.config_file.parts import Resources, documents, part_steps, unnamed_parts
from tenants.config_file.plan_limits import (
    described,
    limit_steps,
    name_in_file,
    name_of,
)
from tenants.config_file.plan_prices import price_steps
from tenants.config_file.plan_tenants import tenant_steps
from tenants.config_file.state import PLATFORM_LIMIT, ConfigState, SubjectName
from tenants.config_file.steps import ConfigPlan, ConfigStep, NamedOnce, PolicyMove, differences
from tenants.nouns.project import DEFAULT_PROJECT
from tenants.resources.all import RESOURCES
from tenants.types import Tier

POLICY = "scheduling policy"
MAX_STEPS = 2_000
"""Acts of one transaction: while it is open, other admin acts wait, and on SQLite every write."""


@dataclass(frozen=True)
class PlanTerms:
    multipliers: Mapping[Tier, int]
    """Thousandths, of a model that is priced for the first time."""
    settings_policy: StoredPolicy
    """The policy where none is stored."""
    checked: Callable[[StoredPolicy], StoredPolicy] = lambda wanted: wanted
    """A policy with the options that are not its defaults. Raises ValueError for what is none."""
    resources: Resources = RESOURCES
    """Whose sections the file has."""


def make_plan(state: ConfigState, wanted: Configuration, terms: PlanTerms) -> ConfigPlan:
    """Raises `ConfigInvalid`."""
    steps: list[ConfigStep] = []
    for step in _steps(state, wanted, terms):
        steps.append(step)
        if len(steps) > MAX_STEPS:
            raise ConfigInvalid(
                step.place, f"is beyond the {MAX_STEPS} acts of one transaction: apply the file in parts"
            )
    return ConfigPlan(
        state.revision,
        tuple(steps),
        tuple(unnamed(exported(state, terms.resources), wanted, terms.resources)),
    )


def _steps(state: ConfigState, wanted: Configuration, terms: PlanTerms) -> Iterator[ConfigStep]:
    if wanted.policy is not None:
        yield from _policy_steps(wanted.policy, state.policy, terms, ("policy",))
    yield from price_steps(wanted.prices, state.prices, terms.multipliers, ("prices",))
    for resource, document in documents(terms.resources, of_tenants=False):
        section = document.section
        yield from part_steps(
            resource, document, "", getattr(wanted, section, ()), state.parts.get(section, ()), (section,)
        )
    platform = {name_of(SubjectName(PLATFORM_LIMIT), limit): limit for limit in state.platform_limits}
    yield from limit_steps("", wanted.platform_limits, platform, {}, (), ("platform_limits",))
    seen = NamedOnce()
    for number, tenant in enumerate(wanted.tenants):
        place: Place = ("tenants", number)
        seen.add(tenant.name, f"tenant {tenant.name!r}", place)
        yield from tenant_steps(tenant, state.tenants.get(tenant.name), state.now_us, place, terms.resources)


def _policy_steps(
    wanted: ConfigPolicy, stored: StoredPolicy | None, terms: PlanTerms, place: Place
) -> Iterator[ConfigStep]:
    now = stored or terms.settings_policy
    if wanted.state == "absent":
        after = terms.settings_policy
        if stored is not None:
            changes = differences(now.as_json(), after.as_json())
            yield ConfigStep("policy.from_settings", POLICY, place, PolicyMove(now, after), changes)
        return
    if not wanted.name:
        raise ConfigInvalid((*place, "name"), "is missing: `fairgate policy list` has the names")
    try:
        after = terms.checked(StoredPolicy(wanted.name, wanted.options))
    except ValueError as error:
        raise ConfigInvalid(place, str(error)) from None
    if after != stored:
        changes = differences(now.as_json(), after.as_json())
        yield ConfigStep("policy.set", POLICY, place, PolicyMove(now, after), changes)


def unnamed(there: Configuration, wanted: Configuration, resources: Resources) -> Iterator[str]:
    """What `there` (the state as a file) has and `wanted` does not; of unnamed tenants only the tenants."""
    if there.policy is not None and wanted.policy is None:
        yield f"scheduling policy {there.policy.name}"
    priced = {price.model for price in wanted.prices}
    models = dict.fromkeys(price.model for price in there.prices)
    yield from (f"prices of {model}" for model in models if model not in priced)
    for _, document in documents(resources, of_tenants=False):
        section = document.section
        yield from unnamed_parts(document, "", getattr(there, section), getattr(wanted, section, ()))
    yield from _limits("", there.platform_limits, wanted.platform_limits)
    tenants = {tenant.name: tenant for tenant in wanted.tenants}
    for tenant in there.tenants:
        if tenant.name in tenants:
            yield from _of_tenant(tenant, tenants[tenant.name], resources)
        else:
            yield f"tenant {tenant.name}"


def _of_tenant(there: ConfigTenant, wanted: ConfigTenant, resources: Resources) -> Iterator[str]:
    name = there.name
    projects = {DEFAULT_PROJECT, *(project.name for project in wanted.projects)}
    yield from (
        f"{name}: project {project.name}" for project in there.projects if project.name not in projects
    )
    keys = {key.name for key in wanted.keys}
    yield from (f"{name}: key {key.name}" for key in there.keys if key.name not in keys)
    yield from _limits(name, there.limits, wanted.limits)
    for _, document in documents(resources, of_tenants=True):
        section = document.section
        yield from unnamed_parts(document, name, getattr(there, section), getattr(wanted, section, ()))


def _limits(tenant: str, there: Sequence[ConfigLimit], wanted: Sequence[ConfigLimit]) -> Iterator[str]:
    named = {name_in_file(tenant, limit) for limit in wanted}
    for limit in there:
        name = name_in_file(tenant, limit)
        if name not in named:
            yield described(tenant, name)
