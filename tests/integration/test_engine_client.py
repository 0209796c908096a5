"""Rules of the link between gateways and a real engine process."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop
import zmq

from engine import messages
from engine.client.client import EngineClient
from engine.client.keys import gateway_keys, make_keys
from engine.client.stream import EngineLost, EngineRefused, EngineUnavailable, SubmitRefused
from engine.messages import EngineKnobs, Hello, Refused, Snapshot, TenantShare
from engine.process.options import EngineOptions
from tests.support.engine_process import (
    DEADLINE_S,
    NUM_BLOCKS,
    START_S,
    connected,
    engine_options,
    running_engine,
    sequence,
    tokens_of,
    until,
)
from tests.support.services import free_port
from tests.support.tiny_model import CONTEXT_TOKENS, save_tiny_model
from tests.support.warm_engine import WarmEngine

ENDLESS_TOKENS = 8000


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> EngineOptions:
    data_dir = tmp_path_factory.mktemp("engine")
    return engine_options(save_tiny_model(data_dir / "model"), data_dir)


@pytest.fixture(scope="module")
def engine(options: EngineOptions) -> Iterator[WarmEngine]:
    with running_engine(options) as process:
        yield process


@pytest.fixture
async def client(engine: WarmEngine, options: EngineOptions) -> AsyncIterator[EngineClient]:
    async with connected(options.address) as client:
        yield client


async def until_async(count: Callable[[], Awaitable[int]], wanted: int) -> None:
    """Asks again until it is `wanted`: what other clients send is read in its own time."""
    async with asyncio.timeout(DEADLINE_S):
        while await count() != wanted:
            pass


async def idle_snapshot(client: EngineClient) -> Snapshot:
    """The engine's load once nothing runs."""
    await until(lambda: client.snapshot and not client.snapshot.running and not client.snapshot.waiting)
    assert client.snapshot is not None
    return client.snapshot


@asynccontextmanager
async def stand_in(
    options: EngineOptions, gateway_id: str, num_sequences: int, lease_tokens: int = ENDLESS_TOKENS
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Another gateway's process, with every sequence in mid-stream; killed at the end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.gateway_stand_in", options.address, gateway_id),
        *(str(num_sequences), str(lease_tokens)),
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_S):
            for _ in range(num_sequences):
                assert await process.stdout.readline()
        yield process
    finally:
        process.kill()
        await process.communicate()


# ------------------------------------------------------------------- the plain way


async def test_a_sequence_is_streamed_token_by_token_and_ends_with_its_outcome(client: EngineClient) -> None:
    stream = client.submit(sequence(20, prompt_tokens=10))
    tokens = await tokens_of(stream)
    assert len(tokens) == 20
    assert len(set(tokens)) > 5, "a model that repeats itself would hide a repeated token"
    outcome = stream.outcome
    assert outcome is not None
    assert (outcome.finish, outcome.prompt_tokens, outcome.computed_tokens, outcome.emitted_tokens) == (
        "length",
        10,
        10,
        20,
    )


async def test_many_sequences_share_steps_and_each_gets_what_it_gets_alone(client: EngineClient) -> None:
    submits = [sequence(30, prompt_tokens=5 + index) for index in range(8)]
    together = await asyncio.gather(*(tokens_of(client.submit(submit)) for submit in submits))
    for submit, tokens in zip(submits, together, strict=True):
        alone = sequence(30, prompt_token_ids=submit.prompt_token_ids)
        assert await tokens_of(client.submit(alone)) == tokens


async def test_ready_says_what_the_engine_is(client: EngineClient, engine: WarmEngine) -> None:
    ready = client.ready
    assert ready is not None
    assert ready.pid == engine.pid
    assert ready.num_blocks == NUM_BLOCKS
    assert ready.model.context_tokens == CONTEXT_TOKENS


