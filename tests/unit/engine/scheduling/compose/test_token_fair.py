"""Token-fair composition: floor, turns by weight, targets, and what prompts are left."""

from __future__ import annotations

from collections import Counter, deque

import msgspec
import pytest

from engine.messages import StepTime
from engine.scheduling.compose.token_fair import PATIENCE_STEPS, TokenFair
from engine.scheduling.compose.turns import held_tenants, note_turns
from engine.scheduling.room import Room
from engine.scheduling.step_counters import StepCounters
from engine.sequence import Sequence
from tests.support.scheduling_states import decoding, execute, make_room, make_sequence, names, taken

TIMES = StepTime(1e-3, 1e-3, 0.0, 0.0, samples=1000, relative_error=0.0)
"""A step of n tokens takes n + 1 milliseconds."""


class Steps:
    """A composition's steps one after the other, with the counters that an engine keeps."""

    def __init__(self, compose: TokenFair, tokens: int = 100) -> None:
        self.compose, self.tokens = compose, tokens
        self.counters = StepCounters()
        self.number = 0

    def room(self) -> Room:
        self.number += 1
        return make_room(self.tokens, counters=self.counters, step=self.number, step_time=TIMES)

    def step(self, running: list[Sequence]) -> Counter[str]:
        """Tokens by tenant."""
        room = self.room()
        taken(room, self.compose.shares(running, room))
        note_turns(room)
        served: Counter[str] = Counter()
        for sequence, tokens in room.given.items():
            served[sequence.tenant_id] += tokens
            self.counters.serve(sequence.tenant_id, round(2_000_000 * tokens / sequence.submit.weight))
            execute(sequence, tokens)
        held = {tenant for contest in room.contests for tenant in held_tenants(contest, room)}
        held |= {tenant for _, tenant in room.held_prompts}
        if held:
            self.counters.settle(1, {each.tenant_id for each in running} - held, held)
        return served

    def steps(self, running: list[Sequence], count: int) -> list[Counter[str]]:
        return [self.step(running) for _ in range(count)]


def sequences(tenant: str, count: int, **changes: object) -> list[Sequence]:
    return [
        decoding(f"{tenant}{number}", tenant=tenant, max_tokens=10_000, **changes) for number in range(count)
    ]


def windows(each_step: list[Counter[str]], tenant: str, width: int) -> list[int]:
    sums, window = [], deque(maxlen=width)
    for served in each_step:
        window.append(served[tenant])
        if len(window) == width:
            sums.append(sum(window))
    return sums


def test_when_slots_are_short_tokens_follow_the_weights() -> None:
    running = sequences("a", 30, weight=1.0) + sequences("b", 30, weight=3.0)
    steps = Steps(TokenFair(slots=20)).steps(running, 300)
    assert all(served.total() == 20 for served in steps)
    assert all(abs(tokens - 64 * 5) <= 1 for tokens in windows(steps, "a", 64))
    assert all(abs(tokens - 64 * 15) <= 1 for tokens in windows(steps, "b", 64))


def test_one_sequence_against_fifty_gets_its_token_every_step() -> None:
    running = sequences("a", 1) + sequences("b", 50)
    compose = TokenFair(slots=25)
    steps = Steps(compose).steps(running, 200)
    assert [served["a"] for served in steps] == [1] * 200
    assert [served["b"] for served in steps] == [24] * 200
    emitted = [sequence.emitted_tokens for sequence in running[1:]]
    assert max(emitted) - min(emitted) <= 1
    assert compose.credit_tokens > 0
    assert compose.floor_tokens == 0


def test_who_missed_a_step_is_first_in_the_next() -> None:
    running = sequences("s", 5)
    compose = TokenFair(slots=3)
    steps = Steps(compose)
    served = []
    for _ in range(3):
        before = {each: each.emitted_tokens for each in running}
        steps.step(running)
        served.append({each.sequence_id for each in running if each.emitted_tokens > before[each]})
    assert served[0] == {"s0", "s1", "s2"}
    assert served[1] >= {"s3", "s4"}
    assert served[2] >= {"s1", "s2"}


def test_a_tenant_that_was_away_has_nothing_saved_up() -> None:
    ones, others = sequences("a", 10), sequences("b", 10)
    harness = Steps(TokenFair(slots=4), 50)
    harness.steps(ones, 100)
    # Its first sequence runs beside them, and it is lifted as the queue lifts one that comes.
    harness.counters.lift(1, "b", harness.counters.value(1, "a"))
    steps = harness.steps(ones + others, 20)
    assert all(abs(tokens - 16) <= 1 for tokens in windows(steps, "b", 8))


