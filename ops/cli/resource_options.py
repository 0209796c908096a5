"""Options of the commands of resources: filters, the fields of acts' commands, and what is given by them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import click

from ops.cli.options import SHORT_TIMES, Duration, Number, PastInstant, PastStart
from tenants.fields import CommandField, fields_of
from tenants.resources.query import Kind, NamedFilter
from tenants.resources.resource import ResourceAct
from tenants.resources.shown import Json

TIME_OPTIONS = {"since": ("--since", "--from"), "until": ("--until", "--to")}
"""Of all lists: the first is shown, the others are taken, too."""
MANY = (list, dict)
"""Kinds of fields whose option is repeated."""
_NONE = "_none"


def filter_option(one: NamedFilter) -> click.Option:
    kind, declared = one.filter.kind, one.filter
    names = [*TIME_OPTIONS.get(one.field, ()), *declared.option.split()]
    names = names or [f"--{one.name.replace('_', '-')}"]
    if kind is Kind.FLAG:
        name = names[0] if "/" in names[0] else f"{names[0]}/--no-{names[0][2:]}"
        return click.Option([name, one.field], default=None, help=declared.help)
    kinds: dict[Kind, Any] = {
        Kind.CHOICE: click.Choice(declared.choices),
        Kind.SINCE: PastInstant(),
        Kind.UNTIL: PastInstant(),
        Kind.START: PastStart(),
    }
    words = declared.help
    if kind in (Kind.SINCE, Kind.UNTIL, Kind.START):
        words = f"{words.rstrip('.')}: {SHORT_TIMES}."
    return click.Option(
        [*names, one.field],
        type=kinds.get(kind, str),
        default=one.default or declared.usual or None,
        show_default=bool(one.default or declared.usual),
        multiple=kind is Kind.SEVERAL,
        help=words or None,
    )


def command_parameters(act: ResourceAct) -> list[click.Parameter]:
    """What must be given comes first."""
    fields = () if act.command is None else fields_of(act.command)
    params: list[click.Parameter] = []
    for one in sorted(fields, key=lambda one: not one.is_required):
        params.append(field_option(one, act.is_change))
        if act.is_change and one.field.none.startswith("--"):
            params.append(_none_option(one))
    return params


def field_option(one: CommandField, is_change: bool = False) -> click.Parameter:
    words, none = one.field.help, [one.field.none] if is_change and one.has_word else []
    if one.name.endswith("_nanousd"):
        words = f"{words.rstrip('.')} (150 = $0.15 per million tokens)."
    if none:
        words += f"  [{one.field.none}: remove it]"
    elif one.field.without and not is_change:
        words += f"  [default: {one.field.without}]"
    if one.is_flag:
        return click.Option([one.option, one.name], is_flag=True, default=False, help=words)
    # A default of None counts as given: what is required has none at all.
    default: dict[str, Any] = {}
    if not one.is_required and one.kind not in MANY:
        default = {"default": one.field.option_default or one.default}
    kind = _kind_of(one)
    if one.field.choices:
        kind = click.Choice([*map(str, one.field.choices), *none])
    if one.field.is_argument:
        return click.Argument([one.name], type=kind)
    return click.Option(
        [one.option, one.name],
        type=kind,
        metavar=one.field.metavar or None,
        required=one.is_required,
        show_default=default.get("default") not in (None, ""),
        multiple=one.kind in MANY,
        help=words or None,
        **default,
    )


def _kind_of(one: CommandField) -> Any:
    if one.field.is_duration:
        return Duration()
    known, kind = one.field.schema or {}, one.kind
    if kind is list:
        known = known.get("items", {})
        kind = int if known.get("type") == "integer" else str
    if kind not in (int, float):
        return str
    lowest = known.get("minimum", known.get("exclusiveMinimum"))
    return Number(
        kind,
        lowest,
        known.get("maximum"),
        low_open="exclusiveMinimum" in known,
        hundred=one.field.hundred,
    )


def _none_option(one: CommandField) -> click.Option:
    """Empties a field; of a mapping the keys that it names."""
    names, words = [one.field.none, one.name + _NONE], one.field.none_help
    if one.kind is dict:
        return click.Option(names, multiple=True, metavar="KEY", help=words)
    return click.Option(names, is_flag=True, help=words)


def values_of(act: ResourceAct, given: Mapping[str, Any]) -> Json:
    """The fields of a command that options give. Raises `UsageError`."""
    assert act.command is not None
    fields = fields_of(act.command)
    values = {one.name: _value(one, given[one.name], given.get(one.name + _NONE)) for one in fields}
    values = {name: value for name, value in values.items() if value is not None}
    optional = [one for one in fields if not one.field.is_argument]
    # An argument is a change, too, but where it names what is changed.
    changes = optional if act.is_partial else fields
    if act.is_change and not any(values.get(one.name) not in (None, False) for one in changes):
        options = [one.option for one in optional] + [
            one.field.none for one in optional if one.field.none.startswith("--")
        ]
        raise click.UsageError(f"give an option to change: {', '.join(options)}")
    return values


def _value(one: CommandField, given: Any, is_none: Any) -> Any:
    """None: it is not given."""
    if one.kind is dict:
        return _mapping(one, given, is_none) or None
    if one.kind is list:
        if given and is_none:
            raise click.UsageError(f"give {one.option} (repeat) or {one.field.none}, not both")
        if one.has_word and one.field.none in given:
            if len(given) > 1:
                raise click.UsageError(f"{one.option} {one.field.none}: name no other one beside it")
            return []
        return [*given] if given or is_none else None
    return "" if one.has_word and given == one.field.none else given


def _mapping(one: CommandField, given: Iterable[str], dropped: Iterable[str]) -> dict[str, list[str]]:
    values: dict[str, list[str]] = {key: [] for key in dropped}
    for text in given:
        key, separator, value = text.partition("=")
        if not separator or key in dropped:
            raise click.UsageError(f"{one.option} takes KEY=VALUE, of one that is not dropped; not {text!r}")
        values.setdefault(key, []).append(value)
    return values
