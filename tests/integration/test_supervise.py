"""Rules of the engine process's life: started, found again, restarted, replaced, and never two at once."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.client.client import EngineClient
from engine.client.stream import EngineLost
from engine.process.lock import EngineLock, LockContent, find_holder, lock_path
from engine.process.options import EngineOptions
from engine.process.outcomes import OutcomeStore, OutcomesUnreadable, read_outcomes, write_outcomes
from engine.process.server import run_engine
from ops.serving import supervisor as supervisors
from ops.serving.supervisor import EnginePhase, EngineStartFailed, EngineSupervisor, backoff_s, engine_address
from tests.support.engine_process import START_S, engine_options, sequence, tokens_of, until
from tests.support.tiny_model import save_tiny_model
from tests.support.warm_engine import WarmEngine
from tests.unit.engine.process.test_outcomes import outcome

ENDLESS_TOKENS = 8000


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Supervised engines need not import torch. One that is refused is started as ever."""

    def spawn(supervisor: EngineSupervisor) -> supervisors._WatchedProcess:
        engine = WarmEngine(supervisor._options, supervisor._log_path)
        return supervisors._WatchedProcess(engine.pid, engine, supervisor._log_path)  # type: ignore[arg-type]

    monkeypatch.setattr(EngineSupervisor, "_spawn", spawn)


@asynccontextmanager
async def supervised(
    options: EngineOptions, *, end: str = "stop", **changes: Any
) -> AsyncIterator[tuple[EngineSupervisor, EngineClient]]:
    gateway_id = changes.pop("gateway_id", "gateway-a")
    client = EngineClient(options.address, gateway_id, **changes.pop("client", {}))
    supervisor = EngineSupervisor(options, client, **changes)
    try:
        await supervisor.start()
        yield supervisor, client
        if end == "detach":
            await supervisor.detach()
    finally:
        if end == "stop":
            await supervisor.stop()
        await client.close()


# ------------------------------------------------------------- death and recovery


@pytest.mark.usefixtures("warm")
async def test_a_killed_engine_ends_its_streams_and_a_new_one_serves(model_dir: Path, tmp_path: Path) -> None:
    losses: list[str] = []
    async with supervised(engine_options(model_dir, tmp_path)) as (supervisor, client):
        await supervisor.ready(START_S)
        client.on_lost = lambda: losses.append("lost")
        streams = [client.submit(sequence(ENDLESS_TOKENS)) for _ in range(2)]
        for stream in streams:
            await anext(stream)
        killed = supervisor.status.pid
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineLost, match="the engine died") as lost:
                await stream.drain()
            assert lost.value.received_tokens == stream.received_tokens >= 1
        assert losses == ["lost"]
        assert client.snapshot is None

        await client.connect(START_S)
        assert supervisor.status.pid != killed
        assert supervisor.status.failures == 1
        assert supervisor.status.last_error == "it was ended by SIGKILL"
        assert len(await tokens_of(client.submit(sequence(5)))) == 5


def _run_losing_device(options: EngineOptions) -> int:
    """Runs an engine whose device is lost, as torch shows it, once the file `lose` is there; removes it."""
    import torch

    lose, inference_mode, lost = options.data_dir / "lose", torch.inference_mode, False

    def failing(*arguments: Any) -> Any:
        nonlocal lost
        if lost or lose.exists():
            lost = True
            lose.unlink(missing_ok=True)
            raise torch.AcceleratorError("CUDA error: device-side assert triggered\nSearch for it.")
        return inference_mode(*arguments)

    torch.inference_mode, torch.cuda.synchronize = failing, failing
    torch.cuda.is_initialized = lambda: lost
    return run_engine(options)


