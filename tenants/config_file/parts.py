"""Sections of the file that follow from a resource's declaration: their shape, steps and export. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec
from msgspec import Meta

from tenants.config_file.base import ConfigInvalid, Place, State
from tenants.config_file.steps import ConfigStep, NamedOnce, differences, standing_at
from tenants.fields import CommandField, fields_of
from tenants.resources.resource import Document, Resource

Resources = Sequence[Resource[Any]]


def documents(resources: Resources, *, of_tenants: bool) -> Iterator[tuple[Resource[Any], Document[Any]]]:
    """The resources with a section of the file, or of each tenant in it."""
    for resource in resources:
        document = resource.document
        if document is not None and (document.of_tenants if of_tenants else document.of_platform):
            yield resource, document


@cache
def part_of(document: Document[Any], base: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """A part of the section. `base`: of all parts."""
    return part_like(document.part_name, document.command, document.names, base)


def part_like(
    name: str,
    command: type[msgspec.Struct],
    names: Sequence[str],
    base: type[msgspec.Struct],
    without: Sequence[str] = ("tenant",),
    *,
    has_state: bool = True,
) -> type[msgspec.Struct]:
    """A struct of the command's fields, and `state`. What is not among `names` may be left out."""
    fields: list[tuple[Any, ...]] = []
    declared = {one.name: one for one in fields_of(command)}
    for one in msgspec.structs.fields(command):
        if one.name in without:
            continue
        kind = _described(one.type, declared[one.name])
        if one.name in names:
            fields.append((one.name, kind))
        else:
            fields.append((one.name, kind | None, None) if one.required else (one.name, kind, one.default))
    fields += [("state", State, "present")] if has_state else []
    return msgspec.defstruct(name, fields, bases=(base,), kw_only=True)


def _described(kind: Any, one: CommandField) -> Any:
    """The type with what its field declares; of one that may be null, the other kind."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    described = Meta(description=one.field.help or None, extra_json_schema=one.json_schema or None)
    others = [part for part in get_args(kind) if part is not NoneType]
    if get_origin(kind) in (Union, UnionType) and len(others) == 1:
        return Annotated[others[0], described] | None
    return Annotated[kind, described]


def part_steps(
    resource: Resource[Any],
    document: Document[Any],
    tenant: str,
    wanted: Iterable[Any],
    there: Iterable[Any],
    place: Place,
) -> Iterator[ConfigStep]:
    """Steps for one tenant's section, or (tenant '') for the platform's."""
    seen, stored = NamedOnce(), [resource.as_json(row) for row in there]
    old = {tuple(row[name] for name in document.names): row for row in stored}
    for number, part in enumerate(wanted):
        at = (*place, number)
        name = tuple(getattr(part, field) for field in document.names)
        what = described(document, tenant, name)
        seen.add(name, f"the {what.partition(': ')[2]}", at)
        before = old.get(name)
        if part.state == "absent":
            if before is not None:
                changes = differences(before, None)
                yield ConfigStep(document.remove, what, at, None, changes, tenant, before["id"])
            continue
        command = _command(document, part, tenant, at)
        with standing_at(at):
            after = document.draft(command)
        changes = differences(before, resource.as_json(after))
        if changes:
            yield ConfigStep(document.set, what, at, command, changes, tenant)


def _command(document: Document[Any], part: Any, tenant: str, at: Place) -> Any:
    values: dict[str, Any] = {}
    for one in msgspec.structs.fields(document.command):
        value = (tenant or None) if one.name == "tenant" else getattr(part, one.name)
        if value is None and one.required:
            raise ConfigInvalid((*at, one.name), "is missing, and has no default")
        values[one.name] = value
    return document.command(**values)


def described(document: Document[Any], tenant: str, name: Sequence[Any]) -> str:
    """`acme: target ttft in tier interactive`."""
    return (
        f"{tenant or 'all tenants'}: {document.what.format(**dict(zip(document.names, name, strict=True)))}"
    )


def exported_parts(
    resource: Resource[Any], document: Document[Any], base: type[msgspec.Struct], rows: Iterable[Any]
) -> list[msgspec.Struct]:
    part, parts = part_of(document, base), []
    for row in sorted(rows, key=document.order):
        shown = resource.as_json(row)
        parts.append(part(**{name: shown[name] for name in part.__struct_fields__ if name in shown}))
    return parts


def unnamed_parts(
    document: Document[Any], tenant: str, there: Iterable[Any], wanted: Iterable[Any]
) -> Iterator[str]:
    """What is there and the file does not name."""
    named = {_name(document, part) for part in wanted}
    for part in there:
        if _name(document, part) not in named:
            yield described(document, tenant, _name(document, part))


def _name(document: Document[Any], part: Any) -> tuple[Any, ...]:
    return tuple(getattr(part, field) for field in document.names)
