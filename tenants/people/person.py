"""A person who may log in to the console, commands on people, and one-time links to set a password."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from tenants.errors import Invalid
from tenants.fields import Field
from tenants.instants import from_us
from tenants.people.roles import Act, Role, may

MAX_NAME_CHARS = 120
"""So that `person:<name>` fits an actor of the audit."""
NAME = re.compile(r"[\w.@+-]+")
MAX_PEOPLE = 10_000
MAX_TENANTS_OF_A_MEMBER = 100

PersonStatus = Literal["active", "suspended"]
LINK_PATH = "/console/set-up"
LINK_S = 86_400
"""A link works once, for a day."""


@dataclass(frozen=True, slots=True)
class Person:
    """A person. `tenants` are ids, of members only."""

    person_id: str
    name: str
    role: Role
    tenants: frozenset[str]
    status: PersonStatus
    has_password: bool
    """False: invited or reset, and the link was not used yet."""
    revision: int
    """Raised by every change. A session is valid only for the revision that it was opened at."""
    created_us: int

    @property
    def actor_name(self) -> str:
        return f"person:{self.name}"

    def may(self, act: Act, tenant_id: str | None = None) -> bool:
        return self.status == "active" and may(self.role, self.tenants, act, tenant_id)

    def may_somewhere(self, act: Act) -> bool:
        """Whether this person may do `act`, of some tenant at least."""
        return self.may(act) or any(self.may(act, tenant_id) for tenant_id in self.tenants)

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.person_id,
            "name": self.name,
            "role": self.role.value,
            "tenants": [{"tenant_id": tenant_id} for tenant_id in sorted(self.tenants)],
            "status": self.status,
            "has_password": self.has_password,
            "revision": self.revision,
            "created_at": from_us(self.created_us).isoformat(),
        }


def folded(name: str) -> str:
    """A name as it is stored and compared."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())


def person_name(value: str) -> str:
    """A new name, folded: an e-mail address or a plain name. Raises `Invalid`."""
    name = folded(value) if isinstance(value, str) else ""
    if len(name) > MAX_NAME_CHARS or not NAME.fullmatch(name):
        raise Invalid(
            "name",
            f"use 1 to {MAX_NAME_CHARS} letters, digits, '.', '_', '-', '+' or '@', as in an e-mail address",
        )
    if name.startswith("psn_"):
        raise Invalid("name", "must not look like an id (psn_)")
    return name


Tenants = Annotated[list[str] | None, Field("Tenant of a member (repeat; names or ids).", option="--tenant")]


class PersonInvite(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Invites a person."""

    name: Annotated[
        str,
        Field(
            is_argument=True, schema={"minLength": 1, "pattern": r"^[\w.@+-]+$", "maxLength": MAX_NAME_CHARS}
        ),
    ]
    """An e-mail address or a plain name, unique however it is capitalised."""
    role: Annotated[str, Field("What the person may do.", choices=tuple(Role))]
    tenants: Tenants = None
    """At least one."""


class PersonChange(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Changes a person's role, or a member's tenants."""

    role: Annotated[str | None, Field(is_argument=True, choices=tuple(Role))] = None
    tenants: Tenants = None
    """Replaces those that a member has; for other roles there are none."""


@dataclass(frozen=True, slots=True)
class PersonLink:
    token: str
    name: str | None
    """Whose password it sets; None: a name is chosen with it, and it makes the first owner."""
    role: Role

    @property
    def is_set_up(self) -> bool:
        return self.name is None


def link_path(token: str) -> str:
    return f"{LINK_PATH}?token={token}"