async def test_more_than_may_wait_are_refused_and_the_watermark_stays_free(
    options: EngineOptions, tmp_path: Path
) -> None:
    # 64 blocks, of which an admission leaves half free beside others: 20 and 20 leave fewer.
    small = {"num_blocks": 64, "context_tokens": 1024, "max_waiting": 1, "kv_watermark_permille": 500}
    own = engine_options(options.model_dir, tmp_path, **small)
    with running_engine(own):
        async with connected(own.address) as client:
            first = client.submit(sequence(600, prompt_tokens=320))
            await anext(first)
            second = client.submit(sequence(5, prompt_tokens=320))
            await until(lambda: client.snapshot and len(client.snapshot.waiting) == 1)
            with pytest.raises(SubmitRefused) as refused:
                await tokens_of(client.submit(sequence(5)))
            assert refused.value.code == "engine_full"
            client.cancel(first.sequence_id, "client")
            assert len(await tokens_of(second)) == 5
            await first.drain()


async def test_snapshots_keep_coming_when_nothing_runs(client: EngineClient) -> None:
    first = await idle_snapshot(client)
    await until(lambda: client.snapshot is not None and client.snapshot.at_s > first.at_s)


async def test_a_lease_holds_the_sequence_back_and_a_top_up_lets_it_go_on(client: EngineClient) -> None:
    stream = client.submit(sequence(20, lease_tokens=5))
    for _ in range(5):
        await anext(stream)
    await until(lambda: client.snapshot and [each.state for each in client.snapshot.running] == ["paused"])
    assert (stream.received_tokens, stream.buffered_deltas) == (5, 0)
    client.top_up(stream.sequence_id, 20)
    outcome = await stream.drain()
    assert outcome is not None
    assert (outcome.emitted_tokens, stream.received_tokens) == (20, 20)


async def test_the_reported_service_is_what_the_outcomes_say(client: EngineClient) -> None:
    served: Counter[str] = Counter()

    def count(service: dict[str, TenantShare]) -> None:
        for tenant_id, part in service.items():
            served[f"{tenant_id} computed"] += part.computed_tokens
            served[f"{tenant_id} emitted"] += part.emitted_tokens

    client.on_service = count
    streams = [
        client.submit(sequence(10, prompt_tokens=600, tenant_id=tenant))
        for tenant in ("acme", "globex", "acme")
    ]
    await asyncio.gather(*(stream.drain() for stream in streams))
    assert served == {"acme computed": 1200, "acme emitted": 20, "globex computed": 600, "globex emitted": 10}


# ---------------------------------------------------------------- cancel and refuse


async def test_cancel_stops_the_sequence_within_one_step_and_frees_its_blocks(client: EngineClient) -> None:
    stream = client.submit(sequence(ENDLESS_TOKENS, prompt_tokens=100))
    await anext(stream)
    await until(lambda: client.snapshot and client.snapshot.referenced_blocks)
    client.cancel(stream.sequence_id)
    # The answer is given at the end of the very turn in which the cancel was obeyed.
    inventory = await client.collect()
    assert inventory.running == []
    assert [each.sequence_id for each in inventory.outcomes] == [stream.sequence_id]
    outcome = await stream.drain()
    assert outcome is not None
    assert outcome.finish == "cancelled"
    assert stream.received_tokens == outcome.emitted_tokens < ENDLESS_TOKENS
    snapshot = await idle_snapshot(client)
    assert (snapshot.free_blocks + snapshot.cached_blocks, snapshot.referenced_blocks) == (NUM_BLOCKS, 0)


async def test_cancel_of_what_is_over_or_unknown_is_harmless(client: EngineClient) -> None:
    stream = client.submit(sequence(5))
    await stream.drain()
    client.cancel(stream.sequence_id)
    client.cancel("never heard of")
    assert len(await tokens_of(client.submit(sequence(5)))) == 5


async def test_what_can_never_run_is_refused_and_leaves_nothing_to_settle(client: EngineClient) -> None:
    stream = client.submit(sequence(CONTEXT_TOKENS))
    with pytest.raises(SubmitRefused, match="context") as refused:
        await anext(stream)
    assert refused.value.code == "context_length_exceeded"
    inventory = await client.collect()
    assert (inventory.running, inventory.outcomes) == ([], [])


async def test_an_id_that_is_not_settled_yet_cannot_be_used_again(client: EngineClient) -> None:
    submit = sequence(5)
    first = client.submit(submit)
    with pytest.raises(ValueError, match="runs already"):
        client.submit(submit)
    await first.drain()
    with pytest.raises(SubmitRefused, match="exists already"):
        await anext(client.submit(submit))


