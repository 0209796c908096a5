"""Names beside ids, as the API and the command line show tenants, projects and keys.

`tenant` goes with `tenant_id`, `project` with `project_id`, `key_name` with `key_id` (a `key` is a secret),
and `subject` with a limit's `subject_id`. A project without its `tenant_id` gets the name of its `tenant`, as
projects of several tenants have the same name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sqlalchemy import Connection

from tenants.directory import queries

SHOWN = {
    "tenant_id": ("tenant", "tenant"),
    "project_id": ("project", "project"),
    "key_id": ("key", "key_name"),
}
"""Field with an id -> the kind of thing, and the field that gets its name."""


def with_names(connection: Connection, items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The items, and lists of items within them, each id followed by the name; None: unknown, or no id."""
    shown = list(items)
    wanted: dict[str, set[str]] = {kind: set() for kind in queries.NAMED}
    for item in _flat(shown):
        for field, (kind, _) in _fields(item).items():
            if item[field]:
                wanted[kind].add(item[field])
    names = {kind: queries.names_of(connection, kind, ids) for kind, ids in wanted.items()}
    alone = {item["project_id"] for item in shown if _is_alone(item) and item["project_id"]}
    owners = queries.owners_of(connection, alone) if alone else {}
    return [
        ({"tenant": owners.get(item["project_id"])} if _is_alone(item) else {}) | _named(item, names)
        for item in shown
    ]


def _is_alone(item: Mapping[str, Any]) -> bool:
    return "project_id" in item and "tenant_id" not in item


def _named(item: Mapping[str, Any], names: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    fields, named = _fields(item), {}
    for field, value in item.items():
        named[field] = [_named(inner, names) for inner in value] if _is_list(value) else value
        if field in fields:
            kind, beside = fields[field]
            named[beside] = names[kind].get(value)
    return named


def _flat(items: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for item in items:
        yield item
        for value in item.values():
            if _is_list(value):
                yield from _flat(value)


def _is_list(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, Mapping) for item in value)


def _fields(item: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    fields = {field: shown for field, shown in SHOWN.items() if field in item}
    if "subject_id" in item and item.get("kind") in queries.NAMED:
        fields["subject_id"] = (item["kind"], "subject")
    return fields