async def test_a_lost_device_ends_the_engine_and_the_next_one_has_the_outcomes(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[WarmEngine] = []

    def spawn(supervisor: EngineSupervisor) -> supervisors._WatchedProcess:
        engines.append(WarmEngine(supervisor._options, supervisor._log_path, _run_losing_device))
        return supervisors._WatchedProcess(engines[-1].pid, engines[-1], supervisor._log_path)  # type: ignore[arg-type]

    monkeypatch.setattr(EngineSupervisor, "_spawn", spawn)
    options = engine_options(model_dir, tmp_path, max_sequences=1)
    async with supervised(options) as (supervisor, client):
        await supervisor.ready(START_S)
        running, waiting = (client.submit(sequence(ENDLESS_TOKENS)) for _ in range(2))
        await anext(running)
        (tmp_path / "lose").touch()
        outcomes = {stream.sequence_id: await stream.drain() for stream in (running, waiting)}
        assert [outcome and outcome.finish for outcome in outcomes.values()] == ["failed", "failed"]

        await until(lambda: len(engines) == 2, START_S)
        assert engines[0].wait(START_S) == 1
        assert supervisor.status.last_error.endswith(
            "device is lost: CUDA error: device-side assert triggered"
        )
        await client.connect(START_S)
        inventory = await client.collect()
        assert {outcome.sequence_id: outcome for outcome in inventory.outcomes} == outcomes
        assert len(await tokens_of(client.submit(sequence(5)))) == 5


@pytest.mark.usefixtures("warm")
async def test_an_engine_that_hangs_is_killed_and_replaced(model_dir: Path, tmp_path: Path) -> None:
    options = engine_options(model_dir, tmp_path)
    async with supervised(options, hang_s=0.5, client={"silence_s": 1.0}) as (supervisor, client):
        first = (await supervisor.ready(START_S)).pid
        os.kill(first, signal.SIGSTOP)
        await until(lambda: supervisor.status.pid not in (first, None), START_S)
        assert (await client.connect(START_S)).pid != first


async def test_a_model_that_is_refused_is_the_supervisors_last_error(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    async with supervised(engine_options(tmp_path / "model", tmp_path / "data")) as (supervisor, _):
        with pytest.raises(EngineStartFailed, match=r"model has no tokenizer\.json"):
            await supervisor.ready(START_S)
        assert supervisor.status.phase is EnginePhase.BACKING_OFF
        assert supervisor.status.failures >= 1


def test_the_back_off_doubles_up_to_ten_seconds() -> None:
    assert [backoff_s(failures) for failures in (1, 2, 3, 6, 7, 1000)] == [0.2, 0.4, 0.8, 6.4, 10.0, 10.0]


# --------------------------------------------------------- outliving the gateway


@pytest.mark.usefixtures("warm")
async def test_a_living_engine_is_adopted_and_watched_although_it_is_no_child(
    model_dir: Path, tmp_path: Path
) -> None:
    options = engine_options(model_dir, tmp_path)
    async with supervised(options, end="detach") as (supervisor, _):
        pid = (await supervisor.ready(START_S)).pid
    holder = find_holder(lock_path(tmp_path, "engine-0"))
    assert holder is not None
    assert (holder.pid, engine_address(tmp_path)) == (pid, options.address)

    async with supervised(options) as (supervisor, client):
        assert (supervisor.status.pid, supervisor.status.adopted) == (pid, True)
        assert (await supervisor.ready(START_S)).pid == pid
        stream = client.submit(sequence(ENDLESS_TOKENS))
        await anext(stream)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineLost, match="the engine died"):
            await stream.drain()
        assert (await client.connect(START_S)).pid != pid


@pytest.mark.usefixtures("warm")
async def test_an_engine_with_other_options_is_replaced_and_its_outcomes_survive(
    model_dir: Path, tmp_path: Path
) -> None:
    options = engine_options(model_dir, tmp_path)
    client = EngineClient(options.address, "gateway-a")
    supervisor = EngineSupervisor(options, client)
    await supervisor.start()
    replaced = (await supervisor.ready(START_S)).pid
    await supervisor.detach()
    finished, cut = client.submit(sequence(5)), client.submit(sequence(ENDLESS_TOKENS))
    await finished.drain()
    await anext(cut)  # it runs
    draining = asyncio.create_task(cut.drain())

    other = engine_options(model_dir, tmp_path, max_sequences=4)
    async with supervised(other, gateway_id="gateway-b") as (supervisor, successor):
        # What ran got a moment to end, and then the truth.
        last = await draining
        assert last is not None
        assert (last.finish, last.message) == ("failed", "the engine was stopped")
        assert last.emitted_tokens == cut.received_tokens
        await client.close()

        ready = await supervisor.ready(START_S)
        assert (ready.pid != replaced, ready.max_sequences) == (True, 4)
        inventory = await successor.collect(adopt=True)
        assert inventory.outcomes == [finished.outcome, last]
        file = tmp_path / "engine-0.outcomes"
        successor.acknowledge([finished.sequence_id])
        await successor.collect()
        assert file.exists()
        successor.acknowledge([cut.sequence_id])
        await successor.collect()
        assert not file.exists()


async def test_an_engine_that_no_gateway_wants_writes_its_outcomes_and_goes(
    model_dir: Path, tmp_path: Path
) -> None:
    options = engine_options(model_dir, tmp_path, orphan_s=1.0)
    process = WarmEngine(options, tmp_path / "log")
    try:
        client = EngineClient(options.address, "gateway-a")
        await client.connect(START_S)
        stream = client.submit(sequence(5))
        await stream.drain()
        await client.close()
        # It is not stopped: it must end by itself.
        assert await asyncio.to_thread(process.wait, START_S) == 0
    finally:
        process.kill()
        process.wait()
    assert [held.outcome for held in read_outcomes(tmp_path / "engine-0.outcomes")] == [stream.outcome]


# ----------------------------------------------------------------- never two at once


def start_refused(options: EngineOptions, log: Path) -> str:
    """The one line with which an engine refuses to start."""
    assert WarmEngine(options, log).wait(START_S) == 1
    return one_line(log.read_text())


def one_line(said: str) -> str:
    lines = said.strip().splitlines()
    assert len(lines) == 1, said
    return lines[0]


@pytest.mark.usefixtures("warm")
async def test_a_second_engine_on_the_same_data_directory_or_address_is_refused(
    model_dir: Path, tmp_path: Path
) -> None:
    options = engine_options(model_dir, tmp_path)
    async with supervised(options) as (supervisor, client):
        await supervisor.ready(START_S)
        pid = supervisor.status.pid
        line = await asyncio.to_thread(start_refused, options, tmp_path / "first")
        path = lock_path(tmp_path, "engine-0")
        assert f"another engine (pid {pid} at {options.address}) holds {path}" in line
        # With a data directory of its own, it still must not take the living engine's socket over.
        other = engine_options(model_dir, tmp_path / "other", address=options.address)
        assert "is in use by another process" in await asyncio.to_thread(
            start_refused, other, tmp_path / "second"
        )
        assert len(await tokens_of(client.submit(sequence(5)))) == 5


async def test_a_process_number_of_another_container_is_never_signalled(
    model_dir: Path, tmp_path: Path
) -> None:
    bystander = await asyncio.create_subprocess_exec("sleep", "1000")
    content = LockContent(bystander.pid, "ipc://elsewhere", "engine-0", 1, pid_namespace="pid:[1]")
    lock = EngineLock(lock_path(tmp_path, "engine-0"), content)
    async with supervised(engine_options(model_dir, tmp_path)) as (supervisor, _):
        with pytest.raises(EngineStartFailed, match="another engine"):
            await supervisor.ready(START_S)
    lock.release()
    assert bystander.returncode is None
    bystander.kill()
    assert await bystander.wait() == -signal.SIGKILL


def test_a_lock_ends_with_its_holder_and_the_next_one_takes_it(tmp_path: Path) -> None:
    path = tmp_path / "engine-0.lock"
    content = LockContent(pid=1, address="ipc://a", engine_id="engine-0", protocol_version=1)
    assert find_holder(path) is None
    lock = EngineLock(path, content)
    assert find_holder(path) == content
    lock.release()
    assert find_holder(path) is None
    EngineLock(path, content).release()


def test_a_socket_that_a_dead_engine_left_is_replaced(model_dir: Path, tmp_path: Path) -> None:
    options = engine_options(model_dir, tmp_path)
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(options.address.removeprefix("ipc://"))
    stale.close()
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no tokenizer.json" in start_refused(engine_options(empty, tmp_path), tmp_path / "log")


@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        ("ipc://" + "/long" * 30 + "/engine.sock", "at most 107 bytes"),
        ("tcp://0.0.0.0:5555", "run `fairgate engine keys --data-dir"),
        ("/run/engine.sock", "must start with ipc:// or tcp://"),
    ],
)
def test_an_address_that_cannot_be_bound_is_named(tmp_path: Path, address: str, complaint: str) -> None:
    line = start_refused(engine_options(tmp_path, tmp_path, address=address), tmp_path / "log")
    assert address in line
    assert complaint in line


