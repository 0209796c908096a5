"""Sums of what gateways count beside the accounts, by groups: refusals, and stated against actual figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from sqlalchemy import Connection, Integer, func, literal_column, select
from sqlalchemy.sql import ColumnElement

from tenants.admin.cursor import PAGES, SortKey, beyond
from tenants.counts.calibration import FIGURES, KEPT_S, KINDS, KeptCount
from tenants.counts.refusal_store import (
    KEPT_COUNTS_S,
    KEPT_MINUTES_S,
    MAX_CODE_CHARACTERS,
    MAX_ID_CHARACTERS,
    MAX_MODEL_CHARACTERS,
)
from tenants.instants import from_us
from tenants.people.roles import Act
from tenants.resources.query import Filter, Kind, ListQuery
from tenants.resources.reading import TIMES, conditions_of, span_of
from tenants.resources.resource import PageRequest, Resource
from tenants.resources.shown import Form, Json, Shown
from tenants.storage.tables import calibration_counts, refusal_counts
from tenants.types import Tier

DAY_S = 86_400
WINDOWS_S = {"minute": 60, "hour": 3600, "total": 3600}
"""Windows begin at multiples of this; `total`: the whole time at once, of whole hours."""
USUAL_S = {"minute": 3600, "hour": DAY_S, "total": DAY_S}
"""How far back counts of refusals go where `from` is not given, by window."""
LONGEST_S = {"minute": DAY_S, "hour": 90 * DAY_S, "total": 90 * DAY_S}
"""Of one answer."""
USUAL_CALIBRATION_S = 7 * DAY_S
LONGEST_CALIBRATION_S = 31 * DAY_S
REFUSAL_GROUPS = {"tenant": "tenant_id", "code": "code", "limit": "limit_id"}
CALIBRATION_GROUPS = {
    "model": "model",
    "tier": "tier",
    "figure": "figure",
    "wait": "wait_bucket",
    "kind": "kind",
}
"""Words of `group_by`, and their columns."""
BY_DAY = {"day": "start"} | CALIBRATION_GROUPS
"""The same of calibration with its UTC days, which are asked for by name."""
ALL_REFUSAL_GROUPS, ALL_CALIBRATION_GROUPS = ",".join(REFUSAL_GROUPS), ",".join(CALIBRATION_GROUPS)
NUMBERS = ("start", "wait_bucket")
"""Groups that are no text."""
_refused, _kept = refusal_counts.c, calibration_counts.c


class RefusalCountQuery(ListQuery, frozen=True, rename=TIMES):
    """Which refusals to count, and by what."""

    window: Annotated[str, Filter(kind=Kind.CHOICE, choices=tuple(WINDOWS_S))] = "hour"
    group_by: Annotated[
        str,
        Filter(
            kind=Kind.WORDS,
            choices=tuple(REFUSAL_GROUPS),
            help="Some of these, with commas between them; empty: by time alone.",
        ),
    ] = ALL_REFUSAL_GROUPS
    tenant: Annotated[str | None, Filter(_refused.tenant_id, Kind.TENANT)] = None
    code: Annotated[
        str | None,
        Filter(_refused.code, help="The error's code, such as insufficient_quota.", most=MAX_CODE_CHARACTERS),
    ] = None
    limit_id: Annotated[
        str | None, Filter(_refused.limit_id, help="The limit that refused them.", most=MAX_ID_CHARACTERS)
    ] = None
    since: Annotated[str | None, Filter(kind=Kind.SINCE)] = None
    until: Annotated[str | None, Filter(kind=Kind.UNTIL)] = None


class CalibrationQuery(ListQuery, frozen=True, rename=TIMES):
    """Which stated figures to compare with the actual ones, and by what."""

    group_by: Annotated[
        str,
        Filter(kind=Kind.WORDS, choices=tuple(BY_DAY), help="Some of these, with commas between them."),
    ] = ALL_CALIBRATION_GROUPS
    model: Annotated[str | None, Filter(_kept.model, most=MAX_MODEL_CHARACTERS)] = None
    tier: Annotated[str | None, Filter(_kept.tier, Kind.CHOICE, choices=tuple(Tier))] = None
    figure: Annotated[str | None, Filter(_kept.figure, Kind.CHOICE, choices=FIGURES)] = None
    kind: Annotated[
        str | None, Filter(_kept.kind, Kind.CHOICE, choices=KINDS, help="Binding: redeemed quotes.")
    ] = None
    since: Annotated[
        str | None, Filter(kind=Kind.SINCE, help="From this time on; by default the last seven days.")
    ] = None
    until: Annotated[str | None, Filter(kind=Kind.UNTIL)] = None


class GroupedRow(NamedTuple):
    key: SortKey
    """Values of the groups."""
    shown: Json


def _groups(group_by: str, known: Mapping[str, str]) -> list[str]:
    """Columns of the words given, in the order of `known`."""
    words = [word.strip() for word in group_by.split(",") if group_by.strip()]
    return [column for word, column in known.items() if word in words]


def _refusal_groups(query: RefusalCountQuery) -> list[str]:
    return [*([] if query.window == "total" else ["start"]), *_groups(query.group_by, REFUSAL_GROUPS)]


def _key_types(groups: Sequence[str]) -> tuple[type, ...]:
    return tuple(int if group in NUMBERS else str for group in groups)


def _read_refusals(connection: Connection, request: PageRequest) -> tuple[list[GroupedRow], SortKey | None]:
    """The oldest first."""
    query = request.query
    window_s, groups = WINDOWS_S[query.window], _refusal_groups(query)
    since_s, until_s = _span_s(request, USUAL_S[query.window], LONGEST_S[query.window])
    # A literal: PostgreSQL takes two parameters of one value for two expressions.
    start = _refused.minute_s - _refused.minute_s % literal_column(str(window_s), Integer)
    first_s: Any = since_s // window_s * window_s
    if request.after and "start" in groups:
        first_s = request.after[0]
    where = [_refused.minute_s >= first_s, _refused.minute_s < until_s]
    columns = {name: start if name == "start" else _refused[name] for name in groups}
    sums = {"count": func.sum(_refused["count"])}
    return _grouped(connection, request, columns, sums, where), None


def _read_calibration(
    connection: Connection, request: PageRequest
) -> tuple[list[GroupedRow], SortKey | None]:
    since_s, until_s = _span_s(request, USUAL_CALIBRATION_S, LONGEST_CALIBRATION_S)
    where = [_kept.hour_s >= since_s // 3600 * 3600, _kept.hour_s < until_s]
    day = _kept.hour_s - _kept.hour_s % literal_column(str(DAY_S), Integer)
    names = _groups(request.query.group_by, BY_DAY)
    columns = {name: day if name == "start" else _kept[name] for name in names}
    sums = {name: func.sum(_kept[name]) for name in KeptCount._fields}
    return _grouped(connection, request, columns, sums, where), None


def _grouped(
    connection: Connection,
    request: PageRequest,
    groups: Mapping[str, ColumnElement[Any]],
    sums: Mapping[str, ColumnElement[Any]],
    where: list[ColumnElement[bool]],
) -> list[GroupedRow]:
    """Sums by groups, in the order of the groups."""
    columns = list(groups.values())
    where = [*where, *conditions_of(connection, request).values()]
    if request.after:
        where.append(beyond(columns, request.after))
    labelled = [column.label(label) for label, column in {**groups, **sums}.items()]
    query = select(*labelled).where(*where).group_by(*columns).order_by(*columns).limit(request.most)
    rows = []
    for found in connection.execute(query).mappings():
        if found[next(iter(sums))]:  # without groups there is one row, also where nothing is added up
            row = dict(found) | {name: int(found[name]) for name in sums}
            if "start" in row:
                row["start"] = from_us(row["start"] * 1_000_000).isoformat()
            rows.append(GroupedRow(tuple(found[group] for group in groups), row))
    return rows


def _span_s(request: PageRequest, usual_s: int, longest_s: int) -> tuple[int, int]:
    """The first second and the one after the last. Raises `Invalid`."""
    since_us, until_us = span_of(request, usual_s * 1_000_000, longest_s * 1_000_000)
    return since_us // 1_000_000, -(-until_us // 1_000_000)


REFUSAL_COUNTS = Resource(
    name="refusal",
    plural="refusals/counts",
    title="refusals",
    query=RefusalCountQuery,
    read=_read_refusals,
    order=lambda query: _key_types(_refusal_groups(query)),
    key_of=lambda row: row.key,
    as_json=lambda row: row.shown,
    scope="admin:read",
    act=Act.READ_PLATFORM,
    summary="Count refused requests, exactly",
    description=f"The oldest first, at most {LONGEST_S['minute'] // DAY_S} day of minutes or"
    f" {LONGEST_S['hour'] // DAY_S} of hours; `total`: the whole time at once, without `start`. Without"
    f" `from` the last hour, or day. {PAGES} Minutes are kept for {KEPT_MINUTES_S // DAY_S} days, hours for"
    f" {KEPT_COUNTS_S // DAY_S}. The last second is not in yet.",
    shown=(
        Shown("start", "From", Form.INSTANT),
        Shown("tenant", "Tenant", Form.TENANT),
        Shown("code", "Code"),
        Shown("limit_id", "Limit"),
        Shown("count", "Count", Form.NUMBER),
    ),
    has_page=False,
    command="counts",
    command_help="""Counts refused requests exactly, oldest first; without --since the last hour or day.

    \b
    --json answers, with the groups that were asked for:
      {"data": [{"start": "2026-01-31T12:00:00+00:00", "tenant_id": "ten_…", "tenant": "acme",
       "code": "insufficient_quota", "limit_id": "lim_…", "count": 1812}, …], "next_cursor": null}
    """,
)
CALIBRATION = Resource(
    name="forecast",
    plural="calibration",
    title="told against happened",
    query=CalibrationQuery,
    read=_read_calibration,
    order=lambda query: _key_types(_groups(query.group_by, BY_DAY)),
    key_of=lambda row: row.key,
    as_json=lambda row: row.shown,
    scope="admin:read",
    act=Act.READ_PLATFORM,
    summary="Told against happened: how many requests stayed within the p50 and the p90 that they were told",
    description="Of requests that were answered in full and did not change their tier: their wait, time to"
    " first token, whole time and output tokens against the estimate made on arrival, or the quote that they"
    " redeemed (`kind`). `wait_bucket`: by the wait that was told (p50), at most `wait_up_to_s`. Whole hours;"
    f" at most {LONGEST_CALIBRATION_S // DAY_S} days. {PAGES} Kept for {KEPT_S // DAY_S} days.",
    shown=(
        Shown("model", "Model"),
        Shown("tier", "Tier"),
        Shown("figure", "Figure"),
        Shown("wait_bucket", "Wait bucket"),
        Shown("kind", "Kind"),
        Shown("requests", "Requests", Form.NUMBER),
        Shown("within_p50", "Within p50", Form.SHARE, of="requests"),
        Shown("within_p90", "Within p90", Form.SHARE, of="requests"),
    ),
    has_page=False,
    command="calibration",
    command_help="""Shows how many requests stayed within the estimated p50 and p90.

    \b
    --json answers, with the groups that were asked for:
      {"data": [{"model": "m", "tier": "standard", "figure": "ttft", "wait_bucket": 2, "kind": "plain",
       "requests": 812, "within_p50": 431, "within_p90": 760}, …], "next_cursor": null}
    """,
)