@pytest.mark.parametrize("others_before", [50, 19], ids=["in a contest", "without one"])
def test_a_tenant_that_was_served_whole_saves_nothing_up(others_before: int) -> None:
    few, others = sequences("a", 1), sequences("b", others_before)
    harness = Steps(TokenFair(slots=20))
    harness.steps(few + others, 100)
    few += [decoding(f"more{number}", tenant="a", max_tokens=10_000) for number in range(30)]
    steps = harness.steps(few + others, 20)
    assert all(abs(served["a"] - 10) <= 1 for served in steps)


def test_steps_with_enough_slots_between_do_not_forget_whose_turn_it_is() -> None:
    ones, others = sequences("a", 1, weight=1.0), sequences("b", 1, weight=1.0)
    compose = TokenFair(slots=1)
    harness = Steps(compose)
    contested: Counter[str] = Counter()
    for number in range(40):
        compose.slots = 1 + number % 2
        served = harness.step(ones + others)
        if number % 2 == 0:
            contested += served
    assert contested == {"a": 10, "b": 10}


def test_a_tenant_far_behind_does_not_starve_the_others() -> None:
    rich, poor = sequences("rich", 8), sequences("poor", 40)
    harness = Steps(TokenFair(slots=16))
    harness.counters.hear(1, "rich", 10**12, 0)
    harness.counters.hear(1, "poor", 0, 0)
    # The contest has begun: no tenant starts level.
    harness.counters.contend(1, [], 0)
    gaps, since = [0] * 8, [0] * 8
    for _ in range(200):
        before = [each.emitted_tokens for each in rich]
        harness.step(rich + poor)
        for number, each in enumerate(rich):
            since[number] = 0 if each.emitted_tokens > before[number] else since[number] + 1
            gaps[number] = max(gaps[number], since[number])
    # 2 x 2 x k W / (w S) + 2 + n / S
    assert 0 < max(gaps) <= 4 * 8 * 2 / 16 + 2 + 48 / 16
    assert sum(each.emitted_tokens for each in poor) > 10 * sum(each.emitted_tokens for each in rich) / 2


def test_slots_are_those_of_the_whole_step() -> None:
    compose = TokenFair(slots=3)
    early, late = sequences("e", 2), sequences("l", 2)
    room = make_room(20)
    taken(room, compose.shares(early, room))
    assert len(compose.shares(late, room)) == 1


def test_every_one_has_its_floor_while_there_are_slots_and_a_prompt_the_rest() -> None:
    running = sequences("s", 5)
    running.append(make_sequence("prompt", prompt=500))
    compose = TokenFair(cap_tokens=32)
    shares = dict(names(compose.shares(running, make_room(100))))
    assert shares == {**{f"s{number}": 1 for number in range(5)}, "prompt": 95}
    assert (compose.floor_tokens, compose.credit_tokens) == (5, 0)


def test_decoding_sequences_leave_prompts_a_part_of_the_step() -> None:
    running = sequences("s", 40)
    running.append(make_sequence("prompt", prompt=500))
    shares = dict(names(TokenFair().shares(running, make_room(20))))
    assert shares["prompt"] >= 5
    assert sum(shares.values()) == 20


def test_what_the_prompts_leave_goes_to_those_without_a_slot() -> None:
    running = sequences("s", 40)
    running.append(make_sequence("prompt", prompt=2))
    shares = dict(names(TokenFair().shares(running, make_room(20))))
    assert shares["prompt"] == 2
    assert sum(shares.values()) == 20


def test_a_tenants_prompt_that_was_begun_first_has_a_quarter_beside_shorter_ones() -> None:
    running = [make_sequence("old", prompt=900, computed=300)]
    running += [make_sequence(f"short{number}", prompt=40) for number in range(10)]
    shares = dict(names(TokenFair().shares(running, make_room(100))))
    assert shares == {"old": 25, "short0": 40, "short1": 35}


def test_higher_tiers_have_their_slots_first() -> None:
    running = sequences("low", 4, tier=2) + sequences("high", 4, tier=0)
    shares = names(TokenFair(slots=6).shares(running, make_room(10)))
    assert sum(name.startswith("high") for name, _ in shares) == 4
    assert len(shares) == 6


def test_the_account_says_by_whom_a_step_was_sat_out() -> None:
    high, own, other = (sequences("h", 2, tier=0), sequences("a", 4), sequences("b", 4))
    harness = Steps(TokenFair(slots=6))
    harness.step(high + own + other)
    causes = Counter(
        (each.tenant_id, each.turns.sat_out_own, each.turns.sat_out_share, each.turns.sat_out_tier)
        for each in own + other
        if not each.turns.turn_tokens
    )
    # Of four slots each had two; without the other each would have had four.
    assert causes == {("a", 0, 1, 0): 2, ("b", 0, 1, 0): 2}
    assert own[3].turns.sat_out_for == {"b": 1}
    harness.compose.slots = 2
    harness.step(high + own + other)
    assert own[0].turns.sat_out_tier == 1
    share = own[0].turns.share(own[0].emitted_tokens)
    assert (share.turn_tokens, share.floor_tokens, share.sat_out_tier) == (1, 1, 1)
    assert share.sat_out_for == {"h": 1}
    alone = Steps(TokenFair(slots=1))
    alone.step(own[:2])
    assert own[1].turns.sat_out_own == 1


