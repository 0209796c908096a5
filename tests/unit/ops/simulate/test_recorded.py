"""Reading of recorded traffic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.domain.server_description import RequestTerms, packed
from gateway.domain.timeline import OUTCOMES, Event, TimelineKind, pack
from ops.simulate.recorded import AS_IT_WAS, UNPRICED, Recorded, as_it_was, read
from ops.simulate.slo import SloLimits
from ops.simulate.traffic.requests import BadTrace, RequestLimits
from tenants.ledger.timelines import RecordedTimeline
from tenants.outcomes import RequestOutcome
from tenants.pricing.pricing import Price, PriceEntry
from tenants.types import Limit, Meter, SubjectKind, Tier

DONE = OUTCOMES.index(RequestOutcome.COMPLETED)


def timeline(
    tenant: str = "acme",
    *,
    arrived_s: float = 0.0,
    ttft_s: float = 0.5,
    e2e_s: float = 2.5,
    sequences: int = 1,
    tier: int = 1,
    output_tokens: int = 21,
    cached_tokens: tuple[int, ...] = (),
) -> RecordedTimeline:
    """Of an answer; ended a tenth of a second after its last token."""
    events = [
        Event(TimelineKind.RECEIVED, 0, (64, sequences, tier, 128)),
        Event(TimelineKind.RESERVED, 0, (0, 64, 128, 1)),
        *(Event(TimelineKind.ADMITTED, 0, (index, cached)) for index, cached in enumerate(cached_tokens)),
    ]
    if output_tokens:
        events += [
            Event(TimelineKind.FIRST_TOKEN, round(ttft_s * 1e6)),
            Event(TimelineKind.PREEMPTED, round(ttft_s * 1e6) + 1, (0, 0)),
            Event(TimelineKind.LAST_TOKEN, round(e2e_s * 1e6), (output_tokens,)),
        ]
    events.append(Event(TimelineKind.ENDED, round((e2e_s + 0.1) * 1e6), (DONE,)))
    ended_us = round((1_000.0 + arrived_s + e2e_s + 0.1) * 1e6)
    return RecordedTimeline(tenant, 2.0, "small", ended_us, pack(events))


def recorded(*rows: RecordedTimeline) -> Recorded:
    return read(rows, "an hour")


def test_requests_come_in_the_order_in_which_they_arrived() -> None:
    source = recorded(
        timeline("late", arrived_s=3.0, tier=0), timeline("early", arrived_s=1.0, e2e_s=9.0, output_tokens=7)
    )

    early, late = source
    assert (early.tenant, early.arrival_s, early.output_tokens, early.tier) == ("early", 0.0, 7, 1)
    assert (late.tenant, late.arrival_s, late.output_tokens, late.tier) == ("late", 2.0, 21, 0)
    assert (late.input_tokens, late.weight, late.prefix_blocks) == (64, 2.0, ())
    assert list(source) == [early, late], "the same each time"


def test_several_sequences_are_as_many_requests() -> None:
    source = recorded(timeline(sequences=4, output_tokens=10), timeline(sequences=3, output_tokens=2))

    assert [each.output_tokens for each in source] == [3, 3, 2, 2, 1, 1]
    assert {each.input_tokens for each in source} == {64}


def test_what_was_found_in_a_cache_is_not_computed_again_and_counts_for_limits() -> None:
    limit = Limit("lim", "t", SubjectKind.TENANT, "t", Meter.TOTAL_TOKENS, 600, rate_per_s=10.0)
    terms = RequestTerms(3.0, 5.0, (limit,), PriceEntry(Price(100, 50, 300), 1_000), Tier.BATCH)
    row = replace(timeline(sequences=2, cached_tokens=(48, 64)), terms="id")

    one, other = read([row], "an hour", {"id": packed(terms)})

    assert (one.input_tokens, other.input_tokens) == (16, 1), "the last token is always computed"
    assert one.limits == RequestLimits((limit,), terms.price or UNPRICED, True, 48)
    assert (one.weight, one.reserved_cost_per_s, one.reserved_tier, one.max_tokens) == (3.0, 5.0, 2, 128)
    plain = read([row], "an hour", {}).served[0]
    assert (plain.terms.weight, plain.limits(0)) == (2.0, None), "its tenant's weight of today"
    with pytest.raises(BadTrace, match="a timeline of acme cannot be read: it was recorded as version 0"):
        read([row], "an hour", {"id": b"{}"})


def test_the_first_answers_and_the_traffic_of_some_tenants() -> None:
    rows = [timeline("acme", arrived_s=2.0), timeline("slow", arrived_s=1.0), timeline("acme", arrived_s=3.0)]
    assert [each.tenant for each in read(rows, "an hour", limit=2)] == ["slow", "acme"]
    assert [each.arrival_s for each in recorded(*rows).of(["acme"])] == pytest.approx([0.0, 1.0])
    assert recorded(*rows).begins_s == pytest.approx(1_001.0)
    with pytest.raises(BadTrace, match=r"no request of tenant 'nobody' was answered .* there are acme, slow"):
        recorded(*rows).of(["nobody"])


def test_what_ended_without_a_token_is_counted_and_left_out() -> None:
    source = recorded(timeline(output_tokens=0), timeline(), timeline(output_tokens=0))

    assert len(list(source)) == 1
    assert source.unserved == 2
    with pytest.raises(BadTrace, match=r"no answer was recorded .* \(1 requests ended without a token\)"):
        recorded(timeline(output_tokens=0))


def test_a_timeline_that_cannot_be_read_is_no_request() -> None:
    with pytest.raises(BadTrace, match="a timeline of acme cannot be read"):
        recorded(RecordedTimeline("acme", 1.0, "small", 1, b"\x93nonsense"))


def test_what_really_happened_has_the_figures_of_a_run() -> None:
    source = recorded(
        timeline("fast", ttft_s=0.5, e2e_s=2.5),
        timeline("slow", arrived_s=2.0, ttft_s=3.0, e2e_s=8.0, output_tokens=11),
    )

    figures = as_it_was(source, SloLimits(ttft_s=1.0))

    assert figures["policy"] == AS_IT_WAS
    assert (figures["ttft_s"]["p50"], figures["ttft_s"]["p99"]) == pytest.approx((0.5, 3.0))
    assert (figures["e2e_s"]["p50"], figures["e2e_s"]["p99"]) == pytest.approx((2.5, 8.0))
    assert (figures["tpot_s"]["p50"], figures["tpot_s"]["p99"]) == pytest.approx((0.1, 0.5))
    assert (figures["requests"], figures["refused"], figures["preemptions"]) == (2, 0, 2)
    assert figures["span_s"] == pytest.approx(10.0)
    assert figures["output_tokens_per_s"] == pytest.approx(3.2)
    assert figures["attainment"] == 0.5
    assert {name: its["attainment"] for name, its in figures["tenants"].items()} == {"fast": 1.0, "slow": 0.0}