async def test_a_policy_is_changed_by_name_and_an_unknown_name_changes_nothing(client: EngineClient) -> None:
    await client.set_policy("fcfs")
    with pytest.raises(ValueError, match=r"fastest.*fcfs.*vtc"):
        await client.set_policy("fastest")
    await client.set_policy("vtc")


async def test_a_token_budget_is_in_force_until_the_gateway_that_set_it_is_gone(
    client: EngineClient, options: EngineOptions
) -> None:
    assert client.ready is not None
    most = client.ready.max_batched_tokens

    async def steps() -> int:
        """That a prompt of just one step's tokens and its answer of one token take."""
        before = (await idle_snapshot(client)).step
        await client.submit(sequence(1, prompt_tokens=most)).drain()
        await until(lambda: client.snapshot and client.snapshot.step > before)
        return (await idle_snapshot(client)).step - before

    async with connected(options.address, "gateway-b") as other:
        other.set_knobs(EngineKnobs(token_share=0.25))
        other.set_knobs(EngineKnobs(token_share=0.0))  # refused; the engine goes on
        await until_async(lambda: steps(), 4)
    await until_async(lambda: steps(), 1)


async def test_a_brake_is_in_force_until_a_gateway_says_otherwise_also_when_it_connects(
    client: EngineClient, options: EngineOptions
) -> None:
    assert client.ready is not None
    most = client.ready.max_batched_tokens

    async def steps(tier: int) -> int:
        """That a prompt of just one step's tokens and its answer of one token take."""
        before = (await idle_snapshot(client)).step
        await client.submit(sequence(1, prompt_tokens=most, tier=tier)).drain()
        await until(lambda: client.snapshot and client.snapshot.step > before)
        return (await idle_snapshot(client)).step - before

    async with connected(options.address, "gateway-b") as other:
        other.set_brakes({2: 1.5})  # refused; the engine goes on
        other.set_brakes({2: 0.25})
        await until_async(lambda: steps(2), 4)
        assert await steps(1) == 1
    assert await steps(2) == 4, "it outlasts the session that set it"
    late = EngineClient(options.address, "gateway-c")
    late.set_brakes({2: 0.5})
    try:
        await late.connect()
        await until_async(lambda: steps(2), 2)
    finally:
        await late.close()
    client.set_brakes({})
    await until_async(lambda: steps(2), 1)


async def test_an_exported_sequence_goes_on_where_it_was_token_for_token(client: EngineClient) -> None:
    submit = sequence(40)
    whole = await tokens_of(client.submit(sequence(40, prompt_token_ids=submit.prompt_token_ids)))
    stream = client.submit(sequence(40, prompt_token_ids=submit.prompt_token_ids, lease_tokens=15))
    for _ in range(15):
        await anext(stream)
    state = await client.export(stream.sequence_id)
    assert state is not None
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    rest = client.import_(state)
    client.top_up(rest.sequence_id, 40)
    tokens = [token_id async for delta in rest for token_id in delta.token_ids]
    assert state.output_token_ids + tokens == whole
    assert await client.export("never heard of") is None


# ----------------------------------------------------------------- several gateways


async def test_two_gateways_get_their_own_tokens_and_settle_their_own_outcomes(
    client: EngineClient, options: EngineOptions
) -> None:
    async with connected(options.address, "gateway-b") as other:
        mine, theirs = client.submit(sequence(60)), other.submit(sequence(60))
        assert [len(tokens) for tokens in await asyncio.gather(tokens_of(mine), tokens_of(theirs))] == [
            60,
            60,
        ]
        for each, stream in ((client, mine), (other, theirs)):
            # The other gateway lives: what it has not settled is not up for adoption.
            inventory = await each.collect(adopt=True)
            assert [outcome.sequence_id for outcome in inventory.outcomes] == [stream.sequence_id]


