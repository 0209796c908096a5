"""The plan of a configuration file: steps, each one admin act, with what it changes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tenants.admin.platform.policy import StoredPolicy
from tenants.admin.transaction import etag_of
from tenants.config_file.base import ConfigInvalid, Place, as_text
from tenants.errors import Invalid


@dataclass(frozen=True, slots=True)
class PolicyMove:
    before: StoredPolicy
    after: StoredPolicy


Command = msgspec.Struct | PolicyMove | None
Record = Mapping[str, Any]

MADE_BY_THE_ACT = frozenset(
    {
        *("id", "tenant_id", "project_id", "kind", "subject_id", "prefix"),
        *("created_at", "counts_since", "version", "override", "now"),
    }
)
"""Fields of records that no file can name."""
_FIELDS = {"burst": "amount", "expires_in_s": "expires"}
"""Names of the acts' fields in the file, where they are others."""


@dataclass(frozen=True, slots=True)
class ConfigStep:
    """One act to come."""

    act: str
    """As the audit will call it."""
    subject: str
    """For people: `tenant acme`, `acme: limit total_tokens per day of project web`."""
    place: Place
    command: Command = None
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Before and after of each field that the audit row will show changed."""
    tenant: str = ""
    reference: str = ""
    """Name of the project or of the new key, or id of the key, limit or target, that it is about."""

    def as_json(self) -> dict[str, Any]:
        return {
            "act": self.act,
            "subject": self.subject,
            "tenant": self.tenant or None,
            "changes": {name: {"before": old, "after": new} for name, (old, new) in self.changes.items()},
        }


@dataclass(frozen=True, slots=True)
class ConfigPlan:
    """What a file asks for at one revision of the directory; no steps: nothing."""

    revision: int
    steps: tuple[ConfigStep, ...]
    unnamed: tuple[str, ...] = ()
    """What is there and the file does not name: it stays."""

    def as_json(self) -> dict[str, Any]:
        return {
            "object": "config.plan",
            "revision": self.revision,
            "etag": etag_of(stored(self.revision)),
            "steps": [step.as_json() for step in self.steps],
            "unnamed": list(self.unnamed),
        }


def stored(revision: int) -> dict[str, int]:
    """What the entity tag of the whole directory is made of."""
    return {"revision": revision}


def differences(before: Record | None, after: Record | None) -> dict[str, tuple[Any, Any]]:
    """The fields that differ, nested ones as `outer.inner`; None: nothing exists."""
    old, new = _flat(before or {}), _flat(after or {})
    names = sorted(set(old) | set(new))
    return {name: (old.get(name), new.get(name)) for name in names if (old.get(name)) != (new.get(name))}


def _flat(record: Record) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{inner}": item for inner, item in _flat(value).items()}
        elif name not in MADE_BY_THE_ACT:
            flat[name] = value
    return flat


@contextmanager
def standing_at(place: Place) -> Iterator[None]:
    """Turns an act's refusal into an error at this place of the file."""
    try:
        yield
    except ConfigInvalid:
        raise
    except Invalid as error:
        raise ConfigInvalid((*place, _FIELDS.get(error.field, error.field)), error.message) from None


class NamedOnce:
    """Finds what a list of the file names twice."""

    def __init__(self) -> None:
        self._places: dict[object, Place] = {}

    def add(self, identity: object, what: str, place: Place) -> None:
        """Raises `ConfigInvalid` for a repeated identity."""
        first = self._places.setdefault(identity, place)
        if first != place:
            raise ConfigInvalid(place, f"{what} stands at {as_text(first)} already")
