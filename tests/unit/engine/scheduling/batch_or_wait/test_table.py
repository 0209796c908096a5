"""The stored table says what was solved; the queue that measures it counts correctly."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.core.core import EngineConfig
from engine.messages import SamplingParams
from engine.scheduling.admit.table import ArrivalRate
from engine.scheduling.batch_or_wait.batch_model import BatchModel, RequestLengths
from engine.scheduling.batch_or_wait.kv_pool import KvMemory
from engine.scheduling.batch_or_wait.objective import Objective
from engine.scheduling.batch_or_wait.states import Grid
from engine.scheduling.batch_or_wait.table import BatchOrWaitTable, solve_table
from engine.scheduling.batch_or_wait.table_file import BadTable
from engine.scheduling.batch_or_wait.wait_table import TableAction
from engine.scheduling.options import PolicyOptions
from engine.scheduling.policy import PolicyPreset
from engine.virtual.replica import VirtualReplica
from tests.support import builders
from tests.support.batch_line import by_table
from tests.support.batch_queue import WARM_UP, Arrivals, Fixed, Queue, StreamOutcome, by_fixed
from tests.support.batch_replica import serve_by_fixed, started_batches
from tests.support.builders import virtual_prompt

STEP_TIME = builders.step_time(12e-3, 300e-6, per_context_token_s=150e-9, per_sequence_s=400e-6)
SHORT, LONG = RequestLengths(96, 16), RequestLengths(512, 128)
MODEL = BatchModel(STEP_TIME, SHORT, LONG, long_share=0.2, launch_joules=40.0)
OBJECTIVE = Objective(alpha=1.0, beta=0.02, gamma=2.0, slo_s=1.0)
POOL = KvMemory(tokens=1000, pressures=(0.0, 0.5, 0.9), pressure_hold_s=5.0)
"""Room for four short ones and a long one; for four short ones when half is taken; for none but one."""


@pytest.fixture(scope="module")
def content() -> bytes:
    return solve_table(MODEL, [0.2, 2.0], OBJECTIVE, Grid(4, 2.0, 8), POOL, tolerance=1e-2).encode()


@pytest.fixture
def table(content: bytes) -> BatchOrWaitTable:
    return BatchOrWaitTable.decode(content)


def decide(
    table: BatchOrWaitTable,
    waiting: int,
    oldest_s: float = 0.0,
    *,
    longs: int = 0,
    kv: float = 0.0,
    rate: float = 2.0,
) -> TableAction:
    return table.decide(
        rate_per_s=rate,
        num_waiting=waiting,
        oldest_wait_s=oldest_s,
        has_long=longs > 0,
        remaining_tokens=waiting * SHORT.total_tokens + longs * (LONG.total_tokens - SHORT.total_tokens),
        kv_pressure=kv,
    )


def wait_s(table: BatchOrWaitTable, waiting: int, oldest_s: float, rate: float = 2.0) -> float:
    return decide(table, waiting, oldest_s, rate=rate).wait_s


def test_what_is_saved_is_what_is_loaded(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    BatchOrWaitTable.decode(content).save(path)

    assert path.read_bytes() == content
    assert BatchOrWaitTable.load(path).encode() == content
    assert len(content) < 20_000


def spoiled(change: Callable[[dict[str, Any]], object], content: bytes) -> bytes:
    value = json.loads(content)
    change(value)
    return json.dumps(value).encode()


def set_row(value: dict[str, Any], count: int, row: str) -> None:
    value["rates"][0]["actions"][0][0][count - 1] = row


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda value: value.update(format="something"), "the format is 'something'"),
        (lambda value: value.update(version=9), "version 9 is of a newer program"),
        (lambda value: value.update(version=1), "version 1 is of an older program.*solve it again"),
        (lambda value: value.pop("model"), "model"),
        (lambda value: value["pool"].update(pressures=[0.5, 0.2]), "rise"),
        (lambda value: value["pool"].update(tokens=0), "must have 1 KV pressures, not 3"),
        (lambda value: value.update(extra=1), "extra"),
        (lambda value: value["model"].update(long_share=2.0), "long_share"),
        (lambda value: value["objective"].update(alpha=-1), "alpha"),
        (lambda value: value["grid"].update(wait_buckets=9), "letters"),
        (lambda value: value["grid"].update(max_batch=3), "rows"),
        (lambda value: value["rates"].reverse(), "rise"),
        (lambda value: value["rates"].clear(), "1 to 64"),
        (lambda value: value["rates"][0].update(rate_per_s=-1.0), "positive"),
        (lambda value: value["rates"][1]["actions"].pop(), "must have 3 KV pressures, not 2"),
        (lambda value: value["rates"][0]["actions"][1].pop(), "levels"),
        (lambda value: value["rates"][0]["actions"][2][0].pop(), "rows"),
        (lambda value: value["rates"][0].update(cost=1e9), "bounds"),
        (lambda value: set_row(value, 1, "rrr"), "must be 9 letters"),
        (lambda value: set_row(value, 1, "rrrrrrrr?"), "letters of"),
        (lambda value: set_row(value, 1, "rrrrrrrrw"), "not 'w' at the end"),
        (lambda value: set_row(value, 4, "wrrrrrrrr"), "where a batch is full"),
    ],
)
def test_a_table_that_cannot_be_right_is_refused(
    content: bytes, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    with pytest.raises(BadTable, match=message):
        BatchOrWaitTable.decode(spoiled(change, content))


@pytest.mark.parametrize("rubbish", [b"", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"format": 1, "version": 1}'])
def test_rubbish_is_refused_with_the_way_out(rubbish: bytes, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(rubbish)

    with pytest.raises(BadTable, match=r"table\.json: .*fairgate policy solve"):
        BatchOrWaitTable.load(path)


def test_a_wait_ends_where_it_was_said_to_end(table: BatchOrWaitTable) -> None:
    whole_s = wait_s(table, 1, 0.0)

    assert whole_s > 0, "a case in which waiting pays"
    # Asked again on the way, it is the rest; when it is over, rounding does not begin another one.
    for part in (0.1, 0.5, 0.9):
        assert wait_s(table, 1, part * whole_s) == pytest.approx((1 - part) * whole_s)
    arrivals_s = [0.1 * number for number in range(1, 1000)]
    assert any((arrived_s + whole_s) - arrived_s < whole_s for arrived_s in arrivals_s)
    assert all(wait_s(table, 1, (arrived_s + whole_s) - arrived_s) == 0 for arrived_s in arrivals_s)


def test_it_runs_when_full_and_when_the_longest_wait_is_over(table: BatchOrWaitTable) -> None:
    assert wait_s(table, 4, 0.0) == wait_s(table, 40, 0.0) == 0
    assert all(wait_s(table, 1, seconds) == 0 for seconds in (table.longest_wait_s, 100.0))
    assert wait_s(table, 0, 0.0) == 0


def test_memory_that_others_take_makes_the_batch_smaller(table: BatchOrWaitTable) -> None:
    assert decide(table, 40) == TableAction(0.0, 4)
    assert decide(table, 40, kv=0.24) == TableAction(0.0, 4), "nearer to none than to half"
    assert decide(table, 40, kv=0.6) == TableAction(0.0, 4), "four short ones fit into half"
    assert decide(table, 4, longs=3, kv=0.0).batch == 2, "a short and a long one fit"
    assert decide(table, 4, longs=3, kv=0.6).batch == 1
    # A pressure beyond all that were solved for: the highest there is.
    assert decide(table, 40, kv=1.0) == TableAction(0.0, 1)


def test_the_pressure_is_a_part_of_the_situation(content: bytes) -> None:
    """Each level has actions of its own, and the lookup goes by them."""

    def all_run_at_the_second(value: dict[str, Any]) -> None:
        for rate in value["rates"]:
            for rows in rate["actions"][1]:
                rows[:] = ["r" * len(row) for row in rows]

    changed = BatchOrWaitTable.decode(spoiled(all_run_at_the_second, content))

    assert decide(changed, 1, kv=0.0).batch == 0, "a case in which waiting pays"
    assert decide(changed, 1, kv=0.5).batch == 1


def test_it_goes_by_the_nearest_rate(table: BatchOrWaitTable) -> None:
    assert wait_s(table, 1, 0.0, rate=2.0) == wait_s(table, 1, 0.0, rate=50.0) > 0
    assert wait_s(table, 1, 0.0, rate=0.2) == wait_s(table, 1, 0.0, rate=0.0) == 0


def test_the_rate_is_that_of_the_last_arrivals() -> None:
    rate = ArrivalRate()

    def feed(per_s: float, count: int, start_s: float) -> float:
        for number in range(count):
            rate.note(start_s + number / per_s)
        return start_s + count / per_s

    assert rate.per_s == 0, "not known before two have arrived"
    now_s = feed(3.0, 200, 0.0)
    assert rate.per_s == pytest.approx(3.0)
    now_s = feed(0.1, 100, now_s)
    assert rate.per_s == pytest.approx(0.1, rel=0.1)
    # A burst is noticed within some dozens of arrivals.
    feed(3.0, 100, now_s)
    assert rate.per_s > 1.0


def test_arrivals_at_one_instant_or_out_of_order_do_no_harm(table: BatchOrWaitTable) -> None:
    rate = ArrivalRate()
    for now_s in (5.0, 5.0, 5.0, 4.0, 4.0):
        rate.note(now_s)

    assert rate.per_s > 1e6
    assert 0 <= wait_s(table, 1, 0.0, rate=rate.per_s) <= table.longest_wait_s


def test_every_answer_is_within_its_bounds(table: BatchOrWaitTable) -> None:
    rng = random.Random(7)
    waits = batches = 0
    for _ in range(5000):
        waiting = rng.choice((1, 2, 3, 4, 30))
        oldest_s = rng.choice((0.0, rng.uniform(0, 3), 1e9))
        decision = table.decide(
            rate_per_s=rng.choice((0.0, 0.1, 3.0, 1e9)), num_waiting=waiting, oldest_wait_s=oldest_s,
            has_long=rng.random() < 0.5, remaining_tokens=rng.randint(0, 30_000),
            kv_pressure=rng.uniform(-0.5, 1.5),
        )  # fmt: skip
        if decision.batch == 0:
            waits += 1
            assert 0 < decision.wait_s <= table.longest_wait_s - oldest_s + 1e-9
        else:
            batches += 1
            assert decision.wait_s == 0
            assert 1 <= decision.batch <= min(waiting, 4)

    assert min(waits, batches) > 100


def test_a_fixed_policy_on_paper() -> None:
    """Two wait, or the first for 2 s; the last one has none to wait for."""
    times_s = [0.0, 1.0, 1.1, 10.0, 20.0]
    queue = Queue(MODEL, Arrivals(times_s, [False] * 5), slo_s=1.0)
    one_s, two_s = MODEL.service_s(1, 0), MODEL.service_s(2, 0)
    assert two_s < 1

    # At 1.0 two are there; 1.1 arrives meanwhile and waits until 3.1; 10.0 until 12.0; 20.0 until 22.0.
    starts_s = [1.0, 3.1, 12.0, 22.0]
    batches = [2, 1, 1, 1]
    for start_s, batch in zip(starts_s, batches, strict=True):
        assert queue.see(start_s) == (batch, 0)
        queue.run((batch, 0), start_s)

    padding = [10.0 * number for number in range(WARM_UP)]
    start_s = 10.0 * WARM_UP
    arrivals = Arrivals(
        [*padding, *(start_s + time_s for time_s in times_s)], [False] * (WARM_UP + len(times_s))
    )
    outcome = by_fixed(MODEL, arrivals, 1.0, Fixed(2, 2.0, short_first=False))

    latencies_s = [1 + two_s, two_s, 2 + one_s, 2 + one_s, 2 + one_s]
    assert outcome.mean_latency_s == pytest.approx(sum(latencies_s) / 5)
    assert outcome.late_share == pytest.approx(3 / 5), "a wait of just the target is in time"
    assert outcome.mean_batch == pytest.approx(5 / 4)
    joules = MODEL.energy_j(2, 0) + 3 * MODEL.energy_j(1, 0)
    last_end_s = padding[-1] + 2 + one_s
    assert outcome.mean_watts == pytest.approx(joules / (start_s + 22.0 + one_s - last_end_s))


def test_a_table_that_never_waits_is_the_policy_that_never_waits() -> None:
    alike = BatchModel(STEP_TIME, SHORT, LONG, long_share=0.0)
    rate = 0.5 * alike.capacity_per_s(4)
    objective = Objective(alpha=1.0, beta=0.0, gamma=0.0, slo_s=1.0)
    table = solve_table(alike, [rate], objective, Grid(4, 2.0, 2), tolerance=1e-2)
    arrivals = Arrivals.poisson(rate, 0.0, 3000, seed=3)

    assert by_table(alike, arrivals, table) == by_fixed(alike, arrivals, 1.0, Fixed(4, 0.0, False))


def test_lines_by_length_and_by_arrival_run_other_batches() -> None:
    arrivals = Arrivals([0.0, 0.1, 0.2, 0.3], [True, False, True, False])
    queue = Queue(MODEL, arrivals, slo_s=1.0)

    assert queue.see(0.25) == (1, 2)
    assert queue.first_of_line(2, (1, 2), short_first=True) == (1, 1)
    assert queue.first_of_line(1, (1, 2), short_first=True) == (1, 0)
    assert queue.first_of_line(1, (1, 2), short_first=False) == (0, 1)
    assert queue.next_s == 0.3
    queue.run((0, 1), 0.25)
    assert (queue.served, queue.first_s) == (1, 0.1)


class Watched:
    """A table that keeps what it was asked and what it said."""

    def __init__(self, table: BatchOrWaitTable) -> None:
        self._table = table
        self.long_tokens, self.longest_wait_s = table.long_tokens, table.longest_wait_s
        self.asked: list[tuple[dict[str, Any], TableAction]] = []

    def decide(self, **situation: Any) -> TableAction:
        decision = self._table.decide(**situation)
        self.asked.append((situation, decision))
        return decision


@pytest.mark.parametrize("policy", [Fixed(3, 0.0, False), Fixed(4, float("inf"), False)])
def test_the_engine_runs_the_batches_that_the_arithmetic_says(policy: Fixed) -> None:
    arrivals = Arrivals.poisson(0.6 * MODEL.capacity_per_s(4), MODEL.long_share, 400, seed=1)

    measured = serve_by_fixed(MODEL, arrivals, 1.0, policy)

    expected = by_fixed(MODEL, arrivals, 1.0, policy)
    assert measured.outcome == StreamOutcome(
        pytest.approx(expected.mean_latency_s),
        pytest.approx(expected.mean_watts),
        pytest.approx(expected.late_share),
        pytest.approx(expected.mean_batch),
    )
    assert measured.own_latency_s < measured.outcome.mean_latency_s, "short ones end before long ones"


def test_the_engine_runs_just_the_batches_that_the_table_says(table: BatchOrWaitTable) -> None:
    watched = Watched(table)
    rate = 0.6 * MODEL.capacity_per_s(4)
    arrivals = Arrivals.poisson(rate, MODEL.long_share, 300, seed=2)
    options = PolicyOptions(admit="table", batch_or_wait_table=watched)
    batches = started_batches(MODEL, arrivals, order="sjf", options=options)

    # Asked again within the step that a batch starts with, it is the same question.
    said = [decision.batch for (_, decision) in watched.asked if decision.batch]
    assert [len(batch.arrived_s) for batch in batches] == said
    assert sum(said) == 300
    assert 1 < max(said) <= 4
    assert any(decision.batch < min(4, asked["num_waiting"]) for asked, decision in watched.asked)
    assert {asked["has_long"] for asked, _ in watched.asked} == {True, False}
    late = [asked for asked, _ in watched.asked[len(watched.asked) // 2 :]]
    assert sum(asked["rate_per_s"] for asked in late) / len(late) == pytest.approx(rate, rel=0.25)
    for asked, _ in watched.asked:
        longs = (asked["remaining_tokens"] - asked["num_waiting"] * SHORT.total_tokens) / (
            LONG.total_tokens - SHORT.total_tokens
        )
        assert longs == int(longs)
        assert asked["has_long"] == (longs > 0)


def test_kv_that_paused_ones_hold_is_a_pressure(table: BatchOrWaitTable) -> None:
    watched = Watched(table)
    replica = VirtualReplica(EngineConfig(max_batched_tokens=1024, max_sequences=8), num_blocks=40)
    options = PolicyOptions(admit="table", batch_or_wait_table=watched)
    replica.core.table.set_policy(PolicyPreset("batches", "sjf")(options))

    def submit(name: str, prompt: int, lease: int) -> None:
        asked = builders.submit(
            name, tenant_id=name, prompt_token_ids=virtual_prompt(name, prompt), max_tokens=16,
            lease_tokens=lease, sampling=SamplingParams(seed=1), predicted_output_tokens=16,
        )  # fmt: skip
        assert replica.submit(asked) is None

    submit("rests", 16 * 20, 1)
    while not replica.core.table.paused:
        replica.step()
        replica.clock.advance(0.1)
    assert watched.asked[-1][0]["kv_pressure"] == 0

    submit("comes", 96, 16)
    replica.step()
    assert watched.asked[-1][0]["kv_pressure"] == pytest.approx(0.5)