async def test_outcomes_stay_until_they_are_acknowledged_and_a_later_client_collects_them(
    client: EngineClient, options: EngineOptions
) -> None:
    vanishing = EngineClient(options.address, "gateway-b")
    await vanishing.connect(START_S)
    finished, running = vanishing.submit(sequence(5)), vanishing.submit(sequence(ENDLESS_TOKENS))
    await finished.drain()
    await anext(running)
    await vanishing.close()
    with pytest.raises(EngineLost):
        await running.drain()

    async with connected(options.address, "gateway-b") as returned:
        for _ in range(2):
            outcomes = {each.sequence_id: each for each in (await returned.collect()).outcomes}
            assert outcomes.keys() == {finished.sequence_id, running.sequence_id}
        assert outcomes[finished.sequence_id] == finished.outcome
        cut = outcomes[running.sequence_id]
        assert (cut.finish, cut.message) == ("cancelled", "gateway lost")
        assert running.received_tokens <= cut.emitted_tokens < ENDLESS_TOKENS
        returned.acknowledge([finished.sequence_id])
        assert [each.sequence_id for each in (await returned.collect()).outcomes] == [running.sequence_id]


async def test_another_gateway_adopts_what_a_killed_one_left(
    client: EngineClient, options: EngineOptions
) -> None:
    async with stand_in(options, "doomed", 3):
        pass  # killed in mid-stream

    adopted = []
    async with asyncio.timeout(DEADLINE_S):
        while len(adopted) < 3:
            adopted = (await client.collect(adopt=True)).outcomes
    assert {each.sequence_id for each in adopted} == {"doomed-0", "doomed-1", "doomed-2"}
    for outcome in adopted:
        assert (outcome.finish, outcome.message) == ("cancelled", "gateway lost")
        assert 1 <= outcome.emitted_tokens < ENDLESS_TOKENS
    assert (await idle_snapshot(client)).referenced_blocks == 0


async def test_a_stopped_gateway_holds_nobody_up_and_is_lost(
    client: EngineClient, options: EngineOptions
) -> None:
    async with stand_in(options, "stopped", 1, lease_tokens=1) as stopped:
        stopped.send_signal(signal.SIGSTOP)
        # Its connection stays open and its queue stays short, so only its silence tells; others are served.
        assert len(await tokens_of(client.submit(sequence(100)))) == 100
        outcomes: list[messages.SequenceOutcome] = []
        async with asyncio.timeout(DEADLINE_S):
            while len(outcomes) < 2:
                outcomes = (await client.collect(adopt=True)).outcomes
        assert ("stopped-0", "gateway lost") in {(each.sequence_id, each.message) for each in outcomes}


async def test_a_second_process_with_the_same_gateway_id_takes_over_and_the_first_is_told(
    client: EngineClient, options: EngineOptions
) -> None:
    stream = client.submit(sequence(ENDLESS_TOKENS))
    await anext(stream)
    async with connected(options.address, client.gateway_id) as newcomer:
        inventory = await newcomer.collect()
        assert [each.sequence_id for each in inventory.outcomes] == [stream.sequence_id]
        with pytest.raises(EngineLost, match="another process has connected as gateway 'gateway-a'"):
            await stream.drain()
        assert not client.is_up
        with pytest.raises(EngineRefused, match="an id of its own"):
            client.submit(sequence())
        assert len(await tokens_of(newcomer.submit(sequence(5)))) == 5


def paused_sequences(client: EngineClient) -> set[str]:
    running = client.snapshot.running if client.snapshot is not None else ()
    return {each.sequence_id for each in running if each.state == "paused"}


async def test_an_engine_rests_for_a_reader_that_takes_nothing_and_goes_on_when_it_does(
    engine: WarmEngine, options: EngineOptions
) -> None:
    async with connected(options.address, "gateway-b", max_buffered_deltas=12) as client:
        submit = sequence(400)
        whole = await tokens_of(client.submit(submit))
        unread = client.submit(sequence(400, prompt_token_ids=submit.prompt_token_ids))
        # Named: the last snapshot may still show the sequence before it, which rested between two reads.
        await until(lambda: paused_sequences(client) == {unread.sequence_id})
        assert (unread.received_tokens, unread.buffered_deltas) == (9, 9), "three quarters of the buffer"
        assert len(await tokens_of(client.submit(sequence(100)))) == 100
        # A lease that grows meanwhile is for later, and one that covers less than there is room for is kept.
        client.top_up(unread.sequence_id, 400)
        leased = client.submit(sequence(400, lease_tokens=3, prompt_token_ids=submit.prompt_token_ids))
        await until(lambda: leased.received_tokens == 3)
        await until(lambda: paused_sequences(client) == {unread.sequence_id, leased.sequence_id})
        assert (unread.received_tokens, leased.received_tokens) == (9, 3)
        client.top_up(leased.sequence_id, 400)
        assert await asyncio.gather(tokens_of(unread), tokens_of(leased)) == [whole, whole]


