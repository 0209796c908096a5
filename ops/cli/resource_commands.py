"""Commands of resources: `list` and each act, with options from the structs that routes and pages take."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from functools import partial
from inspect import cleandoc
from typing import TYPE_CHECKING, Any

import click

from gateway.console.formats import money
from ops.cli.administer import actor, administer
from ops.cli.base import Command, Group, answer
from ops.cli.options import Number
from ops.cli.resource_options import command_parameters, filter_option, values_of
from ops.reporting import table
from tenants.admin.cursor import MAX_PAGE, Page
from tenants.audit.field_changes import words
from tenants.instants import from_us
from tenants.resources.query import ListQuery, filters_of
from tenants.resources.reading import query_of, read_all, read_page
from tenants.resources.resource import ActCall, Resource, ResourceAct
from tenants.resources.shown import NONE, Form, Json, Shown

if TYPE_CHECKING:
    from tenants.admin.admin import Admin


def groups(resources: Iterable[Resource[Any]]) -> dict[str, Group]:
    """A group for each noun, by its name, with its lists and acts."""
    made: dict[str, Group] = {}
    for resource in resources:
        group = made.setdefault(
            resource.name, Group(resource.name, help=resource.group_help or f"{resource.title}.")
        )
        add_to(group, resource)
    return made


def add_to(group: Group, resource: Resource[Any]) -> None:
    group.add_command(list_command(resource))
    for act in resource.acts:
        if act.has_command:
            group.add_command(act_command(resource, act))


def list_command(resource: Resource[Any]) -> Command:
    return Command(
        resource.command,
        params=options_of(resource.query, 0 if resource.is_whole else resource.rows),
        callback=partial(_list, resource),
        help=resource.command_help or _help(resource.summary, resource.answers),
    )


def _help(summary: str, answers: str, description: str = "") -> str:
    """Of a command; `\\b`: click leaves the lines of that paragraph as they are."""
    json = cleandoc(answers).replace("\n", "\n  ")
    said = (f"{summary}.", description, json and f"\b\n--json answers {json}")
    return "\n\n".join(filter(None, said))


def options_of(query: type[ListQuery], rows: int) -> list[click.Parameter]:
    """`rows`: of a page, where it is not given; 0: there are no pages."""
    options: list[click.Parameter] = [filter_option(one) for one in filters_of(query)]
    if rows:
        limit = Number(int, 1, MAX_PAGE)
        options += [
            click.Option(["--limit"], type=limit, default=rows, show_default=True, help="Rows at most."),
            click.Option(["--cursor"], help="Next page, with the same filters."),
        ]
    return options


def _list(resource: Resource[Any], limit: int = MAX_PAGE, cursor: str | None = None, **given: Any) -> None:
    async def read(admin: Admin) -> Json:
        query = query_of(resource.query, given)
        if resource.is_whole:
            page = Page(await read_all(admin, resource, query), None)
        else:
            page = await read_page(admin, resource, query, cursor=cursor, limit=limit)
        return {
            "data": await admin.with_names(map(resource.as_json, page.rows)),
            "next_cursor": page.next_cursor,
        }

    document = administer(read)
    answer(document["data"] if resource.is_whole else document, lambda: show_rows(resource, document))


def show_rows(resource: Resource[Any], document: Json) -> None:
    """A table of a page's rows, and the command of the next one."""
    rows, shown = document["data"], [part for part in resource.shown if part.in_table]
    shown = [part for part in shown if not rows or any(_has(row, part) for row in rows)]
    table(resource.title.lower(), [part.label.lower() for part in shown], [cells(row, shown) for row in rows])
    if document.get("next_cursor"):
        click.echo(f"more: {again()} --cursor {document['next_cursor']}")


def again() -> str:
    """This very command: a time ago is the instant that it meant."""
    context, options = click.get_current_context(), []
    for param in context.command.params:
        value = context.params.get(param.name or "")
        if value in (None, (), param.default) or param.name == "cursor":
            continue
        for part in value if isinstance(value, tuple) else (value,):
            options += [(param.opts if part else param.secondary_opts)[0]]
            options += [] if isinstance(part, bool) else [str(part)]
    return shlex.join([*context.command_path.split(), *options])


_NAMES = {Form.TENANT: "tenant_id", Form.PROJECT: "project_id", Form.KEY: "key_id", Form.CHANGES: "before"}


def _has(row: Mapping[str, Any], shown: Shown) -> bool:
    return shown.name in row or _NAMES.get(shown.form) in row


def cells(row: Mapping[str, Any], shown: Iterable[Shown]) -> list[object]:
    return [_cell(row, part) for part in shown]


def _cell(row: Mapping[str, Any], shown: Shown) -> object:
    value = row.get(shown.name)
    match shown.form:
        case Form.TENANT if isinstance(value, list):
            return ", ".join(one["tenant"] or one["tenant_id"] for one in value)
        case Form.TENANT | Form.PROJECT:
            return value or row.get(_NAMES[shown.form]) or _missing(shown)
        case Form.KEY:
            return row.get("key_name") or row.get("key_id")
    if shown.form is Form.CHANGES:
        return words(row["before"], row["after"])
    if value is None:
        return _missing(shown)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(
            f"{name} {part:.3g}" for name, part in value.items() if isinstance(part, int | float)
        )
    match shown.form:
        case Form.INSTANT:
            return f"{from_us(value).isoformat() if isinstance(value, int) else value:.19}Z"
        case Form.TOKEN_PRICE:
            return f"${value / 1000:g}"  # nano-dollars a token are thousandths of a dollar per million
        case Form.NUMBER:
            return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}"
        case Form.MONEY:
            return money(value)
        case Form.SECONDS:
            return f"{value:.3g} s"
        case Form.PERCENT:
            return f"{value:g} %"
        case Form.FACTOR:
            return f"{value:g}"
        case Form.THOUSANDTHS:
            return f"{value / 1_000:g}"
        case Form.SHARE:
            return f"{value / row[shown.of] if shown.of else value:.1%}"
        case _:
            return ", ".join(map(_text, value)) if isinstance(value, list | tuple) else value


def _text(value: object) -> str:
    return ": ".join(map(str, value.values())) if isinstance(value, Mapping) else str(value)


def _missing(shown: Shown) -> str | None:
    return None if shown.missing == NONE else shown.missing


def act_command(resource: Resource[Any], act: ResourceAct) -> Command:
    """The command of an act; its reference, where it has one, comes first."""
    params: list[click.Parameter] = []
    if act.is_on_one:
        params.append(click.Argument(["reference"], metavar=resource.name.upper()))
        if resource.is_named_in_tenant:
            words = f"Tenant (name or id); needed if {resource.name.upper()} is a name."
            params.append(click.Option(["--tenant", "of_tenant"], help=words))
    params += command_parameters(act)
    return Command(
        act.command_verb or act.verb.replace("_", "-"),
        params=params,
        callback=partial(_act, resource, act),
        help=act.command_help or _help(act.summary, act.answers, act.description),
    )


def _act(
    resource: Resource[Any],
    act: ResourceAct,
    reference: str = "",
    of_tenant: str | None = None,
    **given: Any,
) -> None:
    command = None if act.command is None else act.command(**values_of(act, given))

    async def run(admin: Admin) -> Json:
        done = await act.run(admin, ActCall(actor(), reference, command, tenant=of_tenant))
        return (await admin.with_names([done.shown]))[0]

    shown = administer(run)
    if act.is_list:
        answer(shown["data"], lambda: show_rows(resource, shown))
    else:
        answer(shown, act.said(shown))
