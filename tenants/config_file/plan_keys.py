"""Steps for a tenant's keys, by their names. Pure.

A key's project is fixed when it is made, as usage and limits name it: a file that differs is refused. A key
whose end has passed is not made again."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from tenants.config_file.base import ConfigInvalid, Place
from tenants.config_file.document import NEVER, OF_TENANT, PLAIN_OF_KEYS, ConfigKey
from tenants.config_file.state import TenantState
from tenants.config_file.steps import ConfigStep, NamedOnce, differences, standing_at
from tenants.instants import from_us, to_us
from tenants.nouns import checks
from tenants.nouns.key import (
    DEFAULT_SCOPES,
    ApiKey,
    KeyChange,
    KeyCreate,
    changed_key,
    check_within,
    checked,
    chosen_tiers,
    expires_us,
    networks,
    scopes,
)
from tenants.nouns.tenant import tier_names
from tenants.types import Tier


def key_steps(
    wanted: Sequence[ConfigKey], there: TenantState, projects: Collection[str], now_us: int, place: Place
) -> Iterator[ConfigStep]:
    """`there`: the tenant after its own steps."""
    seen, tenant = NamedOnce(), there.tenant.name
    for number, part in enumerate(wanted):
        at, what = (*place, number), f"{tenant}: key {part.name}"
        seen.add(part.name, f"key {part.name!r}", at)
        with standing_at(at):
            checks.name("name", part.name)
        same_name = there.keys_called(part.name)
        if len(same_name) > 1:
            raise ConfigInvalid(
                (*at, "name"),
                f"{len(same_name)} keys of {tenant} have this name: revoke all but one, or name them apart",
            )
        old = same_name[0] if same_name else None
        if part.state == "absent":
            if old is not None:
                changes = {"revoked_at": (None, from_us(now_us).isoformat())}
                yield ConfigStep("key.revoke", what, at, None, changes, tenant, old.key_id)
            continue
        if part.project is not None and part.project not in projects:
            raise ConfigInvalid(
                (*at, "project"), f"the tenant has no project {part.project!r}: name it in its `projects`"
            )
        with standing_at(at):
            draft = _draft(part, there)
        if old is None:
            if draft.expires_at is None or to_us(draft.expires_at) > now_us:
                yield _creation(part, draft, now_us, what, at, tenant)
            continue
        _require_project(part, old, there, at)
        with standing_at(at):
            yield from _change(part, old, draft, there, now_us, what, at)


def ended(wanted: Sequence[ConfigKey], now_us: int) -> Iterator[str]:
    """Names of the keys whose end in the file has passed."""
    for part in wanted:
        if part.expires not in (None, NEVER) and to_us(checks.instant("expires", part.expires)) <= now_us:
            yield part.name


def _draft(part: ConfigKey, there: TenantState) -> ApiKey:
    """The new key. Raises `Invalid`."""
    tiers = chosen_tiers(None if isinstance(part.tiers, str) else part.tiers)
    models = None if isinstance(part.models, str) else checks.models(part.models)
    default = None
    if part.default_tier not in (None, OF_TENANT):
        default = checks.choice("default_tier", Tier, part.default_tier)
    check_within(there.tenant, models, tiers, default)
    return ApiKey(
        key_id="",
        tenant_id="",
        project_id="",
        name=part.name,
        prefix="",
        scopes=scopes(DEFAULT_SCOPES if part.scopes is None else part.scopes),
        models=models,
        tiers=tiers,
        default_tier=default,
        created_at=from_us(0),
        expires_at=None if part.expires in (None, NEVER) else checks.instant("expires", part.expires),
        revoked_at=None,
        allow_from=networks(part.allow_from),
        **checked(_plain(part)),
    )


def _plain(part: ConfigKey) -> dict[str, Any]:
    given = {name: getattr(part, name, None) for name in PLAIN_OF_KEYS}
    return {name: value for name, value in given.items() if value is not None}


def _creation(part: ConfigKey, draft: ApiKey, now_us: int, what: str, at: Place, tenant: str) -> ConfigStep:
    if draft.expires_at is not None:
        with standing_at(at):
            expires_us(now_us, to_us(draft.expires_at), None)
    command = KeyCreate(
        tenant=tenant,
        project=part.project,
        name=part.name,
        scopes=part.scopes,
        models=None if draft.models is None else sorted(draft.models),
        tiers=None if draft.tiers is None else tier_names(draft.tiers),
        default_tier=None if draft.default_tier is None else draft.default_tier.value,
        allow_from=part.allow_from,
        expires=None if draft.expires_at is None else part.expires,
        **_plain(part),
    )
    return ConfigStep("key.create", what, at, command, differences(None, draft.as_json()), tenant, part.name)


def _require_project(part: ConfigKey, old: ApiKey, there: TenantState, at: Place) -> None:
    names = {project.project_id: name for name, project in there.projects.items()}
    if part.project is not None and names.get(old.project_id) != part.project:
        raise ConfigInvalid(
            (*at, "project"),
            f"the key is of {names.get(old.project_id)!r}, which no act changes: give a new key another name,"
            " and this one `state: absent`",
        )


def _change(
    part: ConfigKey, old: ApiKey, draft: ApiKey, there: TenantState, now_us: int, what: str, at: Place
) -> Iterator[ConfigStep]:
    """The fields of the file that differ from `old`, the key within its tenant."""
    stored = next(other for other in there.keys if other.key_id == old.key_id)
    command = KeyChange()
    if part.scopes is not None and draft.scopes != old.scopes:
        command.scopes = part.scopes
    if part.models is not None and draft.models != old.models:
        command.models = sorted(draft.models or ())
    if part.tiers is not None and draft.tiers != old.tiers:
        command.tiers = tier_names(draft.tiers or frozenset())
        old = stored  # its default tier must fit the new tiers, also one that the tenant does not have
    if part.default_tier is not None and draft.default_tier != old.default_tier:
        command.default_tier = "" if draft.default_tier is None else draft.default_tier.value
    if part.allow_from is not None and draft.allow_from != old.allow_from:
        command.allow_from = part.allow_from
    if part.expires is not None and draft.expires_at != old.expires_at:
        command.expires = "" if draft.expires_at is None else part.expires
    for name, value in _plain(part).items():
        if getattr(draft, name) != getattr(old, name):
            command = replace(command, **{name: value})
    if command == KeyChange():
        return
    after = changed_key(stored, command, there.tenant, now_us)
    changes = differences(stored.as_json(), after.as_json())
    yield ConfigStep("key.update", what, at, command, changes, there.tenant.name, old.key_id)
