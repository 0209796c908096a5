"""What the overview shows, from counters of all gateways: shares, sentences, what needs somebody. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import quote

from engine.messages import TIER_RANKS
from gateway.console.formats import seconds
from gateway.console.pages.live.past_hour import PastHour
from gateway.console.return_path import with_query
from gateway.pools.live_counters import FleetNow, ReplicaNow, TenantNow

A_TENTH = 0.1
"""A difference below a tenth is not worth a sentence."""
LEAST_OFF = 0.001
"""Of a tier: less is noise."""
LEAST_SCALE = 0.05
"""Of a tier: noise does not fill the picture."""
FLOODS = 2.0
"""Times its weight, from where on a tenant is named among what needs somebody."""
SLOW_LINE_S = 0.5
"""Mean time before the queue, from where on stores or event loop are named."""
FEWEST_ARRIVALS = 3
"""Whose mean time before the queue is told."""
MOST_NEEDS = 6


@dataclass(frozen=True, slots=True)
class RefusalLine:
    """Refusals of one tenant with one cause in the last 24 hours."""

    name: str
    """Of the tenant; empty: none is known."""
    count: int
    cause: str
    """In words: the limit, or the error."""
    href: str


@dataclass(frozen=True, slots=True)
class TightLimit:
    """A limit that refuses, or is the closest to it."""

    tenant_id: str
    """Empty: of all tenants together."""
    name: str
    limit_id: str
    words: str
    """'1,500 tokens a day (UTC)'."""
    is_exhausted: bool = True
    taken: float = 1.0
    """Part of it that is used or held."""
    refused: int = 0
    """Since midnight (UTC)."""
    since_us: int | None = None
    """Refuses since; None: not known."""

    @property
    def href(self) -> str:
        if not self.tenant_id:
            return "/console/refusals?limit_id=" + quote(self.limit_id)
        return f"/console/tenants/{quote(self.tenant_id)}/limits/{quote(self.limit_id)}"


@dataclass(frozen=True, slots=True)
class SlowFigures:
    """Slowly changing figures from the stores."""

    spend_nanousd: int | None = None
    """Charged today."""
    attainment: float | None = None
    """Share of judged targets that were met in the report's period; None: none was judged."""
    missed: int = 0
    judged: int = 0
    refused: int = 0
    """In the last 24 hours."""
    refusals: tuple[RefusalLine, ...] = ()
    """Most first."""
    tight: tuple[TightLimit, ...] = ()
    """The closest to refusing first."""
    alerts: int = 0
    """That fire."""
    urgent: tuple[tuple[str, str], ...] = ()
    """Of these: what an alert that asks to react now says, and where its evidence is."""
    read_us: int | None = None
    """None: the database did not answer."""


@dataclass(frozen=True, slots=True)
class ShareRow:
    """One tenant in one tier; parts of the tier's service in about the last minute."""

    tenant_id: str
    name: str
    tier: str
    weight: float
    queued: int
    running: int
    entitled: float
    """By weight among the tenants active in the tier: those with a request now or in the last minutes."""
    due: float | None
    """Its fair share of what was asked for; None: the tier had no service."""
    had: float | None
    before_line_s: float | None
    arrivals: int
    """Requests that the mean before is of."""
    why: str = ""
    """Of one that is more than a tenth off its weight or off what it was due; empty: it is not."""

    @property
    def sentence(self) -> str:
        """'crawler had 84 %, 4 times its weight: others left 64 % unused'."""
        return f"{self.name} had {share_text(self.had or 0.0)}, {self.why}"

    @property
    def behind(self) -> float:
        return 0.0 if self.due is None or self.had is None else self.due - self.had

    @property
    def beyond(self) -> float:
        return 0.0 if self.had is None else self.had - self.entitled

    @property
    def is_behind(self) -> bool:
        return self.due is not None and self.behind > max(A_TENTH * self.due, LEAST_OFF)


@dataclass(frozen=True, slots=True)
class TierRows:
    tier: str
    part: float | None
    """Of the engines' service; None: there was none."""
    tenants: int
    rows: tuple[ShareRow, ...]


@dataclass(frozen=True, slots=True)
class Need:
    """Something that needs somebody, and where to act."""

    words: str
    act: str
    href: str
    is_bad: bool = True


