"""KV moves to and from host memory beside the steps: only what uses its blocks waits for it."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from random import Random

import pytest
import torch

from engine.core.model_runner import DeviceLost, StepOutput
from engine.model.attention import LayerCache
from engine.model.host_pool import HostPool
from engine.model.loader import load_runner
from engine.model.runner import TorchRunner
from tests.models.random_models import save_random_model
from tests.support.stand_in_device import DEVICE, StandIn, StandInQueues, needs_stand_in
from tests.support.stand_in_streams import Event
from tests.support.step_work import SequenceSlice, work_of

pytestmark = needs_stand_in
BLOCKS, HOST_BLOCKS, BLOCK_TOKENS = 8, 6, 4
FIRST, SECOND = [5, 6, 7, 8, 9, 10], [100, 3, 4, 90, 17, 2]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_blocks_hold_what_their_history_says(seed: int, late: bool) -> None:
    """Random steps, copies, reads and waits, one step ahead. A block is used again where the engine may: when
    no step is in flight that was when it was let go."""
    random = Random(seed)
    kv, host, fences = [0.0] * BLOCKS, [0.0] * HOST_BLOCKS, [-1] * BLOCKS
    used: set[int] = set()
    in_flight: deque[tuple[int, Event]] = deque()
    with StandIn(late=late) as device:
        cache = LayerCache(*(torch.zeros((BLOCKS, BLOCK_TOKENS, 1, 3), device=DEVICE) for _ in range(2)))
        pool = HostPool([cache], HOST_BLOCKS, StandInQueues())
        pool.copy_out([(0, block) for block in range(HOST_BLOCKS)])
        for turn in range(200):
            oldest = in_flight[0][0] if in_flight else turn
            free = [block for block in range(BLOCKS) if block not in used and fences[block] < oldest]
            several = random.randint(1, 3)
            match random.choice(("step", "step", "collect", "collect", "out", "out", "in", "in", "read")):
                case "step" if len(in_flight) < 2:
                    new = random.sample(free, min(several - 1, len(free)))
                    pool.wait_for(new)
                    used.update(new)
                    for block in random.sample(sorted(used), len(used) // 2):
                        kv[block] = (kv[block] * 2 + turn) % 1024
                        for tensor in (cache.keys, cache.values):
                            tensor[block].mul_(2).add_(turn).remainder_(1024)
                    (event := Event()).record()
                    in_flight.append((turn, event))
                case "collect" if in_flight:
                    in_flight.popleft()[1].synchronize()
                case "out":
                    gone = random.sample(sorted(used), min(several, len(used)))
                    places = random.sample(range(HOST_BLOCKS), len(gone))
                    pool.copy_out(list(zip(gone, places, strict=True)))
                    for block, place in zip(gone, places, strict=True):
                        host[place], fences[block] = kv[block], in_flight[-1][0] if in_flight else -1
                    used.difference_update(gone)
                case "in":
                    pairs = [(random.randrange(HOST_BLOCKS), block) for block in free[:several]]
                    pool.copy_in(pairs)
                    for place, block in pairs:
                        kv[block] = host[place]
                case "read":
                    place = random.randrange(HOST_BLOCKS)
                    assert numbers(pool, place) == {host[place]}, f"turn {turn}"
        assert device.unexpected_waits() == []
        pool.wait_for(range(BLOCKS))
        assert [set(cache.values[block].flatten().tolist()) for block in range(BLOCKS)] == [{n} for n in kv]
        assert [numbers(pool, place) for place in range(HOST_BLOCKS)] == [{number} for number in host]


def numbers(pool: HostPool, place: int) -> set[float]:
    entries = bytearray(b"".join(pool.read([place], BLOCK_TOKENS)))
    return set(torch.frombuffer(entries, dtype=torch.float32).tolist())


def runner_of(model_dir: Path, queues: StandInQueues) -> TorchRunner:
    """Which has computed `FIRST` in blocks 0 and 1, `SECOND` in blocks 2 and 3."""
    runner = load_runner(
        save_random_model("qwen2", model_dir), num_blocks=BLOCKS, num_host_blocks=HOST_BLOCKS,
        block_tokens=BLOCK_TOKENS,
        dtype="float32", device=str(DEVICE), attention="torch-sdpa", queues=queues,
    )  # fmt: skip
    step(runner, FIRST, [0, 1])
    step(runner, SECOND, [2, 3])
    return runner


def step(runner: TorchRunner, prompt: list[int], blocks: list[int], position: int = 0) -> StepOutput:
    tokens = len(prompt)
    piece = SequenceSlice("s", prompt, tokens, position, tokens - position, blocks, sample=True)
    return runner.collect(runner.launch(work_of([piece])))


def test_only_what_uses_the_blocks_waits_and_not_on_its_own_time(tmp_path: Path) -> None:
    queues = StandInQueues()
    with StandIn(late=True) as device:
        runner = runner_of(tmp_path, queues)
        first, second = runner.read_kv([0, 1], 6), runner.read_kv([2, 3], 6)
        alone = step(runner, SECOND, [4, 5])
        device.reset()
        runner.copy_out([(0, 0), (1, 1)])
        with queues.copying():
            (out := Event()).record()
        assert (device.event_waits.total(), device.unexpected_waits()) == (0, [])
        beside = step(runner, SECOND, [4, 5])
        assert not out.query()
        # Used again at once, as no step is in flight.
        behind = step(runner, SECOND, [0, 1])
        assert out.query()
        runner.copy_out([(0, 2), (1, 3)])
        assert alone == beside == behind == step(runner, SECOND, [0, 1]), "tokens, and the device's time"
        runner.copy_in([(0, 6), (1, 7)])
        # The last token again, by what was copied back.
        assert step(runner, FIRST, [6, 7], 5).sampled == step(runner, FIRST, [2, 3]).sampled
        assert runner.read_host_kv([0, 1], 6) == first
        first = runner.read_kv([6, 7], 6)
        runner.copy_out([(6, 4), (7, 5)])
        runner.write_kv([6, 7], 6, second)
        runner.copy_in([(4, 0), (5, 1)])
        assert runner.read_kv([6, 7], 6) == second
        assert runner.read_kv([0, 1], 6) == first == runner.read_host_kv([4, 5], 6)


def test_after_errors_copies_and_steps_wait_for_each_other_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StandIn(late=True) as device:
        runner = runner_of(tmp_path, StandInQueues())
        kept = runner.read_kv([0, 1], 6)
        runner.copy_out([(0, 0), (1, 1)])
        device.reset()
        step(runner, SECOND, [4, 5])
        device.fail_next(torch.OutOfMemoryError("full"), after=device.launches.total() - 1)
        with pytest.raises(RuntimeError, match="full"):
            step(runner, SECOND, [0, 1])
        # What that launch left on its way writes into the blocks.
        runner.copy_in([(0, 0), (1, 1)])
        assert kept == runner.read_host_kv([0, 1], 6) == runner.read_kv([0, 1], 6)
        device.fail_next(RuntimeError("an illegal memory access"), lost=True)
        runner.copy_out([(0, 0)])
        step(runner, SECOND, [2, 3])
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", device.current_stream.synchronize)
        with pytest.raises(DeviceLost, match="illegal memory access"):
            step(runner, SECOND, [0, 1])
