"""The last hour of all gateways by minute: service of tenants against their weights, and what happened."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection

from gateway.deps import GatewayDeps
from tenants.counts.minute_store import (
    HOUR_US,
    MINUTE_US,
    EngineKey,
    EngineMinute,
    FlowKey,
    FlowMinute,
    engines_by_minute,
    flow_by_window,
)
from tenants.instants import from_us, to_us
from tenants.resources.reading import read_page
from tenants.resources.records.audit import AUDIT, AuditQuery
from tenants.resources.records.moves import MOVES, MoveQuery
from tenants.storage.tables import engine_minutes, flow_minutes

MINUTES = 60
MOST_ROWS = 50_000
"""An hour of some 800 tenants."""
MOST_LINES = 4
"""Tenants with a line of their own."""
MOST_EVENTS = 8
MOST_TENANTS = 50
ACTS = {"policy": "policy changed", "brake.set": "brake set", "brake.end": "brake ended"}
LEFT, RIGHT, TOP, BOTTOM = 46, 752, 20, 164


@dataclass(frozen=True, slots=True)
class HourRow:
    """A tenant in one tier; cost tokens of the hour."""

    tenant_id: str
    name: str
    tier: str
    served: int
    entitled: float
    fair: int
    arrivals: int
    before_line_s: float | None


@dataclass(frozen=True, slots=True)
class HourLine:
    name: str
    tenant_id: str
    """Empty: all others together."""
    colour: str
    part: float
    """Of the service of the hour."""
    entitled: float
    points: str
    entitled_points: str


@dataclass(frozen=True, slots=True)
class HourEvent:
    at_us: int
    words: str
    href: str


@dataclass(frozen=True, slots=True)
class PastHour:
    lines: tuple[HourLine, ...] = ()
    """Most service first."""
    rows: tuple[HourRow, ...] = ()
    more_rows: int = 0
    marks: tuple[tuple[int, float, HourEvent], ...] = ()
    """Events with their number and place, oldest first."""
    y_ticks: tuple[tuple[float, str], ...] = ()
    x_ticks: tuple[tuple[float, str], ...] = ()


Minutes = Sequence[tuple[FlowKey, FlowMinute]]


def entitled_by_weight(rows: Minutes, weights: Mapping[str, float]) -> dict[tuple[int, str, str], float]:
    """By minute, tier and tenant: the part of the tier's service that the weight gives, among those that had,
    were due or waited for something in that minute."""
    served: Counter[tuple[int, str]] = Counter()
    active: defaultdict[tuple[int, str], set[str]] = defaultdict(set)
    for key, counts in rows:
        served[key.minute_us, key.tier] += counts.served_tokens
        active[key.minute_us, key.tier].add(key.tenant_id)
    found = {}
    for (minute_us, tier), tenants in active.items():
        whole = sum(weights.get(tenant_id, 1.0) for tenant_id in tenants) or 1.0
        for tenant_id in tenants:
            part = weights.get(tenant_id, 1.0) / whole
            found[minute_us, tier, tenant_id] = part * served[minute_us, tier]
    return found


def past_hour(
    rows: Minutes,
    names: Mapping[str, str],
    weights: Mapping[str, float],
    events: Iterable[HourEvent],
    now_us: int,
) -> PastHour:
    """Pure. The newest minute shown is the newest that is written."""
    this_us = now_us // MINUTE_US * MINUTE_US
    last_us = max([this_us - 2 * MINUTE_US, *(key.minute_us for key, _ in rows)])
    first_us = last_us - (MINUTES - 1) * MINUTE_US
    rows = [(key, counts) for key, counts in rows if key.minute_us >= first_us]
    entitled = entitled_by_weight(rows, weights)
    served_by: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for key, counts in rows:
        served_by[key.tenant_id][key.minute_us] += counts.served_tokens
    due_by: defaultdict[str, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
    for (minute_us, _, tenant_id), tokens in entitled.items():
        due_by[tenant_id][minute_us] += tokens
    total = sum(sum(each.values()) for each in served_by.values())
    ordered = sorted(served_by, key=lambda one: (-sum(served_by[one].values()), names.get(one, one)))
    groups = [[one] for one in ordered[:MOST_LINES]]
    if len(ordered) > MOST_LINES:
        groups.append(ordered[MOST_LINES:])
    minutes = range(first_us, last_us + 1, MINUTE_US)
    series = [
        tuple(
            [sum(of[one][minute_us] for one in group) / 60 for minute_us in minutes]
            for of in (served_by, due_by)
        )
        for group in groups
    ]
    step, most = _scale(max((value for pair in series for line in pair for value in line), default=0.0))
    lines = []
    for place, (group, (had, due)) in enumerate(zip(groups, series, strict=True)):
        is_rest = place == MOST_LINES
        lines.append(
            HourLine(
                f"{len(group):,} others" if is_rest else names.get(group[0], group[0]),
                "" if is_rest else group[0],
                "rest" if is_rest else str(place + 1),
                60 * sum(had) / total if total else 0.0,
                60 * sum(due) / total if total else 0.0,
                _points(had, most),
                _points(due, most),
            )
        )
    table = _hour_rows(rows, names, entitled)
    shown = sorted(
        (each for each in events if first_us <= each.at_us <= now_us), key=lambda each: each.at_us
    )[-MOST_EVENTS:]
    return PastHour(
        tuple(lines),
        tuple(table[:MOST_TENANTS]),
        max(0, len(table) - MOST_TENANTS),
        tuple((number, _x((one.at_us - first_us) / MINUTE_US), one) for number, one in enumerate(shown, 1)),
        tuple((_y(tick * step, most), _short(tick * step)) for tick in range(round(most / step) + 1)),
        tuple(
            (_x(MINUTES - 1 - back), "now" if not back else f"{back} min ago") for back in (59, 45, 30, 15, 0)
        ),
    )


def _hour_rows(
    rows: Minutes, names: Mapping[str, str], entitled: Mapping[tuple[int, str, str], float]
) -> list[HourRow]:
    sums: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for key, counts in rows:
        more = (counts.served_tokens, counts.fair_tokens, counts.arrivals, counts.before_line_us)
        whose = (key.tenant_id, key.tier)
        sums[whose] = [mine + other for mine, other in zip(sums[whose], more, strict=True)]
    by_weight: Counter[tuple[str, str]] = Counter()
    for (_, tier, tenant_id), tokens in entitled.items():
        by_weight[tenant_id, tier] += tokens  # type: ignore[assignment]
    made = [
        HourRow(
            tenant_id,
            names.get(tenant_id, tenant_id),
            tier,
            served,
            by_weight[tenant_id, tier],
            fair,
            arrivals,
            before_us / arrivals / 1e6 if arrivals else None,
        )
        for (tenant_id, tier), (served, fair, arrivals, before_us) in sums.items()
    ]
    return sorted(made, key=lambda row: (-row.served, row.name, row.tier))


def _scale(most: float) -> tuple[float, float]:
    """The step between ticks, and the end of the axis: at most four steps."""
    step, factors = 1.0, (2.0, 2.5, 2.0)
    number = 0
    while most > 4 * step:
        step *= factors[number % 3]
        number += 1
    return step, step * max(1, -(-most // step))


def _short(value: float) -> str:
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"


def _x(minute: float) -> float:
    return round(LEFT + (RIGHT - LEFT) * max(0.0, min(1.0, minute / (MINUTES - 1))), 1)


def _y(value: float, most: float) -> float:
    return round(BOTTOM - (BOTTOM - TOP) * value / most, 1)


def _points(values: Iterable[float], most: float) -> str:
    return " ".join(f"{_x(minute):g},{_y(value, most):g}" for minute, value in enumerate(values))


def replica_events(rows: Iterable[tuple[EngineKey, EngineMinute]]) -> list[HourEvent]:
    """Replicas that went down, or came back, between one minute and the next."""
    before: dict[tuple[str, str], str] = {}
    found = []
    for key, counts in sorted(rows, key=lambda row: row[0]):
        was = before.get((key.pool, key.replica), counts.state)
        if was != counts.state:
            words = f"replica {key.replica} {'lost' if counts.state == 'down' else 'is back'}"
            found.append(HourEvent(key.minute_us, words, "/console/upstreams"))
        before[key.pool, key.replica] = counts.state
    return found


async def _acts(deps: GatewayDeps, since: str) -> list[HourEvent]:
    found = []
    for act, words in ACTS.items():
        page = await read_page(deps.admin, AUDIT, AuditQuery(act=act, since=since), limit=MOST_EVENTS)
        found += [
            HourEvent(to_us(row.at), f"{words} by {row.actor.removeprefix('person:')}", "/console/policy")
            for row in page.rows
        ]
    moves = await read_page(deps.admin, MOVES, MoveQuery(made=True, since=since), limit=MOST_EVENTS)
    found += [
        HourEvent(move.at_us, f"control loop moved {move.knob} to {move.after:g}", "/console/policy")
        for move in moves.rows
    ]
    return found


async def read_past_hour(deps: GatewayDeps, further: Sequence[HourEvent], now_us: int) -> PastHour:
    """`further`: events that the database does not have. Raises `DatabaseUnavailable`."""
    since_us = now_us // MINUTE_US * MINUTE_US - HOUR_US - MINUTE_US

    def look(connection: Connection) -> tuple[Minutes, list[tuple[EngineKey, EngineMinute]]]:
        flow = flow_by_window(connection, MINUTE_US, [flow_minutes.c.minute_us >= since_us], MOST_ROWS)
        return flow, engines_by_minute(connection, [engine_minutes.c.minute_us >= since_us], MOST_ROWS)

    flow, engines = await deps.database.read(look)
    names, weights = {}, {}
    for tenant_id in {key.tenant_id for key, _ in flow}:
        if (tenant := deps.directory.tenant(tenant_id)) is not None:
            names[tenant_id], weights[tenant_id] = tenant.name, tenant.weight
    events = replica_events(engines) + await _acts(deps, from_us(since_us).isoformat())
    return past_hour(flow, names, weights, [*events, *further], now_us)