def test_without_torch_the_engine_says_what_to_install(model_dir: Path, tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from engine.process.server import main; "
    code += "sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, *engine_options(model_dir, tmp_path).arguments()],
        capture_output=True, text=True, timeout=START_S,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert one_line(done.stderr) == "fairgate engine: torch is not installed: install fairgate[engine]"


def test_a_device_that_is_not_there_is_refused_and_no_other_is_taken(model_dir: Path, tmp_path: Path) -> None:
    line = start_refused(engine_options(model_dir, tmp_path, device="cuda:99"), tmp_path / "log")
    assert line.startswith("fairgate engine: device 'cuda:99' is asked for, but torch sees ")


def test_an_option_out_of_bounds_is_named(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_sequences must be at least 1, not -1"):
        engine_options(model_dir, tmp_path, max_sequences=-1)
    wrong = engine_options(model_dir, tmp_path, max_sequences=64, max_batched_tokens=32, policy="fcfs")
    assert "max_sequences (64) must not exceed max_batched_tokens (32)" in start_refused(
        wrong, tmp_path / "log"
    )


# ------------------------------------------------------------------ files and paths


def test_outcomes_survive_in_their_file_until_none_is_left(tmp_path: Path) -> None:
    path = tmp_path / "engine-0.outcomes"
    store = OutcomeStore()
    store.keep("gateway-a", outcome("one"))
    store.keep("gateway-b", outcome("two"))
    write_outcomes(path, store)
    assert path.stat().st_mode & 0o777 == 0o600
    restored = OutcomeStore()
    restored.restore(read_outcomes(path))
    assert restored.held() == store.held()
    restored.acknowledge("gateway-a", ["one"])
    restored.acknowledge("gateway-b", ["two"])
    write_outcomes(path, restored)
    assert not path.exists()
    assert read_outcomes(path) == []


def test_a_damaged_outcomes_file_is_named_and_not_guessed_at(tmp_path: Path) -> None:
    path = tmp_path / "engine-0.outcomes"
    path.write_bytes(b"half a fi")
    with pytest.raises(OutcomesUnreadable, match=r"engine-0\.outcomes is damaged"):
        read_outcomes(path)


def test_the_address_lies_in_the_data_directory_where_that_path_is_short_enough(tmp_path: Path) -> None:
    assert engine_address(tmp_path) == f"ipc://{tmp_path}/run/engine-0.sock"
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700


def test_a_long_data_directory_gets_a_private_one_for_its_socket_and_keeps_it(tmp_path: Path) -> None:
    data_dir = tmp_path / ("long" * 30)
    address = engine_address(data_dir)
    directory = Path(address.removeprefix("ipc://")).parent
    assert len(address) < 100
    assert directory.stat().st_mode & 0o777 == 0o700
    assert engine_address(data_dir) == address
    # A directory that others may write to could hold a foreign socket.
    directory.chmod(0o777)
    other = engine_address(data_dir)
    assert other != address
    directory.rmdir()
    Path(other.removeprefix("ipc://")).parent.rmdir()


def test_neither_client_nor_supervisor_needs_torch() -> None:
    code = (
        "import engine.client.client, engine.process.server, ops.serving.supervisor, sys; "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=START_S)
    assert done.stdout.strip() == "False", done.stderr
