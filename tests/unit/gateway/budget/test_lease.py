"""First holds, timely top-ups, and division among sequences within what is covered."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.budget import lease
from gateway.budget.lease import SequenceLease
from tenants.quota.store import Denied, LimitState
from tenants.types import Amounts, Limit, LimitMode, Meter, SubjectKind, Window

PROMPT = 10


def sizes(output_tokens: int) -> Amounts:
    return Amounts(PROMPT, output_tokens, 100 * PROMPT + 300 * output_tokens)


def window(meter: Meter = Meter.TOTAL_TOKENS, amount: int = 10_000) -> Limit:
    return Limit("w", "t", SubjectKind.TENANT, "t", meter, amount, Window.DAY)


def bucket(amount: int, meter: Meter = Meter.OUTPUT_TOKENS, mode: LimitMode = LimitMode.HARD) -> Limit:
    return Limit("b", "t", SubjectKind.TENANT, "t", meter, amount, rate_per_s=100.0, mode=mode)


def hold(limits: list[Limit], *, sequences: int = 1, ahead: int = 120, most: int = 4_000) -> lease.Hold:
    return lease.first_hold(
        limits, sizes, lambda tokens: 5 * tokens, sequences, ahead, most, may_be_cut=False
    )


def outputs(made: lease.Hold) -> tuple[int, int, int]:
    return made.first.output_tokens, made.ahead.output_tokens, made.most.output_tokens


def test_windows_hold_the_quantile_and_buckets_a_first_chunk() -> None:
    assert outputs(hold([window(), bucket(1_000)])) == (16, 120, 4_000)
    assert outputs(hold([window(), bucket(1_000)], sequences=4, ahead=480)) == (64, 480, 4_000)
    assert outputs(hold([window()], sequences=4, ahead=480)) == (4, 480, 4_000), "as far as there is room"


def test_the_first_chunk_takes_half_a_burst_at_most_and_leaves_room_for_the_prompt() -> None:
    assert outputs(hold([bucket(10)])) == (5, 120, 4_000)
    assert outputs(hold([bucket(PROMPT + 3, Meter.TOTAL_TOKENS)]))[0] == 3
    assert outputs(hold([bucket(100 * PROMPT + 300 * 2, Meter.COST_NANOUSD)]))[0] == 2
    shadow = bucket(1, mode=LimitMode.SHADOW)
    assert outputs(hold([shadow, bucket(1_000)]))[0] == 16, "a shadow shapes nothing"


def test_what_closing_keeps_is_held_from_the_start_where_every_burst_has_room_for_twice_as_much() -> None:
    def first(limits: list[Limit], kept: int) -> tuple[int, int, int]:
        kept = lease.kept_tokens(limits, sizes, 2, kept)
        return outputs(
            lease.first_hold(limits, sizes, lambda _: 0, 2, 20, 4_000, may_be_cut=False, kept=kept)
        )

    assert first([window()], 24) == (2, 50, 4_000)
    assert first([window(), bucket(100)], 24) == (50, 50, 4_000)
    assert first([window(), bucket(100)], 25) == (20, 20, 4_000), "not kept at all"


def test_every_sequence_gets_a_token_even_where_the_burst_is_smaller() -> None:
    # The store will say that it can never be held.
    assert outputs(hold([bucket(2)], sequences=3))[0] == 3


@pytest.mark.parametrize("limits", [[], [window()], [bucket(1_000)], [window(), bucket(2)]])
def test_what_emits_nothing_holds_its_prompt_and_no_output(limits: list[Limit]) -> None:
    for made in (hold(limits, ahead=1, most=0), cut(limits, ahead=1, most=0)):
        assert outputs(made) == (0, 0, 0)
        assert made.first.input_tokens == PROMPT


def cut(limits: list[Limit], *, ahead: int, most: int) -> lease.Hold:
    return lease.first_hold(limits, sizes, lambda tokens: tokens, 1, ahead, most, may_be_cut=True)


def test_a_short_answer_that_is_promised_anyway_is_held_whole() -> None:
    assert outputs(hold([window()], ahead=20, most=100)) == (1, 100, 100)
    assert outputs(hold([window()], ahead=20, most=lease.SHORT_TOKENS + 1))[1] == 20
    assert outputs(hold([window()], sequences=2, ahead=20, most=2 * lease.SHORT_TOKENS))[1] == 1_024
    assert outputs(cut([window()], ahead=20, most=100)) == (1, 20, 100), "others may find room beside it"


def test_a_short_answer_is_held_at_once_where_it_is_a_modest_share_of_every_burst() -> None:
    burst = 100 * lease.MODEST_SHARE
    assert outputs(hold([bucket(burst)], ahead=20, most=100)) == (100, 100, 100)
    assert outputs(hold([bucket(burst)], ahead=20, most=101)) == (20, 20, 101), "what is predicted, then"
    assert outputs(hold([bucket(burst), bucket(burst - 1)], ahead=101, most=101)) == (16, 101, 101)
    assert outputs(cut([bucket(burst)], ahead=20, most=100)) == (20, 20, 100)
    total = bucket(burst + 2, Meter.TOTAL_TOKENS)
    assert outputs(hold([total], ahead=20, most=100))[0] == 100, "the prompt is no part of the share"


def test_where_nothing_counts_the_output_all_of_it_is_covered_at_once() -> None:
    assert outputs(hold([])) == (1, 4_000, 4_000)
    assert outputs(hold([window(Meter.REQUESTS), window(Meter.INPUT_TOKENS)]))[1] == 4_000


def test_a_short_prediction_still_covers_a_first_token() -> None:
    assert outputs(hold([window()], ahead=0)) == (1, 1, 4_000)
    assert outputs(hold([window(), bucket(1_000)], ahead=9, most=4)) == (4, 4, 4)


def test_device_time_is_held_only_where_it_is_limited() -> None:
    made = hold([window()])
    assert (made.first.gpu_ms, made.ahead.gpu_ms, made.most.gpu_ms) == (0, 0, 0)
    made = hold([window(Meter.GPU_MS)])
    assert (made.first.gpu_ms, made.ahead.gpu_ms, made.most.gpu_ms) == (250, 600, 20_000)
    assert hold([bucket(100, Meter.GPU_MS)]).first.gpu_ms == 50


@given(
    st.integers(1, 8),
    st.integers(0, 5_000),
    st.integers(1, 5_000),
    st.lists(st.sampled_from([window(), bucket(10), bucket(900, Meter.TOTAL_TOKENS), window(Meter.GPU_MS)])),
)
def test_what_is_asked_for_never_falls_from_first_to_most(
    sequences: int, ahead: int, most_each: int, limits: list[Limit]
) -> None:
    made = hold(limits, sequences=sequences, ahead=ahead, most=most_each * sequences)
    for meter in (Meter.TOTAL_TOKENS, Meter.OUTPUT_TOKENS, Meter.COST_NANOUSD, Meter.GPU_MS):
        assert made.first.of(meter) <= made.ahead.of(meter) <= made.most.of(meter)
    assert made.first.output_tokens >= sequences


@pytest.mark.parametrize(
    ("covered", "tokens"),
    [
        (sizes(50), 50),
        (Amounts(PROMPT, 50, 100 * PROMPT + 300 * 20), 20),
        (Amounts(PROMPT, 50, 100 * PROMPT + 300 * 20 + 299), 20),
        (Amounts(PROMPT, 7, 10**9), 7),
        (Amounts(PROMPT, 10**9, 10**12), 100),
        (Amounts(PROMPT, 50, 0), 0),
    ],
)
def test_the_scarcest_meter_says_how_many_tokens_are_covered(covered: Amounts, tokens: int) -> None:
    assert lease.covered_tokens(covered, sizes, 100) == tokens


@st.composite
def parts(draw: st.DrawFn) -> list[SequenceLease]:
    made = []
    for _ in range(draw(st.integers(1, 6))):
        most = draw(st.integers(1, 200))
        old = draw(st.integers(0, most))
        made.append(SequenceLease(draw(st.integers(0, old)), old, most, draw(st.booleans())))
    return made


@given(parts(), st.integers(0, 2_000))
def test_what_is_shared_out_is_covered_and_nothing_of_it_lies_idle(
    before: list[SequenceLease], more: int
) -> None:
    covered = sum(part.lease for part in before) + more
    leases = lease.share_out(covered, before)
    assert sum(leases) <= covered
    live = [(part, now) for part, now in zip(before, leases, strict=True) if part.is_live]
    for part, now in zip(before, leases, strict=True):
        if part.is_live:
            assert part.lease <= now <= part.most
        else:
            assert now == part.emitted
    if any(now < part.most for part, now in live):
        assert sum(leases) == covered, "a sequence could have used what is left"
    # Equally far: who got more than another one had it already, or the other one needs no more.
    for one, has in live:
        for other, got in live:
            if has - one.emitted > got - other.emitted + 1:
                assert has == one.lease or got == other.most


def test_what_one_did_not_use_is_the_others() -> None:
    assert lease.share_out(20, [SequenceLease(0, 0, 50), SequenceLease(0, 0, 50)]) == [10, 10]
    ended = SequenceLease(3, 10, 50, is_live=False)
    assert lease.share_out(20, [ended, SequenceLease(10, 10, 50)]) == [3, 17]


def test_it_is_asked_for_before_the_engine_would_wait() -> None:
    # 40 tokens a second: a quarter of a second is 10 tokens.
    assert not lease.is_due([SequenceLease(89, 100, 500)], 40, 40.0)
    assert lease.is_due([SequenceLease(90, 100, 500)], 40, 40.0)
    assert not lease.is_due([SequenceLease(100, 100, 100)], 40, 40.0), "it is at its own end"
    assert not lease.is_due([SequenceLease(100, 100, 500, is_live=False)], 40, 40.0)
    assert not lease.is_due([SequenceLease(97, 100, 500)], 4, 40.0), "never earlier than half a chunk"


@given(
    st.integers(1, 300),
    st.integers(1, 2_000),
    st.lists(st.floats(0.0, 4_000.0, allow_nan=False), min_size=1, max_size=20),
)
def test_looking_now_and_then_misses_no_end_of_a_lease(covered: int, more: int, paces: list[float]) -> None:
    """However the pace changes, a check comes before the sequence comes to the end of its lease, or at it;
    at a pace that lasts, no later than who looks at every token."""
    chunk = 16
    look, looked, due_at = 1, 0, None
    for emitted in range(1, covered + 1):
        part = SequenceLease(emitted, covered, covered + more)
        pace = paces[emitted % len(paces)]
        if emitted >= look:
            looked += 1
            if lease.is_due([part], chunk, pace):
                due_at = emitted
                break
            look = lease.next_look(part, chunk, pace)
            assert emitted < look <= covered
    assert due_at is not None
    assert looked <= 20 + covered.bit_length()
    if len(set(paces)) == 1:
        every = next(
            n
            for n in range(1, covered + 1)
            if lease.is_due([SequenceLease(n, covered, covered + more)], chunk, pace)
        )
        assert due_at == every


def test_a_sequence_that_needs_no_more_is_not_looked_at() -> None:
    assert lease.next_look(SequenceLease(3, 100, 100), 16, 40.0) == lease.FOR_EVER
    assert lease.next_look(SequenceLease(3, 10, 100, is_live=False), 16, 40.0) == lease.FOR_EVER
    assert lease.next_look(SequenceLease(95, 100, 500), 40, 40.0) == 96, "it is due: at the next token"


def test_a_chunk_is_a_second_of_decoding_that_fits_the_bursts() -> None:
    assert lease.chunk_tokens([window()], sizes, 1, 0.0) == 16
    assert lease.chunk_tokens([window()], sizes, 1, 99.5) == 100
    assert lease.chunk_tokens([bucket(10)], sizes, 1, 99.5) == 5
    assert lease.chunk_tokens([bucket(10)], sizes, 2, 99.5) == 2, "for both together"
    assert lease.chunk_tokens([bucket(1)], sizes, 2, 99.5) == 1


def test_a_top_up_covers_the_next_chunk_and_on_windows_what_is_predicted() -> None:
    both = [SequenceLease(90, 100, 500), SequenceLease(10, 12, 500, is_live=False)]
    assert lease.wanted_tokens(both, 40, 300) == (140, 300)
    assert lease.wanted_tokens(both, 40, 100) == (140, 140)
    assert lease.wanted_tokens(both, 4, 9_999) == (110, 510), "never less than before, never beyond the most"


def denied(limit: Limit, retry_after_s: float | None) -> Denied:
    return Denied(limit, 10, 0, retry_after_s)


def test_a_rate_is_waited_for_and_what_others_hold_so_long_and_no_longer_and_a_spent_budget_not() -> None:
    assert lease.retry_in_s(denied(bucket(10), 40.0), 500.0, 5.0) == 40.0
    assert lease.retry_in_s(denied(window(), 1.0), 3.9, 5.0) == 1.0
    assert lease.retry_in_s(denied(window(), 1.0), 4.1, 5.0) is None
    assert lease.retry_in_s(denied(window(), None), 0.0, 5.0) is None
    assert lease.retry_in_s(denied(bucket(10), None), 0.0, 5.0) is None


def test_what_would_still_fit_is_what_every_window_of_the_tenant_has_room_for() -> None:
    def left(limit: Limit, available: int) -> LimitState:
        return LimitState(limit, 0, 0, available, 60.0)

    day, cost = window(), window(Meter.COST_NANOUSD)
    platform = replace(window(), kind=SubjectKind.PLATFORM)
    soft = replace(window(Meter.OUTPUT_TOKENS), mode=LimitMode.SOFT)

    def fitting(limit: Limit, available: int, *states: LimitState, sequences: int = 1) -> int | None:
        denied = Denied(limit, 5_000, available, None, states)
        return lease.fitting_max_tokens(denied, sizes, sequences, 4_000)

    assert fitting(day, 50) == 40, "the prompt has ten"
    assert fitting(day, 50, sequences=4) == 10
    assert fitting(day, 50, left(cost, 100 * PROMPT + 300 * 7 + 299)) == 7
    assert fitting(day, 50, left(platform, 12), left(soft, 1), left(bucket(5), 5)) == 40
    assert (fitting(day, PROMPT), fitting(day, 0)) == (0, 0)
    assert fitting(window(Meter.REQUESTS), 0) is None
    assert fitting(bucket(50), 20) is None
