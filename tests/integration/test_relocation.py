"""A request whose engine is lost or drained goes on at another one, is charged once, and is settled once."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from msgspec import structs

from engine.messages import Delta, SequenceState
from gateway.requests.run import Run, SequenceOutput
from gateway.upstream.base import MovableUpstream, Upstream, UpstreamLost, UpstreamUnavailable, Wording
from tenants.outcomes import RequestOutcome
from tenants.storage.database import Database, open_database
from tests.integration.test_lifecycle import CONFIG, PROMPT, House, ScriptedEngine, told
from tests.support.engine_process import until


class MovableEngine(ScriptedEngine, MovableUpstream):
    """Takes and gives out sequences."""

    def __init__(self, replica_id: str) -> None:
        super().__init__(replica_id)
        self.imported: dict[str, SequenceState] = {}
        self.exports = True
        """False: it is lost when it is asked."""

    def takes_kv(self, tokens: int, target: Upstream) -> bool:
        return True

    def import_state(
        self, state: SequenceState, wording: Wording, after: AsyncIterator[Delta] | None = None
    ) -> AsyncIterator[Delta]:
        name = state.submit.sequence_id
        deltas = self.run(state.submit, wording)
        self.imported[name] = state
        self.emitted[name] = len(state.output_token_ids)
        return deltas

    async def export_state(self, sequence_id: str, *, with_kv: bool = True) -> SequenceState | None:
        if not self.exports:
            raise UpstreamLost("silent")
        submit, count = self.submitted[sequence_id], self.emitted[sequence_id]
        self.streams[sequence_id].put_nowait(UpstreamLost("exported"))
        return SequenceState(submit, [7] * count, count, kv=[b"kv"], kv_tokens=len(PROMPT) + count - 1)

    def die(self) -> None:
        self.is_up = False
        for watcher in self.watchers:
            watcher()
        for stream in self.streams.values():
            stream.put_nowait(UpstreamLost("died"))

    def rise(self) -> None:
        self.is_up = True
        for watcher in self.watchers:
            watcher()

    def drain(self) -> None:
        self.is_drained = True
        for watcher in self.watchers:
            watcher()


@pytest.fixture
async def database(sqlite_url: str) -> AsyncIterator[Database]:
    opened = open_database(sqlite_url)
    yield opened
    await opened.close()


@pytest.fixture
async def pair(database: Database) -> AsyncIterator[tuple[House, MovableEngine, MovableEngine]]:
    first, second = MovableEngine("a"), MovableEngine("b")
    assert isinstance(first, MovableUpstream)
    second.is_up = False  # until a test needs it
    house = House(database, first, others=[second])
    yield house, first, second
    await house.close()


async def text_of(house: House, run: Run) -> str:
    _, events = await house.closed(run)
    return "".join(event.text for event in events if isinstance(event, SequenceOutput))


async def test_it_goes_on_at_another_engine_from_what_arrived(
    pair: tuple[House, MovableEngine, MovableEngine],
) -> None:
    house, first, second = pair
    run, (one,) = await house.running()
    first.emit(one, 3, gpu_us=70)
    await until(lambda: run.output_tokens == 3)
    second.is_up = True
    first.die()
    await until(lambda: one in second.imported)
    state = second.imported[one]
    assert (state.output_token_ids, state.text_sent, state.kv, state.gpu_us) == ([7, 7, 7], 3, [], 70)
    assert state.kv_tokens == len(PROMPT) + 2, "what was computed is not charged again"
    assert state.submit.lease_tokens == first.leases[one][-1]
    assert house.flow.placement.load("a").ahead_of(2) == (0, 0)
    assert house.flow.placement.load("b").ahead_of(2)[0] == 1, "the queue counts it where it runs now"
    second.emit(one, 4)
    second.end(one, "stop")
    closed, events = await house.closed(run)
    assert "".join(event.text for event in events if isinstance(event, SequenceOutput)) == "x" * 7
    settle = await house.check(run, RequestOutcome.COMPLETED, 7)
    (move,) = closed.account.as_json()["replica_moves"]
    assert (move["from"], move["to"], move["cause"], move["recomputed_tokens"]) == ("a", "b", "lost", 12)
    assert move["pause_s"] is not None
    assert settle.detail["replica_moves"] == [move]
    assert settle.detail["upstream"] == "b"
    assert second.acknowledged == [one]
    assert first.acknowledged == [one], "an engine that comes back finds its outcome settled"


async def test_all_sequences_of_a_request_move_together(
    pair: tuple[House, MovableEngine, MovableEngine],
) -> None:
    house, first, second = pair
    run, ids = await house.running(choices=2)
    first.emit(ids[0], 2)
    first.emit(ids[1], 5)
    await until(lambda: run.output_tokens == 7)
    second.is_up = True
    first.die()
    await until(lambda: len(second.imported) == 2)
    assert [len(second.imported[each].output_token_ids) for each in ids] == [2, 5]
    for each in ids:
        second.emit(each, 1)
        second.end(each, "stop")
    closed, _ = await house.closed(run)
    assert len(closed.account.replica_moves) == 1
    await house.check(run, RequestOutcome.COMPLETED, 9)


async def test_one_that_has_no_token_yet_begins_anew(
    pair: tuple[House, MovableEngine, MovableEngine],
) -> None:
    house, first, second = pair
    run, (one,) = await house.running()
    second.is_up = True
    first.die()
    await until(lambda: one in second.submitted)
    assert not second.imported
    second.emit(one, 2)
    second.end(one, "stop")
    await house.closed(run)
    await house.check(run, RequestOutcome.COMPLETED, 2)


async def test_without_an_engine_it_waits_and_keeps_its_hold(
    pair: tuple[House, MovableEngine, MovableEngine],
) -> None:
    house, first, _ = pair
    run, (one,) = await house.running()
    first.emit(one, 3)
    await until(lambda: run.output_tokens == 3)
    first.die()
    await until(lambda: len(house.flow) == 1)
    assert run.call.request_id in house.holds.live
    (waiting,) = house.flow.queue.tickets()
    assert waiting.had == (len(PROMPT), 3)
    first.rise()
    await until(lambda: one in first.imported)
    first.emit(one, 1)
    first.end(one, "length")
    await house.closed(run)
    await house.check(run, RequestOutcome.COMPLETED, 4)


async def test_it_never_goes_on_at_a_server_that_would_begin_anew(database: Database) -> None:
    engine, server = MovableEngine("a"), ScriptedEngine("b")
    server.is_up = False
    house = House(database, engine, others=[server])
    run, (one,) = await house.running()
    engine.emit(one, 3)
    await until(lambda: run.output_tokens == 3)
    server.is_up = True
    engine.die()
    await until(lambda: len(house.flow) == 1)
    house.dispatcher.pump()
    assert not server.submitted
    engine.rise()
    await until(lambda: one in engine.imported)
    engine.end(one, "stop")
    await house.closed(run)
    await house.check(run, RequestOutcome.COMPLETED, 3)
    await house.close()


async def test_a_wait_ends_with_its_tiers_time_and_what_arrived_is_charged(database: Database) -> None:
    engine = MovableEngine("a")
    config = structs.replace(CONFIG, ttl_interactive_s=0.1, ttl_standard_s=0.1, ttl_batch_s=0.1)
    house = House(database, engine, config=config)
    run, (one,) = await house.running()
    engine.emit(one, 3)
    await until(lambda: run.output_tokens == 3)
    engine.die()
    closed, _ = await house.closed(run)
    assert told(run, closed).code == "engine_lost"
    await house.check(run, RequestOutcome.ENGINE_LOST, 3)
    await house.close()


async def test_it_is_cancelled_while_it_waits(pair: tuple[House, MovableEngine, MovableEngine]) -> None:
    house, first, _ = pair
    run, (one,) = await house.running()
    first.emit(one, 3)
    await until(lambda: run.output_tokens == 3)
    first.die()
    await until(lambda: len(house.flow) == 1)
    house.lifecycle.cancel(run)
    await house.closed(run)
    await house.check(run, RequestOutcome.CANCELLED, 3)


async def test_moves_are_bounded(database: Database) -> None:
    """A request may be what kills its engines."""
    engine = MovableEngine("a")
    house = House(database, engine, config=structs.replace(CONFIG, moves=2))
    run, (one,) = await house.running()
    for count in (1, 2):
        engine.emit(one, 1)
        await until(lambda count=count: run.output_tokens == count)
        engine.die()
        await until(lambda: len(house.flow) == 1)
        engine.imported.clear()
        engine.rise()
        await until(lambda: one in engine.imported)
    engine.die()
    closed, _ = await house.closed(run)
    assert told(run, closed).code == "engine_lost"
    await house.check(run, RequestOutcome.ENGINE_LOST, 2)
    await house.close()


async def test_an_engine_that_stops_gives_its_sequences_up(
    pair: tuple[House, MovableEngine, MovableEngine],
) -> None:
    """What it says with its last word is left aside: it is computed again where the sequence goes on."""
    house, first, second = pair
    run, (one,) = await house.running()
    first.emit(one, 3)
    await until(lambda: run.output_tokens == 3)
    second.is_up, first.is_up = True, False
    first.end(one, "cancelled", hidden=2)
    first.fail(one, UpstreamLost("closed"))
    await until(lambda: one in second.imported)
    assert second.imported[one].output_token_ids == [7] * 3
    second.emit(one, 2)
    second.end(one, "stop")
    assert await text_of(house, run) == "x" * 5
    await house.check(run, RequestOutcome.COMPLETED, 5)


async def test_a_turn_for_an_engine_that_has_just_gone_is_taken_elsewhere(
    pair: tuple[House, MovableEngine, MovableEngine],
) -> None:
    house, first, second = pair
    run = first.run

    def refuse(*_: object) -> AsyncIterator[Delta]:
        second.is_up, first.is_up = True, False
        first.run = run  # type: ignore[method-assign]
        raise UpstreamUnavailable("gone")

    first.run = refuse  # type: ignore[method-assign]
    begun = house.begin()
    name = f"{begun.call.request_id}.0"
    await until(lambda: name in second.submitted)
    second.emit(name, 1)
    second.end(name, "stop")
    await house.closed(begun)
    await house.check(begun, RequestOutcome.COMPLETED, 1)


class TestDrain:
    async def test_what_runs_is_handed_over_with_its_cache(
        self, pair: tuple[House, MovableEngine, MovableEngine]
    ) -> None:
        house, first, second = pair
        run, (one,) = await house.running()
        first.emit(one, 3)
        await until(lambda: run.output_tokens == 3)
        second.is_up = True
        first.drain()
        house.lifecycle.move_off(first)
        house.lifecycle.move_off(first)
        await until(lambda: one in second.imported)
        assert second.imported[one].kv == [b"kv"]
        second.emit(one, 1)
        second.end(one, "stop")
        closed, _ = await house.closed(run)
        (move,) = closed.account.replica_moves
        assert (move.cause, move.recomputed_tokens) == ("drained", 0)
        await house.check(run, RequestOutcome.COMPLETED, 4)

    async def test_without_another_place_it_runs_on(
        self, pair: tuple[House, MovableEngine, MovableEngine]
    ) -> None:
        house, first, _ = pair
        run, (one,) = await house.running()
        first.drain()
        house.lifecycle.move_off(first)
        first.emit(one, 4)
        first.end(one, "stop")
        closed, _ = await house.closed(run)
        assert not closed.account.replica_moves
        await house.check(run, RequestOutcome.COMPLETED, 4)

    async def test_it_ends_where_it_was_while_it_waits_for_a_place(
        self, pair: tuple[House, MovableEngine, MovableEngine]
    ) -> None:
        house, first, second = pair
        first.is_drained, second.is_up = True, True
        house.begin(choices=2)  # has both places of the other
        await until(lambda: len(second.submitted) == 2)
        first.is_drained = False
        run, (one,) = await house.running()
        first.drain()
        house.lifecycle.move_off(first)
        await until(lambda: len(house.flow) == 1)
        first.emit(one, 4)
        first.end(one, "stop")
        await house.closed(run)
        await until(lambda: len(house.flow) == 0)
        settle = (await house.ledger.find(run.call.request_id))[1]
        assert settle.amounts.output_tokens == 4
        (other,) = house.flow.in_flight
        costs = len(PROMPT) + 2 * 4 + other.charged_cost
        assert house.flow.counters.value("ten_1") == costs * 1_000_000

    async def test_an_engine_that_does_not_answer_is_left_from_what_arrived(
        self, pair: tuple[House, MovableEngine, MovableEngine]
    ) -> None:
        house, first, second = pair
        run, (one,) = await house.running()
        first.emit(one, 3)
        await until(lambda: run.output_tokens == 3)
        second.is_up, first.exports = True, False
        first.drain()
        house.lifecycle.move_off(first)
        await until(lambda: one in second.imported)
        assert first.cancelled == [one]
        assert second.imported[one].kv == []
        second.emit(one, 1)
        second.end(one, "stop")
        await house.closed(run)
        await house.check(run, RequestOutcome.COMPLETED, 4)
