"""Reads the traffic that a gateway recorded, and its outcomes, from the timelines.

A request with several sequences becomes as many requests. What ended without a token is counted and left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.messages import TIER_RANKS
from gateway.domain.server_description import RequestTerms, UnreadableDescription, terms_of
from gateway.domain.timeline import Event, TimelineKind, UnreadableTimeline, first, number, unpack
from ops.simulate.figures.figures import MOST_TENANTS, latencies
from ops.simulate.records import Records
from ops.simulate.slo import SloLimits
from ops.simulate.traffic.requests import MOST_TOKENS, BadTrace, RequestLimits, SimulatedRequest
from tenants.ledger.timelines import RecordedTimeline
from tenants.pricing.pricing import FREE, PriceEntry

UNPRICED = PriceEntry(FREE, 1_000)
AS_IT_WAS = "as it was"


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """One answer that had at least one token. Instants in microseconds since 1970."""

    tenant: str
    terms: RequestTerms
    """What its key was entitled to."""
    tier: int
    sequences: int
    input_tokens: int
    output_tokens: int
    arrived_us: int
    in_line_us: int
    """Instant at which it was authenticated and held in the ledger."""
    first_us: int
    last_us: int
    preemptions: int
    max_tokens: int = 0
    may_be_cut: bool = False

    cached_tokens: Mapping[int, int] = field(default_factory=dict)
    """Prompt tokens found in a cache, by sequence."""
    dispatched_us: int = 0
    """Sent to an engine; 0: not recorded."""

    def limits(self, cached_tokens: int) -> RequestLimits | None:
        terms = self.terms
        if not terms.limits:
            return None
        return RequestLimits(terms.limits, terms.price or UNPRICED, self.may_be_cut, cached_tokens)


@dataclass(frozen=True, slots=True)
class Recorded:
    name: str
    served: tuple[RecordedAnswer, ...]
    unserved: int
    """Left out: they ended without a token."""
    has_prefixes: bool = False

    def __iter__(self) -> Iterator[SimulatedRequest]:
        for answer in self.served:
            terms = answer.terms
            for sequence, output_tokens in enumerate(_parts(answer)):
                cached_tokens = min(answer.cached_tokens.get(sequence, 0), answer.input_tokens - 1)
                yield SimulatedRequest(
                    (answer.arrived_us - self.served[0].arrived_us) / 1e6,
                    answer.tenant,
                    answer.input_tokens - cached_tokens,
                    output_tokens,
                    tier=answer.tier,
                    weight=terms.weight,
                    reserved_cost_per_s=terms.reserved_cost_per_s,
                    reserved_tier=None if terms.reserved_tier is None else TIER_RANKS[terms.reserved_tier],
                    limits=answer.limits(cached_tokens),
                    max_tokens=answer.max_tokens,
                )

    @property
    def begins_s(self) -> float:
        return self.served[0].arrived_us / 1e6

    def of(self, tenants: Sequence[str]) -> Recorded:
        """The traffic of some tenants alone. Raises `BadTrace` for one that has none."""
        known = sorted({answer.tenant for answer in self.served})
        for name in tenants:
            if name not in known:
                some = ", ".join(known[:20])
                raise BadTrace(f"no request of tenant {name!r} was answered in that time; there are {some}")
        return replace(self, served=tuple(one for one in self.served if one.tenant in tenants))


def read(
    rows: Iterable[RecordedTimeline],
    name: str,
    described: Mapping[str, bytes] | None = None,
    limit: int | None = None,
) -> Recorded:
    """The first `limit` answers, with the terms that are `described` by id. Raises `BadTrace` for none."""
    served, unserved = [], 0
    contents = described or {}
    terms: dict[str, RequestTerms] = {}
    for row in rows:
        try:
            if row.terms is not None and row.terms in contents and row.terms not in terms:
                terms[row.terms] = terms_of(contents[row.terms])
            its = terms.get(row.terms or "") or RequestTerms(row.weight)
            answer = served_of(row, unpack(row.packed), its)
        except (UnreadableTimeline, UnreadableDescription) as error:
            raise BadTrace(f"a timeline of {row.tenant} cannot be read: {error}") from None
        if answer is None:
            unserved += 1
        else:
            served.append(answer)
    if not served:
        raise BadTrace(
            f"{name}: no answer was recorded in that time ({unserved} requests ended without a token)",
            "; take a longer one (--last 24h), or see that timelines are kept (gateway.timeline_days)",
        )
    return Recorded(name, tuple(sorted(served, key=lambda answer: answer.arrived_us)[:limit]), unserved)


def served_of(row: RecordedTimeline, events: list[Event], terms: RequestTerms) -> RecordedAnswer | None:
    """None: no token came."""
    received, first_token = first(events, TimelineKind.RECEIVED), first(events, TimelineKind.FIRST_TOKEN)
    last_token, ended = first(events, TimelineKind.LAST_TOKEN), first(events, TimelineKind.ENDED)
    output_tokens = number(last_token, "output_tokens")
    if received is None or first_token is None or last_token is None or ended is None or output_tokens < 1:
        return None
    arrived_us = row.ended_us - ended.at_us
    queued = first(events, TimelineKind.QUEUED)
    dispatched = first(events, TimelineKind.DISPATCHED)
    return RecordedAnswer(
        row.tenant,
        terms,
        number(received, "tier"),
        max(1, number(received, "sequences")),
        min(max(1, number(received, "input_tokens")), MOST_TOKENS),
        min(output_tokens, MOST_TOKENS),
        arrived_us,
        arrived_us + (queued.at_us if queued is not None else 0),
        arrived_us + first_token.at_us,
        arrived_us + last_token.at_us,
        sum(event.kind == TimelineKind.PREEMPTED for event in events),
        number(received, "max_tokens"),
        bool(number(first(events, TimelineKind.RESERVED), "may_be_cut")),
        {
            number(event, "sequence"): number(event, "cached_tokens")
            for event in events
            if event.kind == TimelineKind.ADMITTED
        },
        0 if dispatched is None else arrived_us + dispatched.at_us,
    )


def as_it_was(recorded: Recorded, slo: SloLimits, *, from_line: bool = False) -> dict[str, Any]:
    """Figures as of a policy's run, as far as recorded; `from_line` as `records_of`."""
    records = records_of(recorded, from_line=from_line)
    span_s = max(1e-9, max(records.last_s))
    rows = range(len(records))
    by_tenant = sorted(records.rows_by_tenant().items(), key=lambda item: -len(item[1]))
    return {
        "policy": AS_IT_WAS,
        "span_s": span_s,
        **latencies(records, rows, slo, span_s),
        "requests_per_s": len(records) / span_s,
        "input_tokens_per_s": sum(records.input_tokens) / span_s,
        "output_tokens_per_s": sum(records.output_tokens) / span_s,
        "jain_index": None,
        "service_gap_over_bound": None,
        "preemptions": sum(answer.preemptions for answer in recorded.served),
        "tenants": {tenant: latencies(records, its, slo, span_s) for tenant, its in by_tenant[:MOST_TENANTS]},
    }


def records_of(recorded: Recorded, *, from_line: bool = False) -> Records:
    """A row for each request of the source. `from_line`: times count from when it was in line."""
    records = Records()
    begun_us = recorded.served[0].arrived_us
    by_part = (answer for answer in recorded.served for _ in _parts(answer))
    for served, request in zip(by_part, recorded, strict=True):
        row = records.arrive(request)
        before_us = served.in_line_us - served.arrived_us if from_line else 0
        if served.dispatched_us:
            records.dispatched_s[row] = (served.dispatched_us - before_us - begun_us) / 1e6
        records.first_s[row] = (served.first_us - before_us - begun_us) / 1e6
        records.last_s[row] = (served.last_us - before_us - begun_us) / 1e6
    return records


def _parts(served: RecordedAnswer) -> list[int]:
    """Output tokens of each sequence, as nearly alike as may be."""
    sequences = min(served.sequences, served.output_tokens)
    tokens, more = divmod(served.output_tokens, sequences)
    return [tokens + (index < more) for index in range(sequences)]
