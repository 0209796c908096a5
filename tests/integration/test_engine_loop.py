"""Rules of the engine's loop that need a small bound, a fast model or a broken part: a loop on a thread,
a virtual model, real sockets."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
from msgspec.structs import replace

from engine import messages
from engine.client.client import EngineClient
from engine.client.stream import EngineLost, SubmitRefused
from engine.core.core import EngineConfig, EngineCore, TextFactory
from engine.messages import Ready, SamplingParams
from engine.process.loop import EngineLoop
from engine.process.outcomes import OutcomeStore
from engine.virtual.replica import VirtualClock, VirtualRunner, VirtualText, VirtualTexts
from tests.support.engine_process import START_S, connected, sequence, tokens_of

ENDLESS_TOKENS = 1_000_000


class BrokenText(VirtualText):
    """A detokeniser with a bug that shows at the third token."""

    tokens = 0

    def push(self, token_id: int) -> str:
        self.tokens += 1
        if self.tokens == 3:
            raise ZeroDivisionError
        return super().push(token_id)


class BrokenTexts(VirtualTexts):
    def open(self, prompt_token_ids: list[int], sampling: SamplingParams) -> VirtualText:
        return BrokenText(sampling.stop)


class ThreadedLoop:
    """A running loop and what became of it."""

    def __init__(self, loop: EngineLoop, store: OutcomeStore) -> None:
        self.loop = loop
        self.store = store
        self.error: Exception | None = None
        self.why = ""
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.why = self.loop.run()
        except Exception as error:
            self.error = error


@contextmanager
def running_loop(
    address: str,
    *,
    texts: TextFactory | None = None,
    max_outcomes: int = 1000,
    queue_messages: int = 1000,
    backlog_s: float = 3.0,
    lost_s: float = 10.0,
    num_blocks: int = 100_000,
) -> Iterator[ThreadedLoop]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.SNDHWM, queue_messages)
    socket.bind(address)
    clock, context_tokens = VirtualClock(), 2 * ENDLESS_TOKENS
    # A small one keeps the books of its KV.
    audit = num_blocks < 100
    runner = VirtualRunner(clock, num_blocks=num_blocks, context_tokens=context_tokens, audit=audit)
    config = EngineConfig()
    ready = Ready("engine-0", runner.info, "vtc", 16, runner.num_blocks, 64, 512, pid=1)
    store = OutcomeStore(max_outcomes)
    loop = EngineLoop(
        EngineCore(runner, texts or VirtualTexts(), config, time.monotonic),
        socket,
        ready,
        store,
        orphan_s=60.0,
        clock=time.monotonic,
        backlog_s=backlog_s,
        lost_s=lost_s,
    )
    threaded = ThreadedLoop(loop, store)
    try:
        yield threaded
    finally:
        loop.stop(0.0)
        threaded.thread.join(START_S)
        socket.close(linger=0)
        context.term()


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/engine.sock"


async def test_at_the_bound_of_unsettled_outcomes_sequences_are_refused_until_some_are_settled(
    address: str,
) -> None:
    with running_loop(address, max_outcomes=2):
        async with connected(address) as client:
            first, running = client.submit(sequence(3)), client.submit(sequence(9, lease_tokens=3))
            assert len(await tokens_of(first)) == 3
            with pytest.raises(SubmitRefused, match="1 outcomes wait for their settlement") as refused:
                await anext(client.submit(sequence(3)))
            assert refused.value.code == "outcomes_full"
            client.acknowledge([first.sequence_id])
            assert len(await tokens_of(client.submit(sequence(3)))) == 3
            client.top_up(running.sequence_id, 9)
            assert len(await tokens_of(running)) == 9


async def test_a_gateway_that_says_hello_but_reads_nothing_is_lost_and_nobody_waits_for_it(
    address: str,
) -> None:
    with running_loop(address, queue_messages=2) as engine, zmq.Context() as context:
        deaf = context.socket(zmq.DEALER)
        deaf.setsockopt(zmq.LINGER, 0)
        deaf.setsockopt(zmq.RCVHWM, 1)
        deaf.setsockopt(zmq.IDENTITY, b"deaf/1")
        deaf.connect(address)
        with deaf:
            deaf.send(messages.encode(messages.Hello("deaf")))
            deaf.send(messages.encode(sequence(ENDLESS_TOKENS, sequence_id="unread")))
            async with connected(address) as client:
                assert len(await tokens_of(client.submit(sequence(500)))) == 500
                async with asyncio.timeout(START_S):
                    while "unread" not in engine.store:
                        deaf.send(messages.encode(messages.Hello("deaf")))
                        assert len(await tokens_of(client.submit(sequence(50)))) == 50
                assert "unread" not in {each.sequence_id for each in (await client.collect()).outcomes}
                # Its last Hello may have opened another session, which has to end first.
                adopted: dict[str, messages.SequenceOutcome] = {}
                async with asyncio.timeout(START_S):
                    while "unread" not in adopted:
                        outcomes = (await client.collect(adopt=True)).outcomes
                        adopted = {each.sequence_id: each for each in outcomes}
                assert adopted["unread"].message == "gateway lost"
                assert 0 < adopted["unread"].emitted_tokens < ENDLESS_TOKENS


async def test_a_broken_core_ends_its_sequences_with_what_they_had_and_raises(address: str) -> None:
    with running_loop(address, texts=BrokenTexts()) as engine:
        client = EngineClient(address, "gateway-a")
        await client.connect(START_S)
        stream = client.submit(sequence(ENDLESS_TOKENS))
        outcome = await stream.drain()
        assert outcome is not None
        assert (outcome.finish, outcome.message, stream.received_tokens) == ("failed", "the engine failed", 2)
        assert outcome.emitted_tokens >= stream.received_tokens
        await asyncio.to_thread(engine.thread.join, START_S)
        assert isinstance(engine.error, ZeroDivisionError)
        assert [held.outcome for held in engine.store.held()] == [outcome]
        await client.close()


async def test_an_idle_engine_looks_whether_its_books_agree_and_a_damaged_one_ends(address: str) -> None:
    with running_loop(address) as engine:
        client = EngineClient(address, "gateway-a")
        await client.connect(START_S)
        engine.loop._core.table.pool._pool._free.pop()
        assert len(await tokens_of(client.submit(sequence(3)))) == 3, "nobody waits for the audit"
        await asyncio.to_thread(engine.thread.join, START_S)
        assert isinstance(engine.error, AssertionError)
        assert "1 blocks leaked" in str(engine.error)
        await client.close()


async def test_an_engine_that_comes_back_has_the_policy_and_its_options(address: str) -> None:
    client = EngineClient(address, "gateway-a")
    with running_loop(address):
        await client.connect(START_S)
        await client.set_policy("vtc", {"slots": 5, "order": "drr"})
        explained = await client.explain()
        assert explained.choices["order"] == "drr"
        assert explained.options == {"slots": 5, "order": "drr"}
        with pytest.raises(ValueError, match="option slots takes auto, or a whole number from 0"):
            await client.set_policy("vtc", {"slots": -1})
        assert (await client.explain()).options == {"slots": 5, "order": "drr"}
    client.mark_lost()
    with running_loop(address):
        await client.connect(START_S)
        assert (await client.explain()).options == {"slots": 5, "order": "drr"}
        await client.close()


async def test_a_stopping_engine_takes_nothing_new_and_ends_once_its_outcomes_are_settled(
    address: str,
) -> None:
    with running_loop(address) as engine:
        client = EngineClient(address, "gateway-a")
        await client.connect(START_S)
        running = client.submit(sequence(6, lease_tokens=3))
        for _ in range(3):
            await anext(running)
        engine.loop.stop(float("inf"))
        with pytest.raises(SubmitRefused, match="shutting down"):
            await anext(client.submit(sequence(3)))
        client.top_up(running.sequence_id, 6)
        outcome = await running.drain()
        assert outcome is not None
        assert (outcome.finish, outcome.emitted_tokens) == ("length", 6)
        client.acknowledge([running.sequence_id])
        await asyncio.to_thread(engine.thread.join, START_S)
        assert engine.why == "it was asked to stop"
        assert len(engine.store) == 0
        await client.close()


async def test_an_engine_that_comes_back_unnoticed_is_a_new_engine(address: str) -> None:
    with running_loop(address):
        client = EngineClient(address, "gateway-a")
        await client.connect(START_S)
        stream = client.submit(sequence(10, lease_tokens=2))
        for _ in range(2):
            await anext(stream)
    # The client is not told; the socket connects to the successor by itself.
    with running_loop(address):
        with pytest.raises(EngineLost):
            await stream.drain()
        await client.connect(START_S)
        assert len(await tokens_of(client.submit(sequence(5)))) == 5
        await client.close()


async def test_a_gateway_whose_loop_stands_still_keeps_its_streams(address: str) -> None:
    with running_loop(address, lost_s=0.8) as engine:
        async with connected(address) as client:
            stream = client.submit(sequence(2000, lease_tokens=500))
            await anext(stream)
            # Longer than silence and second look together; only the liveness thread speaks meanwhile.
            time.sleep(3.0)  # noqa: ASYNC251 (the loop is to stand still)
            assert not len(engine.store)
            client.top_up(stream.sequence_id, 2000)
            assert len([token async for delta in stream for token in delta.token_ids]) == 1999
            assert client.is_up


async def test_the_step_in_which_a_sequence_came_is_told_as_the_time_before_it_was_read(address: str) -> None:
    with running_loop(address):
        async with connected(address) as client:
            running = client.submit(sequence(ENDLESS_TOKENS))
            await anext(running)
            (late,) = [delta async for delta in client.submit(sequence(1)) if delta.outcome]
            client.cancel(running.sequence_id)
            (first,) = [delta async for delta in running if delta.outcome]

    assert first.outcome is not None
    assert first.outcome.unread_s == 0.0, "an idle engine reads at once"
    assert late.outcome is not None
    assert 0 < late.outcome.unread_s < START_S


async def test_a_stream_that_the_engine_does_not_have_is_lost_after_two_inventories(address: str) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as forgetful:
        forgetful.setsockopt(zmq.LINGER, 0)
        forgetful.bind(address)
        info = VirtualRunner(VirtualClock(), num_blocks=8, context_tokens=64).info
        asked: list[messages.Command] = []

        def answer() -> None:
            """Greets, swallows sequences, and says that nothing runs."""
            while forgetful.poll(0):
                identity, payload = forgetful.recv_multipart()
                command = messages.decode_command(payload)
                if isinstance(command, messages.Hello) and not asked:
                    event: messages.Event = Ready("engine-0", info, "vtc", 16, 8, 8, 512, pid=1)
                elif isinstance(command, messages.Collect):
                    event = messages.Inventory("engine-0", [], [])
                else:
                    continue
                asked.append(command)
                forgetful.send_multipart([identity, messages.encode(event)])

        async def serve() -> None:
            while True:
                answer()
                await asyncio.sleep(0.01)

        serving = asyncio.create_task(serve())
        client = EngineClient(address, "gateway-a")
        try:
            await client.connect(START_S)
            stream = client.submit(sequence(5))
            with pytest.raises(EngineLost, match="the engine does not have it"):
                async with asyncio.timeout(START_S):
                    await anext(stream)
            assert len([each for each in asked if isinstance(each, messages.Collect)]) == 2
            assert client.is_up, "the others go on"
        finally:
            serving.cancel()
            await client.close()


async def test_what_went_on_elsewhere_ends_with_its_session_and_can_be_settled_by_the_next(
    address: str,
) -> None:
    """Also by a session that does not wait for its answer; the sequence may then come back."""

    def say(socket: zmq.Socket[bytes], *commands: messages.Tagged) -> list[int]:
        """Three tokens that come of it."""
        for command in commands:
            socket.send(messages.encode(command))
        token_ids: list[int] = []
        while len(token_ids) < 3:
            assert socket.poll(START_S * 1000), "no answer came"
            event = messages.decode_event(socket.recv())
            assert not isinstance(event, messages.Refused), event
            deltas = event.deltas if isinstance(event, messages.Step) else []
            token_ids += [token_id for delta in deltas for token_id in delta.token_ids]
        return token_ids[:3]

    endless, hello = sequence(ENDLESS_TOKENS), messages.Hello("gateway-a")
    again = replace(endless, max_tokens=3, lease_tokens=3)
    with (
        running_loop(address) as engine,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as old,
        context.socket(zmq.DEALER) as new,
    ):
        for socket in (old, new):
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(address)
        began = say(old, hello, endless)
        assert say(new, hello, messages.Acknowledge([endless.sequence_id]), again) == began
        assert [held.outcome.emitted_tokens for held in engine.store.held()] == [3]


async def test_kv_that_is_not_wanted_or_fits_no_message_is_left(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_loop(address, num_blocks=99):
        async with connected(address) as client:
            for with_kv, limit, parts in ((True, 1 << 20, 1), (False, 1 << 20, 0), (True, 200, 0)):
                monkeypatch.setattr("engine.process.loop.MAX_MESSAGE_BYTES", limit)
                stream = client.submit(sequence(9, lease_tokens=4))
                assert len([await anext(stream) for _ in range(4)]) == 4
                state = await client.export(stream.sequence_id, with_kv=with_kv)
                assert state is not None
                assert (len(state.kv), len(state.output_token_ids)) == (parts, 4)