@dataclass(frozen=True, slots=True)
class Overview:
    at_us: int
    fleet: FleetNow
    tokens_per_s: float | None
    """Output of all gateways; None: there is no earlier snapshot."""
    rows: tuple[ShareRow, ...]
    """In the order shown: who is furthest behind first, then who is furthest off the weight."""
    parts: Mapping[str, float | None]
    """Of the engines' service, by tier."""
    replicas: list[tuple[ReplicaNow, float | None]]
    """With their mean batch since the previous snapshot; None: no steps, or none reported."""
    slow: SlowFigures
    needs: tuple[Need, ...]
    left_out: int
    """Tenants and tiers that are not shown."""
    hour: PastHour = field(default_factory=PastHour)

    @property
    def answering(self) -> str:
        here = len(self.fleet.gateways)
        return f"{here} of {here + self.fleet.missing}"

    @property
    def active(self) -> int:
        return len({row.tenant_id for row in self.rows})


def overview_of(
    now: FleetNow,
    before: FleetNow | None,
    names: Mapping[str, str],
    slow: SlowFigures,
    at_us: int,
    brakes: Sequence[Need] = (),
) -> Overview:
    """`before`: an earlier snapshot, for rates."""
    rows = share_rows(now.tenants, names, {limit.tenant_id for limit in slow.tight if limit.is_exhausted})
    return Overview(
        at_us,
        now,
        tokens_per_s(now, before),
        rows,
        tier_parts(now.tenants),
        replica_rows(now.replicas, () if before is None else before.replicas),
        slow,
        (*needs_of(now, rows, slow), *brakes)[:MOST_NEEDS],
        sum(gateway.left_out for gateway in now.gateways),
    )


def tier_parts(tenants: Iterable[TenantNow]) -> dict[str, float | None]:
    had = dict.fromkeys(TIER_RANKS, 0.0)
    for tenant in tenants:
        had[tenant.tier] += tenant.had
    total = sum(had.values())
    return {tier: each / total if total else None for tier, each in had.items()}


def share_rows(
    tenants: Sequence[TenantNow], names: Mapping[str, str], limited: Collection[str] = ()
) -> tuple[ShareRow, ...]:
    """`limited`: ids of tenants with an exhausted limit."""
    totals, weights = dict.fromkeys(TIER_RANKS, 0.0), dict.fromkeys(TIER_RANKS, 0.0)
    for tenant in tenants:
        totals[tenant.tier] += tenant.had
        weights[tenant.tier] += tenant.weight
    rows = []
    for tenant in tenants:
        total = totals[tenant.tier]
        row = ShareRow(
            tenant.tenant_id,
            names.get(tenant.tenant_id, tenant.tenant_id),
            tenant.tier,
            tenant.weight,
            tenant.queued,
            tenant.running,
            tenant.weight / weights[tenant.tier] if weights[tenant.tier] else 0.0,
            tenant.due / total if total else None,
            tenant.had / total if total else None,
            tenant.before_line_us / tenant.arrivals / 1e6 if tenant.arrivals else None,
            tenant.arrivals,
        )
        rows.append(replace(row, why=why_of(row, is_limited=row.tenant_id in limited)))
    return tuple(sorted(rows, key=_rank))


def _rank(row: ShareRow) -> tuple[float, float, str, str, int]:
    # In whole points, so that rows do not change places over noise.
    behind = int(100 * row.behind) if row.is_behind else 0
    return -behind, -round(100 * abs(row.beyond)), row.name, row.tenant_id, TIER_RANKS[row.tier]


def why_of(row: ShareRow, *, is_limited: bool = False) -> str:
    """'4 times its weight: others left 64 % unused'; empty: it is no more than a tenth off."""
    had, due, entitled = row.had, row.due, row.entitled
    if had is None or due is None:
        return f"{_requests(row.queued)} waiting, and the tier had nothing yet" if row.queued else ""
    if row.is_behind:
        why = f"{_requests(row.queued)} waiting" if row.queued else "none of its requests waits now"
        return f"{share_text(row.behind / due)} less than due: {why}"
    if -row.behind > max(A_TENTH * due, LEAST_OFF):
        why = "its running requests finish first" if row.running else "the next requests make up for it"
        return f"more than its due of {share_text(due)}: {why}"
    if row.beyond > A_TENTH * entitled:
        return f"{_times(had / entitled)}: others left {share_text(row.beyond)} unused"
    if -row.beyond > A_TENTH * entitled:
        why = "its limit is exhausted" if is_limited else "it asked for no more"
        return f"{share_text(-row.beyond / entitled)} less than its weight: {why}"
    return ""


def share_text(part: float) -> str:
    """84 %, 5.5 %, 0.33 %."""
    return f"{100 * part:.0f} %" if part >= 0.0995 else f"{100 * part:.2g} %"


def _times(factor: float) -> str:
    if factor < 2:
        return f"{100 * (factor - 1):.0f} % over its weight"
    return f"{factor:.0f} times its weight" if factor >= 10 else f"{factor:.2g} times its weight"


def _requests(number: int) -> str:
    return "1 request is" if number == 1 else f"{number:,} requests are"


