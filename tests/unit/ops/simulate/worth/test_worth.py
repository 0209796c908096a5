"""What a move was worth: by replays of recordings in which it helps, hurts, or does nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from engine.messages import StepTime
from gateway.config import GatewayConfig
from gateway.domain.server_description import (
    DescribedEngine,
    DescribedQueue,
    RequestTerms,
    ServerDescription,
)
from gateway.flow.control_rules import Knob
from ops.simulate.origin import ReplayedServer
from ops.simulate.recorded import Recorded, RecordedAnswer, records_of
from ops.simulate.slo import SloLimits
from ops.simulate.worth.knobs import NOT_SIMULATED, UNKNOWN, not_simulated
from ops.simulate.worth.paths import KnobChange, KnobPath, paths_of
from ops.simulate.worth.refused import RefusedCount, with_refused
from ops.simulate.worth.replay import (
    LEAST_REQUESTS,
    WARM_UP_S,
    CannotReplay,
    MoveWorth,
    simulated,
    span_us,
    worth_of,
)
from ops.simulate.worth.verdict import MoveVerdict, ReplayError, WaitFigures, judged, seconds
from tenants.moves.move import StoredMove

NOON_US = 1_700_000_000_000_000
WINDOW_S = 120.0
BEFORE_US = 30_000_000
SLO = SloLimits(ttft_s=2.0, tpot_s=math.inf)
STEP_TIME = StepTime(0.05, 0.0, 0.0, 0.0, samples=5_000, relative_error=0.1)
SERVER = ReplayedServer(
    ServerDescription(
        "",
        "small",
        False,
        (DescribedEngine("cpu", 4_096, 16, 512, 8, 256),),
        "fcfs",
        {},
        DescribedQueue.of(GatewayConfig()),
        STEP_TIME,
    )
)
RESTS = {"batch_cap": 1.0, "lookahead": 2.0, "token_budget": 1.0, "admission": 0.0}


def move(
    knob: str = "batch_cap",
    before: float = 1.0,
    after: float = 0.25,
    *,
    at_s: float = 0.0,
    is_made: bool = True,
    knobs: dict[str, float] | None = None,
    name: str = "mov_1",
) -> StoredMove:
    really = RESTS | ({knob: after if is_made else before}) if knobs is None else knobs
    return StoredMove(
        name, NOON_US + round(at_s * 1e6), "gw_1", "small", knob, before, after, "constructed", is_made,
        "acting" if is_made else "advice", really,
    )  # fmt: skip


def arrivals(every_s: float, *, tier: int = 1, output_tokens: int = 20) -> list[RecordedAnswer]:
    """At equal distances, from half a minute before noon to the end of the window; their times come later."""
    since_us, until_us = NOON_US - BEFORE_US, span_us(NOON_US, WINDOW_S)[1]
    step_us = round(every_s * 1e6)
    return [
        RecordedAnswer(
            "acme", RequestTerms(1.0), tier, 1, 32, output_tokens, at_us, at_us, at_us, at_us, 0, 128
        )
        for at_us in range(since_us, until_us, step_us)
    ]


def recording(answers: list[RecordedAnswer], *moves: StoredMove) -> Recorded:
    """As that server would have served them, with the moves that were made."""
    raw = Recorded("constructed", tuple(sorted(answers, key=lambda each: each.arrived_us)), 0)
    path = paths_of(moves[0], moves, *span_us(NOON_US, WINDOW_S)).as_it_was
    ran = simulated(raw, SERVER, SLO, path)
    begins_us = raw.served[0].arrived_us
    served = [
        replace(
            each,
            dispatched_us=begins_us + round(ran.dispatched_s[row] * 1e6),
            first_us=begins_us + round(ran.first_s[row] * 1e6),
            last_us=begins_us + round(ran.last_s[row] * 1e6),
        )
        for row, each in enumerate(raw.served)
        if ran.last_s[row] >= 0
    ]
    return replace(raw, served=tuple(served))


def worth(answers: list[RecordedAnswer], *moves: StoredMove) -> MoveWorth:
    """Of the first of the moves."""
    return worth_of(moves[0], moves, recording(answers, *moves), SERVER, SLO, WINDOW_S)


def test_a_move_that_lets_more_run_at_once_is_worth_it() -> None:
    # A sequence takes a second: two places serve two requests a second, eight serve eight.
    raised = move(before=0.25, after=1.0)
    found = worth(arrivals(0.4), raised)
    assert found.verdict is MoveVerdict.WORTH_IT
    assert found.without is not None
    assert found.with_it is not None
    assert found.error is not None
    assert (
        found.why == f"attainment +{100 * (found.with_it.attainment - found.without.attainment):.1f} points"
    )
    assert found.with_it.attainment - found.without.attainment > 0.3
    assert found.with_it.wait_p90_s < found.without.wait_p90_s
    assert found.with_it.ttft_p90_s < found.without.ttft_p90_s
    assert found.error.attainment <= 0.02, "the recording is the simulator's own"
    assert found.requests == found.with_it.requests == WINDOW_S / 0.4


def test_the_same_move_the_other_way_is_a_cost() -> None:
    found = worth(arrivals(0.4), move(before=1.0, after=0.25))
    assert found.verdict is MoveVerdict.COST
    assert found.without is not None
    assert found.with_it is not None
    assert found.without.attainment == 1.0
    assert found.with_it.attainment < 0.7


def test_where_there_is_room_it_changes_nothing_beyond_the_error() -> None:
    found = worth(arrivals(2.0), move(before=1.0, after=0.875))
    assert (found.verdict, found.why) == (MoveVerdict.WITHIN_ERROR, "")


def test_a_smaller_step_is_a_cost() -> None:
    assert worth(arrivals(0.4), move("token_budget", 1.0, 0.001)).verdict is MoveVerdict.COST


def test_what_admission_refused_is_replayed_without_it() -> None:
    # 16 places serve 16 requests a second; 10 come before the move, and 20 after it.
    answers = [each for each in arrivals(0.1) if each.arrived_us < NOON_US]
    answers += [each for each in arrivals(0.05) if 0 <= each.arrived_us - NOON_US < 30_000_000]
    strict = move("admission", 0.0, 1.0)
    served = recording(answers, strict)
    count = len(answers) - len(served.served)
    assert count > 100
    alone = worth_of(strict, [strict], served, SERVER, SLO, WINDOW_S)
    refused = [RefusedCount(NOON_US, 30_000_000, "acme", count)]
    whole = with_refused(served, refused, *span_us(NOON_US, WINDOW_S))
    assert len(whole.served) == len(answers)
    found = worth_of(strict, [strict], whole, SERVER, SLO, WINDOW_S)
    assert found.verdict is MoveVerdict.WORTH_IT
    assert found.recorded is not None
    assert found.error is not None
    assert found.requests == 600
    assert found.recorded.attainment <= 1 - count / 600, "of all that was submitted"
    assert found.error.attainment < 0.05
    assert alone.without is not None
    assert found.without is not None
    assert found.without.attainment < alone.without.attainment
    assert found.without.wait_p90_s > 10 * alone.without.wait_p90_s, "there is more to do without it"
    assert found.notes == [
        f"{count} requests that were refused as late are replayed, too, with lengths of others: theirs are"
        " not known"
    ]


def test_refused_requests_come_evenly_and_are_like_those_of_their_tenant() -> None:
    long, short = (
        replace(each, tenant=name, output_tokens=tokens)
        for each, name, tokens in zip(arrivals(1.0), ("acme", "slow"), (90, 5), strict=False)
    )
    served = Recorded("constructed", (long, replace(short, arrived_us=long.arrived_us + 1)), 0)
    counts = [RefusedCount(NOON_US, 60_000_000, "slow", 3), RefusedCount(NOON_US, 60_000_000, "new", 1)]
    whole = with_refused(served, counts, NOON_US + 20_000_000, NOON_US + 120_000_000)
    added = [each for each in whole.served if each.is_refused]
    assert [(each.tenant, each.arrived_us - NOON_US) for each in added] == [
        ("new", 30_000_000),
        ("slow", 30_000_000),
        ("slow", 50_000_000),
    ]
    assert {each.output_tokens for each in added if each.tenant == "slow"} == {5}
    real = records_of(whole)
    assert list(real.refused) == [0, 0, 1, 1, 1]
    assert list(real.done()) == [0, 1]
    flood = [RefusedCount(NOON_US, 60_000_000, "slow", 7)]
    assert with_refused(served, flood, NOON_US, NOON_US + 60_000_000) is served, "clients that ask again"


def test_the_same_recording_gives_the_same_worth() -> None:
    raised, answers = move(before=0.25, after=1.0), arrivals(0.4)
    served = recording(answers, raised)
    one, other = (worth_of(raised, [raised], served, SERVER, SLO, WINDOW_S) for _ in range(2))
    assert one == other
    assert one.as_json()["verdict"] == "worth it"
    assert set(one.as_json()["error"]) == {"attainment", "wait_p90_s", "ttft_p90_s"}


def test_an_advised_move_is_taken_as_if_it_had_been_made() -> None:
    found = worth(arrivals(0.4), move(before=1.0, after=0.25, is_made=False))
    assert found.verdict is MoveVerdict.COST
    assert found.as_it_was is not None
    assert found.as_it_was.attainment == 1.0, "it was not made"
    assert found.notes == [
        "it was only advised: replayed as if it had been made, the other knobs as they stood"
    ]


def test_too_little_traffic_and_knobs_that_no_replay_shows_are_said() -> None:
    few = recording(arrivals(WINDOW_S / (LEAST_REQUESTS - 1)), move())
    with pytest.raises(
        CannotReplay, match=r"19 requests were recorded in the 2 minutes after it, and 20 are"
    ):
        worth_of(move(), [], few, SERVER, SLO, WINDOW_S)
    enough = recording(arrivals(1.0), move())
    for knob, why in NOT_SIMULATED.items():
        with pytest.raises(CannotReplay, match=f"does not show what {knob.value} does: {why}"):
            worth_of(move(knob.value), [], enough, SERVER, SLO, WINDOW_S)
    assert not_simulated(Knob.SLOTS, {Knob.AGEING}) == UNKNOWN
    assert not_simulated(Knob.AGEING, {Knob.AGEING}) == ""
    with pytest.raises(CannotReplay, match="knows no knob 'flux'"):
        worth_of(move("flux"), [], enough, SERVER, SLO, WINDOW_S)
    of_another = ReplayedServer(replace_policy("lottery"))
    with pytest.raises(CannotReplay, match="what served then cannot be simulated"):
        worth_of(move(), [], enough, of_another, SLO, WINDOW_S)


def replace_policy(name: str) -> ServerDescription:
    described = SERVER.described
    return ServerDescription(
        "", described.model, False, described.engines, name, {}, described.queue, described.step_time
    )


def test_only_what_arrived_after_the_move_counts() -> None:
    # Before the move all were late, and after it none: the figures are of the latter.
    relief = move(before=0.25, after=1.0)
    answers = [each for each in arrivals(0.1) if each.arrived_us >= NOON_US - 20_000_000][:200]
    answers += [each for each in arrivals(1.0) if each.arrived_us >= NOON_US + 60_000_000]
    found = worth(answers, relief)
    assert found.requests == 60
    assert found.recorded is not None
    assert found.recorded.attainment > 0.5


def test_knobs_stand_as_they_did() -> None:
    first = move("lookahead", 2.0, 1.0, at_s=-60, name="mov_0", knobs=RESTS | {"lookahead": 1.0})
    this = move("batch_cap", 1.0, 0.75, name="mov_1", knobs=RESTS | {"lookahead": 1.0, "batch_cap": 0.75})
    same = move("token_budget", 1.0, 0.9, name="mov_2", knobs=this.knobs)
    advised = move("ageing", 1.0, 0.75, at_s=1, is_made=False, name="mov_3", knobs=this.knobs)
    later = move("batch_cap", 0.75, 0.5, at_s=30, name="mov_4", knobs=this.knobs)
    before = move("batch_cap", 0.9, 1.0, at_s=-WARM_UP_S - 1, name="mov_9", knobs=RESTS)
    after = move("batch_cap", 0.5, 0.25, at_s=WINDOW_S, name="mov_10", knobs=RESTS)
    this.knobs["token_budget"] = 0.9
    this.knobs["flux"] = 7.0
    paths = paths_of(this, [later, before, advised, same, after, this, first], *span_us(NOON_US, WINDOW_S))
    held = {Knob.BATCH_CAP: 1.0, Knob.LOOKAHEAD: 1.0, Knob.TOKEN_BUDGET: 0.9, Knob.ADMISSION: 0.0}
    assert paths.without == KnobPath(held)
    assert paths.with_it == KnobPath(held, (KnobChange(NOON_US, Knob.BATCH_CAP, 0.75),))
    assert paths.as_it_was.start == held | {Knob.LOOKAHEAD: 2.0, Knob.TOKEN_BUDGET: 1.0}
    assert [(each.at_us - NOON_US, each.knob, each.value) for each in paths.as_it_was.changes] == [
        (-60_000_000, Knob.LOOKAHEAD, 1.0),
        (0, Knob.BATCH_CAP, 0.75),
        (0, Knob.TOKEN_BUDGET, 0.9),
        (30_000_000, Knob.BATCH_CAP, 0.5),
    ]


@pytest.mark.parametrize(
    ("without", "with_it", "verdict", "why"),
    [
        ((0.5, 9.0, 9.0), (0.6, 9.0, 9.0), MoveVerdict.WORTH_IT, "attainment +10.0 points"),
        ((0.6, 9.0, 9.0), (0.5, 1.0, 1.0), MoveVerdict.COST, "attainment -10.0 points"),
        (
            (0.5, 9.0, 9.0),
            (0.52, 9.0, 8.0),
            MoveVerdict.WORTH_IT,
            "TTFT p90 9.00 s without it, 8.00 s with it",
        ),
        (
            (0.5, 9.0, 9.0),
            (0.5, 9.0, math.inf),
            MoveVerdict.COST,
            "TTFT p90 9.00 s without it, never with it",
        ),
        (
            (0.5, 9.0, 9.0),
            (0.5, 8.0, 9.2),
            MoveVerdict.WORTH_IT,
            "wait p90 9.00 s without it, 8.00 s with it",
        ),
        ((0.5, 9.0, 9.0), (0.52, 9.1, 8.8), MoveVerdict.WITHIN_ERROR, ""),
        ((0.0, math.inf, math.inf), (0.0, math.inf, math.inf), MoveVerdict.WITHIN_ERROR, ""),
    ],
)
def test_the_first_figure_that_differs_by_more_than_the_error_decides(
    without: tuple[float, float, float], with_it: tuple[float, float, float], verdict: MoveVerdict, why: str
) -> None:
    error = ReplayError(0.03, 0.5, 0.5)
    assert judged(WaitFigures(100, *without), WaitFigures(100, *with_it), error) == (verdict, why)


def test_the_error_is_that_of_the_replay_of_what_happened_and_never_nothing() -> None:
    served, replayed = WaitFigures(50, 0.8, 4.0, 5.0), WaitFigures(50, 0.7, 4.5, 5.0)
    assert ReplayError.of(served, replayed, None) == ReplayError(0.8 - 0.7, 0.5, 0.05)
    assert ReplayError.of(served, served, 0.2) == ReplayError(1 / 50, 0.04, 1.0)
    never = WaitFigures(50, 0.0, math.inf, math.inf)
    assert ReplayError.of(served, never, None).wait_p90_s == math.inf
    assert seconds(math.inf) == "never"
