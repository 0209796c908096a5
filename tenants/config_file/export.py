"""A state as a configuration file, in one order, so that equal states give equal bytes. Pure.

All fields of a tenant are in it, also defaults, so that later changes show as a difference. Left out are keys
without a unique name with their limits, and overrides and brakes, which end by themselves."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from ruamel.yaml import YAML

from tenants.config_file.document import (
    ALL,
    NEVER,
    OF_TENANT,
    PLAIN_OF_KEYS,
    VERSION,
    ConfigLimit,
    ConfigPart,
    ConfigPolicy,
    ConfigPrice,
    ConfigProject,
    ConfigTenant,
    Configuration,
    configuration_type,
    key_type,
    tenant_type,
)
from tenants.config_file.parts import Resources, documents, exported_parts
from tenants.config_file.plan_limits import name_of
from tenants.config_file.state import (
    EACH_END_USER,
    PLATFORM_LIMIT,
    TENANT_LIMIT,
    ConfigState,
    SubjectName,
    TenantState,
)
from tenants.nouns.limit import terms_of
from tenants.nouns.tenant import tier_names
from tenants.pricing.price_row import entry_columns
from tenants.pricing.pricing import PriceBook
from tenants.types import Limit, Tier

LIMIT_ORDER = (PLATFORM_LIMIT, TENANT_LIMIT, "project", "key", EACH_END_USER, "end_user")
LONGEST_LINE = 2**16


def exported(state: ConfigState, resources: Resources) -> Configuration:
    """The file that makes no steps with this state."""
    platform = [(SubjectName(PLATFORM_LIMIT), limit) for limit in state.platform_limits]
    policy = state.policy
    return configuration_type(resources)(
        version=VERSION,
        policy=None if policy is None else ConfigPolicy(name=policy.name, options=_sorted(policy.options)),
        prices=list(_prices(state.prices)),
        **_sections(resources, state.parts, of_tenants=False),
        platform_limits=_limits(platform),
        tenants=[_tenant(tenant, resources) for _, tenant in sorted(state.tenants.items())],
    )


def left_out(state: ConfigState) -> list[str]:
    """The keys and limits that cannot be named in a file, and why."""
    names: list[str] = []
    for name, there in sorted(state.tenants.items()):
        named = {key.key_id for key in there.named_keys()}
        for key in sorted(there.keys, key=lambda key: (key.name, key.key_id)):
            if key.key_id not in named:
                is_shared = any(other.name == key.name for other in there.keys if other is not key)
                why = "another has its name" if is_shared else "what its tenant allows leaves it nothing"
                names.append(f"{name}: key {key.key_id}: {why if key.name else 'it has no name'}")
        limits = {limit.limit_id for _, limit in there.named_limits()}
        missing = [limit.limit_id for limit in there.limits if limit.limit_id not in limits]
        names += [f"{name}: limit {limit_id}: of a key that is left out or over" for limit_id in missing]
    return names


def as_yaml(wanted: Configuration) -> str:
    writer: Any = YAML(typ="safe", pure=True)
    writer.default_flow_style = False
    writer.allow_unicode = True
    writer.width = LONGEST_LINE
    writer.sort_base_mapping_type_on_output = False
    text = io.StringIO()
    writer.dump(msgspec.to_builtins(wanted), text)
    return text.getvalue()


def _sorted(values: Any) -> dict[str, Any]:
    return dict(sorted(values.items()))


def _tenant(there: TenantState, resources: Resources) -> ConfigTenant:
    tenant = there.tenant
    projects = {project.project_id: project.name for project in there.projects.values()}
    return tenant_type(resources)(
        name=tenant.name,
        status=tenant.status,
        weight=tenant.weight,
        tier=tenant.default_tier.value,
        tiers=tier_names(tenant.tiers),
        models=ALL if tenant.models is None else sorted(tenant.models),
        on_low_budget=tenant.on_low_budget.value,
        reserved_tokens_per_s=tenant.reserved_tokens_per_s,
        reserved_tier=ALL if tenant.reserved_tier is None else tenant.reserved_tier.value,
        labels={key: list(values) for key, values in sorted(tenant.labels.items())},
        display_name=tenant.display_name,
        projects=[
            ConfigProject(name=name, status=project.status)
            for name, project in sorted(there.projects.items())
        ],
        keys=[
            key_type()(
                name=key.name,
                project=projects[key.project_id],
                scopes=sorted(key.scopes),
                models=ALL if key.models is None else sorted(key.models),
                tiers=OF_TENANT if key.tiers is None else tier_names(key.tiers),
                default_tier=OF_TENANT if key.default_tier is None else key.default_tier.value,
                allow_from=[str(network) for network in key.allow_from],
                expires=NEVER if key.expires_at is None else key.expires_at.isoformat(),
                **{name: key.as_json()[name] for name in PLAIN_OF_KEYS},
            )
            for key in there.named_keys()
        ],
        limits=_limits(there.named_limits()),
        **_sections(resources, there.parts, of_tenants=True),
    )


def _limits(named: Iterable[tuple[SubjectName, Limit]]) -> list[ConfigLimit]:
    def order(pair: tuple[SubjectName, Limit]) -> tuple[Any, ...]:
        subject, *name = name_of(*pair)
        return LIMIT_ORDER.index(subject.kind), subject.name, *name

    return [_limit(subject, limit) for subject, limit in sorted(named, key=order)]


def _limit(subject: SubjectName, limit: Limit) -> ConfigLimit:
    own: dict[str, Any] = {}
    if subject.kind == EACH_END_USER:
        own = {EACH_END_USER: True}
    elif subject.kind not in (PLATFORM_LIMIT, TENANT_LIMIT):
        own = {subject.kind: subject.name}
    return ConfigLimit(**terms_of(limit), **own)


def _sections(
    resources: Resources, parts: Mapping[str, Sequence[Any]], *, of_tenants: bool
) -> dict[str, Any]:
    return {
        document.section: exported_parts(resource, document, ConfigPart, parts.get(document.section, ()))
        for resource, document in documents(resources, of_tenants=of_tenants)
    }


def _prices(book: PriceBook) -> Iterator[ConfigPrice]:
    """What all tiers of a model have in common, then what each has for itself."""
    for model in sorted(book.models):
        by_tier = {
            tier: entry_columns(book.entries[model, tier]) for tier in Tier if (model, tier) in book.entries
        }
        shared: dict[str, Any] = {}
        if len(by_tier) == len(Tier):
            first, *others = by_tier.values()
            shared = {name: value for name, value in first.items() if all(o[name] == value for o in others)}
            yield ConfigPrice(model=model, **shared)
        for tier, columns in by_tier.items():
            own: dict[str, Any] = {name: value for name, value in columns.items() if name not in shared}
            if own:
                yield ConfigPrice(model=model, tier=tier.value, **own)
