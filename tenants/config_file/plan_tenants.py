"""Steps for tenants and their projects. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tenants.config_file.base import ConfigInvalid, Place
from tenants.config_file.document import ConfigProject, ConfigTenant
from tenants.config_file.parts import Resources, documents, part_steps
from tenants.config_file.plan_keys import ended, key_steps
from tenants.config_file.plan_limits import limit_steps, name_of
from tenants.config_file.state import TenantState
from tenants.config_file.steps import ConfigStep, NamedOnce, differences, standing_at
from tenants.instants import from_us
from tenants.nouns import checks
from tenants.nouns.project import DEFAULT_PROJECT, Project, ProjectCreate
from tenants.nouns.tenant import Tenant, TenantChange, TenantCreate, changed_tenant, new_tenant

FIELDS = (
    *("weight", "tier", "tiers", "on_low_budget", "reserved_tokens_per_s", "reserved_tier", "models"),
    *("labels", "display_name"),
)


def tenant_steps(
    wanted: ConfigTenant, there: TenantState | None, now_us: int, place: Place, resources: Resources
) -> Iterator[ConfigStep]:
    if wanted.state == "absent":
        raise ConfigInvalid(
            (*place, "state"),
            "a tenant cannot be removed, since the ledger names it: write `status: suspended`",
        )
    name = wanted.name
    if there is None:
        with standing_at(place):
            command = _creation(wanted)
            made = new_tenant(command)
        yield ConfigStep("tenant.create", f"tenant {name}", place, command, _created(made), name)
        there = TenantState(made, {DEFAULT_PROJECT: _project(DEFAULT_PROJECT)})
    before = there.tenant
    with standing_at(place):
        change = _change(wanted, before)
        after = changed_tenant(before, change)
    if changes := differences(before.as_json(), after.as_json()):
        yield ConfigStep("tenant.update", f"tenant {name}", place, _only(change, changes), changes, name)
    yield from _status_steps("tenant", f"tenant {name}", wanted.status, before.status, place, name)
    yield from _project_steps(name, wanted.projects, there.projects, (*place, "projects"))
    there = TenantState(after, there.projects, there.keys, there.limits, there.parts)
    projects = {*there.projects, *(project.name for project in wanted.projects)}
    keys = {key.name: key.key_id for key in there.named_keys()}
    for step in key_steps(wanted.keys, there, projects, now_us, (*place, "keys")):
        if step.act == "key.create":
            keys[step.reference] = step.reference
        yield step
    for part in wanted.keys:
        if part.state == "absent":
            keys.pop(part.name, None)
    keys |= dict.fromkeys(set(ended(wanted.keys, now_us)) - set(keys), "")
    limits = {name_of(subject, limit): limit for subject, limit in there.named_limits()}
    yield from limit_steps(name, wanted.limits, limits, keys, projects, (*place, "limits"))
    for resource, document in documents(resources, of_tenants=True):
        section = document.section
        found = there.parts.get(section, ())
        yield from part_steps(resource, document, name, getattr(wanted, section), found, (*place, section))


def _creation(wanted: ConfigTenant) -> TenantCreate:
    given = {name: getattr(wanted, name) for name in FIELDS if name not in ("models", "labels")}
    return TenantCreate(
        name=wanted.name, **{name: value for name, value in given.items() if value is not None}
    )


def _change(wanted: ConfigTenant, before: Tenant) -> TenantChange:
    given: dict[str, Any] = {
        name: getattr(wanted, name) for name in FIELDS if getattr(wanted, name) is not None
    }
    if wanted.models is not None:
        given["models"] = _models(wanted.models)
    if wanted.tier is not None and wanted.tiers is None and wanted.tier == before.default_tier:
        # Else the act would set the tiers that follow from it.
        del given["tier"]
    if wanted.labels is not None:
        given["labels"] = {key: [] for key in before.labels} | wanted.labels
        given["labels"] = {
            key: values for key, values in given["labels"].items() if values or key in before.labels
        }
    return TenantChange(**given)


def _models(wanted: list[str] | str) -> list[str]:
    """As the act takes them: an empty list is all. Raises `Invalid` for an empty list of the file."""
    if isinstance(wanted, str):
        return []
    checks.models(wanted)
    return wanted


_OF_COMMAND = {"default_tier": "tier"}


def _only(change: TenantChange, changes: Iterable[str]) -> TenantChange:
    """The change without the fields that stay."""
    names = {_OF_COMMAND.get(name.partition(".")[0], name.partition(".")[0]) for name in changes}
    if names & {"tier", "tiers"}:
        names |= {"tier", "tiers"}
    if "reserved_tier" in names or "reserved_tokens_per_s" in names:
        names |= {"reserved_tier", "reserved_tokens_per_s"}
    return TenantChange(**{name: getattr(change, name) for name in FIELDS if name in names})


def _created(made: Tenant) -> Mapping[str, tuple[Any, Any]]:
    return differences(None, made.as_json())


def _project(name: str) -> Project:
    return Project("", "", name, "active", from_us(0))


def _project_steps(
    tenant: str, wanted: Iterable[ConfigProject], there: Mapping[str, Project], place: Place
) -> Iterator[ConfigStep]:
    seen = NamedOnce()
    for number, part in enumerate(wanted):
        at, what = (*place, number), f"{tenant}: project {part.name}"
        seen.add(part.name, f"project {part.name!r}", at)
        if part.state == "absent":
            raise ConfigInvalid(
                (*at, "state"),
                "a project cannot be removed, since the ledger names it: write `status: suspended`",
            )
        project = there.get(part.name)
        if project is None:
            with standing_at(at):
                checks.name("name", part.name)
            project = _project(part.name)
            command = ProjectCreate(tenant=tenant, name=part.name)
            changes = differences(None, project.as_json())
            yield ConfigStep("project.create", what, at, command, changes, tenant, part.name)
        yield from _status_steps("project", what, part.status, project.status, at, tenant, part.name)


def _status_steps(
    kind: str, what: str, wanted: str | None, is_now: str, place: Place, tenant: str, reference: str = ""
) -> Iterator[ConfigStep]:
    if wanted is not None and wanted != is_now:
        act = f"{kind}.{'suspend' if wanted == 'suspended' else 'resume'}"
        yield ConfigStep(act, what, place, None, {"status": (is_now, wanted)}, tenant, reference)