def scale_of(rows: Iterable[ShareRow]) -> float:
    """The largest difference from the weight, which fills half of the picture."""
    most = LEAST_SCALE
    for row in rows:
        most = max(most, abs(row.beyond), abs((row.due or row.entitled) - row.entitled))
    return most


def tiers_of(overview: Overview, wanted: str = "", most: int | None = None) -> tuple[TierRows, ...]:
    """The rows by tier, without empty tiers. `wanted`: part of a tenant's name; `most`: rows in all."""
    found = [row for row in overview.rows if wanted.casefold() in row.name.casefold()][:most]
    return tuple(
        TierRows(tier, overview.parts[tier], sum(row.tier == tier for row in overview.rows), rows)
        for tier in TIER_RANKS
        if (rows := tuple(row for row in found if row.tier == tier))
    )


def needs_of(now: FleetNow, rows: Sequence[ShareRow], slow: SlowFigures) -> list[Need]:
    """What needs somebody, the worst first."""
    found = []
    if now.missing:
        here = len(now.gateways)
        words = f"{here} of {here + now.missing} gateways answer: figures of the others are missing"
        found.append(Need(words, "Gateways", "#gateways"))
    for replica in now.replicas:
        if not replica.is_up and not replica.is_drained:
            found.append(Need(f"Replica {replica.replica_id} is down", "Upstreams", "/console/upstreams"))
    for limit in slow.tight:
        if limit.is_exhausted:
            refused = f"; {limit.refused:,} requests refused today" if limit.refused else ""
            words = f"{limit.name}: the limit of {limit.words} is exhausted{refused}"
            found.append(Need(words, "Change the limit", limit.href))
    found += [Need(says, "See why", href or "/console/alerts") for says, href in slow.urgent]
    found += _slow_line(rows, max((gateway.lag_s for gateway in now.gateways), default=0.0))
    found += [
        Need(row.sentence, "See its queue", _waiting(row)) for row in rows if row.is_behind and row.queued
    ]
    found += _floods(rows)
    return found


def _slow_line(rows: Sequence[ShareRow], lag_s: float) -> list[Need]:
    """By the tenant that it takes longest: whoever floods comes when the store has just answered."""
    several = [row for row in rows if row.arrivals >= FEWEST_ARRIVALS]
    slowest = max(several, key=lambda row: row.before_line_s or 0.0, default=None)
    if slowest is None or slowest.before_line_s is None or slowest.before_line_s < SLOW_LINE_S:
        return []
    took = f"Requests of {slowest.name} take {seconds(slowest.before_line_s)} to reach the queue"
    if lag_s > slowest.before_line_s / 2:
        return [
            Need(f"{took}: a gateway is overloaded (it stood for {seconds(lag_s)})", "Gateways", "#gateways")
        ]
    return [Need(f"{took}: a store is slow", "Check database and Redis", "/console/alerts")]


def _floods(rows: Sequence[ShareRow]) -> list[Need]:
    """Tenants far above their weight: bad only where others wait."""
    found = []
    for row in rows:
        if row.had is None or row.had < FLOODS * row.entitled or row.beyond < A_TENTH:
            continue
        others = [each for each in rows if each.tier == row.tier and each.tenant_id != row.tenant_id]
        waits = any(each.is_behind and each.queued for each in others)
        href = f"/console/tenants/{quote(row.tenant_id)}/limits"
        nothing = "" if waits else "; nobody is behind, so nothing to do"
        found.append(Need(f"{row.sentence}{nothing}", "Limit it", href, waits))
    return found


def _waiting(row: ShareRow) -> str:
    return with_query("/console/waiting", {"tenant": row.tenant_id, "tier": row.tier})


def tokens_per_s(now: FleetNow, before: FleetNow | None) -> float | None:
    """Of gateways in both snapshots, each by its own clock."""
    earlier = {} if before is None else {gateway.gateway_id: gateway for gateway in before.gateways}
    rates = [
        max(0, gateway.output_tokens - was.output_tokens) / (gateway.clock_s - was.clock_s)
        for gateway in now.gateways
        if (was := earlier.get(gateway.gateway_id)) is not None and gateway.clock_s > was.clock_s
    ]
    return sum(rates) if rates else None


def replica_rows(
    now: Iterable[ReplicaNow], before: Iterable[ReplicaNow]
) -> list[tuple[ReplicaNow, float | None]]:
    earlier = {(replica.pool, replica.name): replica for replica in before}
    rows = []
    for replica in now:
        was = earlier.get((replica.pool, replica.name))
        steps = 0 if was is None else replica.steps - was.steps
        batch = (replica.batch_sum - was.batch_sum) / steps if was is not None and steps > 0 else None
        rows.append((replica, batch))
    return rows