# -------------------------------------------------------------- an engine that dies


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_a_killed_engine_is_noticed_by_its_connection_and_its_successor_serves(
    options: EngineOptions, tmp_path: Path, transport: str
) -> None:
    """The process is not watched, and the silence would have to last for an hour."""
    address = f"ipc://{tmp_path}/s" if transport == "ipc" else f"tcp://127.0.0.1:{free_port()}"
    mine = engine_options(options.model_dir, tmp_path, address=address)
    make_keys(tmp_path)
    lost: list[str] = []
    processes: list[WarmEngine] = []

    def start_engine() -> WarmEngine:
        processes.append(WarmEngine(mine, tmp_path / "stderr"))
        return processes[-1]

    try:
        start_engine()
        async with connected(
            address, keys=gateway_keys(address, tmp_path), silence_s=3600, on_lost=lambda: lost.append("lost")
        ) as client:
            stream = client.submit(sequence(ENDLESS_TOKENS))
            await anext(stream)
            processes[0].kill()
            with pytest.raises(EngineLost, match="the engine died"):
                async with asyncio.timeout(DEADLINE_S):
                    await stream.drain()
            assert (lost, client.is_up) == (["lost"], False)
            successor = start_engine()
            assert (await client.connect(START_S)).pid == successor.pid
            assert len(await tokens_of(client.submit(sequence(5)))) == 5
    finally:
        for process in processes:
            process.kill()
            process.wait()


# ---------------------------------------------------------------- the wire itself


def raw_socket(context: zmq.Context[zmq.Socket[bytes]], options: EngineOptions) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
    socket.connect(options.address)
    return socket


async def test_malformed_and_unexpected_frames_are_survived(
    client: EngineClient, options: EngineOptions
) -> None:
    stream = client.submit(sequence(ENDLESS_TOKENS))
    with zmq.Context() as context, raw_socket(context, options) as socket:
        for frames in (
            [b""],
            [b"\xff" * 1000],
            [b"one", b"frame", b"too many"],
            [messages.encode(messages.Hello("a"))[:-1]],
            [messages.encode({"t": "no such command"})],
            [messages.encode({"t": "submit", "sequence_id": 7})],
        ):
            socket.send_multipart(frames)
        socket.send(messages.encode(sequence()))
        answer = messages.decode_event(await asyncio.to_thread(socket.recv))
        assert isinstance(answer, Refused)
        assert answer.code == "no_session"
    before = stream.received_tokens
    await until(lambda: stream.received_tokens > before)
    client.cancel(stream.sequence_id)
    assert await stream.drain()


async def test_a_gateway_of_another_protocol_version_is_told_so(
    engine: WarmEngine, options: EngineOptions
) -> None:
    with zmq.Context() as context, raw_socket(context, options) as socket:
        socket.send(messages.encode(Hello("gateway-b", protocol_version=99)))
        answer = messages.decode_event(await asyncio.to_thread(socket.recv))
    assert isinstance(answer, Refused)
    assert (answer.sequence_id, answer.code) == ("", "protocol_version")
    assert "the gateway 99" in answer.message


async def test_without_an_engine_commands_fail_at_once_and_connecting_says_where(tmp_path: Path) -> None:
    client = EngineClient(f"ipc://{tmp_path}/nobody.sock", "gateway-a")
    with pytest.raises(EngineUnavailable, match=r"no engine serves at ipc://.*nobody\.sock"):
        await client.connect(timeout_s=0.2)
    with pytest.raises(EngineUnavailable):
        client.submit(sequence())
    with pytest.raises(EngineUnavailable):
        await client.collect()
    client.cancel("never heard of")
    client.acknowledge(["never heard of"])
    await client.close()


def test_the_client_works_on_uvloop_as_well(engine: WarmEngine, options: EngineOptions) -> None:
    async def run() -> int:
        async with connected(options.address) as client:
            return len(await tokens_of(client.submit(sequence(200))))

    assert uvloop.run(run()) == 200