def test_a_target_shortens_the_prompts_part_first() -> None:
    running = [*sequences("a", 4), *sequences("b", 1, tpot_target_s=0.020)]
    running.append(make_sequence("prompt", prompt=500))
    shares = dict(names(TokenFair().shares(running, make_room(100, step_time=TIMES))))
    assert shares == {**{f"a{number}": 1 for number in range(4)}, "b0": 1, "prompt": 14}


def test_a_prompt_advances_now_and_then_though_the_target_leaves_nothing() -> None:
    running = [*sequences("b", 6, tpot_target_s=0.007), make_sequence("prompt", prompt=500)]
    compose = TokenFair(least_chunk_tokens=16)
    chunks = []
    for step in range(2 * PATIENCE_STEPS):
        shares = dict(names(compose.shares(running, make_room(100, step_time=TIMES, step=step))))
        assert sum(name.startswith("b") for name in shares) == 6
        chunks.append(shares.get("prompt", 0))
    assert chunks == 2 * ([0] * (PATIENCE_STEPS - 1) + [16])


def test_where_the_step_is_too_long_without_prompts_those_without_the_target_yield() -> None:
    running = [*sequences("a", 6), *sequences("b", 2, tpot_target_s=0.006)]
    harness = Steps(TokenFair())
    steps = harness.steps(running, 30)
    assert all(served == {"a": 3, "b": 2} for served in steps), steps[0]
    emitted = [each.emitted_tokens for each in running[:6]]
    assert max(emitted) - min(emitted) <= 1


def test_those_who_yield_to_a_target_leave_a_padded_step_that_is_full() -> None:
    """Five rows take as long as eight; four are in time, as are three."""
    running = [*sequences("a", 6), *sequences("b", 2, tpot_target_s=0.006)]
    for sizes, met in (((4, 8), {"a": 2, "b": 2}), ((3, 8), {"a": 1, "b": 2}), ((5, 8), {"a": 3, "b": 2})):
        room = make_room(100, step_time=msgspec.structs.replace(TIMES, graph_sizes=sizes))
        taken(room, TokenFair().shares(running, room))
        assert Counter(sequence.tenant_id for sequence in room.given) == met


def test_a_target_that_is_met_takes_nothing() -> None:
    running = [*sequences("a", 6), *sequences("b", 2, tpot_target_s=0.009)]
    assert Steps(TokenFair()).step(running) == {"a": 6, "b": 2}


def test_where_all_have_the_target_nothing_is_taken() -> None:
    running = sequences("a", 6, tpot_target_s=0.003) + sequences("b", 6, tpot_target_s=0.003)
    assert Steps(TokenFair()).step(running) == {"a": 6, "b": 6}
    short = Steps(TokenFair(slots=6))
    assert all(served == {"a": 3, "b": 3} for served in short.steps(running, 10))


def test_a_higher_tier_does_not_yield_to_a_lower_ones_target() -> None:
    running = [*sequences("a", 6, tier=0), *sequences("b", 2, tpot_target_s=0.006)]
    assert Steps(TokenFair()).step(running) == {"a": 6, "b": 2}


def test_those_who_yield_to_a_target_have_their_tokens_all_the_same() -> None:
    running = [*sequences("a", 6), *sequences("b", 9, tpot_target_s=0.006)]
    steps = Steps(TokenFair()).steps(running, 60)
    assert all(served["b"] == 9 for served in steps)
    assert all(each.emitted_tokens >= 3 for each in running[:6])


def test_the_floor_holds_while_there_is_a_slot_for_each_and_time() -> None:
    running = sequences("a", 6)
    room = make_room(8, step_time=TIMES)
    assert TokenFair().floor_holds(running, room)
    assert not TokenFair(slots=5).floor_holds(running, room)
    assert not TokenFair().floor_holds(sequences("a", 9), room)
    room.prompts_ahead = 1000
    assert not TokenFair().floor_holds(running, room)
    room.prompts_ahead = 0
    room.tightest_tpot_s = 0.007
    assert TokenFair().floor_holds(running, room)
    room.tightest_tpot_s = 0.006
    assert not TokenFair().floor_holds(running, room)
