"""The configuration file: its shape as structs and as JSON Schema, and places in it.

It holds names, not ids, and never a secret. What is left out of a tenant, project, key or price stays as it
is (of a new one: the default); a limit and a target are replaced as a whole, as their commands do. Money is
in whole nano-dollars a token, amounts are whole numbers: the same fields as those of the commands."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from tenants.config_file.base import State
from tenants.config_file.parts import Resources, documents, part_like, part_of
from tenants.nouns.key import KeyChange
from tenants.nouns.limit import LimitSet
from tenants.pricing.price_row import PriceSet
from tenants.resources.slos import SLOS
from tenants.types import SCOPES, OnLowBudget, Tier

VERSION: Literal[1] = 1
ALL: Literal["all"] = "all"
"""Of `models`: no restriction."""
OF_TENANT: Literal["tenant"] = "tenant"
"""Of a key's `tiers` and `default_tier`: it has none of its own."""
NEVER = "never"
"""Of a key's `expires`: it has no end."""
Models = Annotated[
    list[str] | Literal["all"], Meta(description="Names of models that may be used, or the word `all`.")
]
Networks = Annotated[
    list[str], Meta(description="Networks in CIDR notation that it may be used from; none: anywhere.")
]


def _one_of(values: Any) -> Meta:
    """Names in the schema for editors; the acts check them, and say which there are."""
    return Meta(extra_json_schema={"enum": [str(value) for value in values]})


TierName = Annotated[str, _one_of(Tier)]


class ConfigPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of everything in the file."""


C = TypeVar("C", bound=ConfigPart)
assert SLOS.document is not None
ConfigTarget: Any = part_of(SLOS.document, ConfigPart)
"""A latency target."""
ConfigPrice: Any = part_like(
    "ConfigPrice", PriceSet, ("model",), ConfigPart, without=("free",), has_state=False
)
"""Prices of a model in one tier, or in all; a tier's own come before those of all."""


class ConfigPolicy(ConfigPart):
    """The stored scheduling policy; without it the settings of each gateway count."""

    state: State = "present"
    name: Annotated[str, Meta(description="As of `fairgate policy set`.")] = ""
    options: dict[str, str | int | float] = {}


ConfigLimit: Any = part_like("ConfigLimit", LimitSet, ("meter",), ConfigPart, without=("tenant", "platform"))
"""A limit. There is one for each subject, meter, shape (window, rate or concurrency), tier, model and size of
request. Its key is named."""


class ConfigProject(ConfigPart):
    """A project of a tenant."""

    name: str
    state: State = "present"
    status: Literal["active", "suspended"] | None = None


class ConfigKey(ConfigPart):
    """A key of a tenant, by its name; its secret is made when it is created, and never stands in a file."""

    name: str
    state: State = "present"
    project: Annotated[str | None, Meta(description="Of a new key: `default` where none is named.")] = None
    scopes: list[Annotated[str, _one_of(sorted(SCOPES))]] | None = None
    models: Models | None = None
    tiers: Annotated[
        list[TierName] | Literal["tenant"] | None,
        Meta(description="Tiers that it may use, or the word `tenant`: the tenant's."),
    ] = None
    default_tier: Annotated[
        Annotated[str, _one_of([*Tier, OF_TENANT])] | None,
        Meta(description="The tier of requests that name none; the word `tenant`: the tenant's."),
    ] = None
    allow_from: Networks | None = None
    expires: Annotated[
        str | None,
        Meta(
            description="ISO 8601 with a time zone, such as 2027-01-31T18:00:00+01:00, or the word `never`."
        ),
    ] = None


class ConfigTenant(ConfigPart):
    """A tenant with all that belongs to it."""

    name: str
    state: State = "present"
    status: Literal["active", "suspended"] | None = None
    weight: float | None = None
    tier: Annotated[TierName | None, Meta(description="The tier of requests that name none.")] = None
    tiers: list[TierName] | None = None
    models: Models | None = None
    on_low_budget: Annotated[str, _one_of(OnLowBudget)] | None = None
    reserved_tokens_per_s: float | None = None
    reserved_tier: Annotated[str, _one_of([*Tier, ALL])] | None = None
    labels: Annotated[
        dict[str, list[str]] | None,
        Meta(description="All labels that its requests may carry, each with its values."),
    ] = None
    display_name: Annotated[str | None, Meta(description="For people, with spaces; an empty text: none.")] = (
        None
    )
    projects: list[ConfigProject] = []
    keys: list[ConfigKey] = []
    limits: list[ConfigLimit] = []
    targets: list[ConfigTarget] = []


class Configuration(ConfigPart):
    """A configuration file of Fairgate."""

    version: Annotated[Literal[1], Meta(description="Of this format.")]
    policy: ConfigPolicy | None = None
    prices: list[ConfigPrice] = []
    targets: Annotated[
        list[ConfigTarget], Meta(description="Of each tenant that has none of its own for tier and metric.")
    ] = []
    platform_limits: Annotated[list[ConfigLimit], Meta(description="On all tenants together.")] = []
    tenants: list[ConfigTenant] = []


def _with_sections(base: type[C], resources: Resources, *, of_tenants: bool, tenants: Any = None) -> type[C]:
    """`base` with a section for each resource that has one; `tenants`: the type of its tenants."""
    fields: list[Any] = [] if tenants in (None, ConfigTenant) else [("tenants", list[tenants], [])]
    fields += [
        (document.section, list[part_of(document, ConfigPart)], [])  # type: ignore[misc]
        for _, document in documents(resources, of_tenants=of_tenants)
        if document.section not in base.__struct_fields__
    ]
    if not fields:
        return base
    return msgspec.defstruct(base.__name__, fields, bases=(base,), kw_only=True)  # type: ignore[return-value]


PLAIN_OF_KEYS = tuple(
    name for name in KeyChange.__struct_fields__ if name not in (*ConfigKey.__struct_fields__, "expires_in_s")
)
"""Fields of keys that stand in the file as in the command, and need no words of their own."""


@cache
def key_type() -> type[ConfigKey]:
    if not PLAIN_OF_KEYS:
        return ConfigKey
    others = [name for name in KeyChange.__struct_fields__ if name not in PLAIN_OF_KEYS]
    return part_like("ConfigKey", KeyChange, (), ConfigKey, without=others, has_state=False)  # type: ignore[return-value]


@cache
def tenant_type(resources: Resources) -> type[ConfigTenant]:
    of_keys: Any = key_type()
    base = ConfigTenant
    if of_keys is not ConfigKey:
        keys: list[Any] = [("keys", list[of_keys], [])]
        base = msgspec.defstruct("ConfigTenant", keys, bases=(base,), kw_only=True)  # type: ignore[assignment]
    return _with_sections(base, resources, of_tenants=True)


@cache
def configuration_type(resources: Resources) -> type[Configuration]:
    return _with_sections(Configuration, resources, of_tenants=False, tenants=tenant_type(resources))


def json_schema(resources: Resources) -> dict[str, Any]:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Fairgate configuration",
        **msgspec.json.schema(configuration_type(resources)),
    }
