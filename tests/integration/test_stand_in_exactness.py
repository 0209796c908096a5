"""On the stand-in for a GPU, which runs late what is launched, the engine gives transformers' own tokens.

Whatever happens to a sequence, with one step ahead and without, greedy and drawn: a staging buffer written
again too early, a result read too early or a block given away too early shows in the tokens. No step waits
for the device but for its own event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model.loader import load_runner
from engine.model.runner import TorchRunner
from engine.scheduling.policy import POLICIES
from kernels.gpu import configurations, operators
from tests.integration.exactness import PATHS, Reference, Run, compare, plain_model, random_jobs
from tests.integration.test_exactness import ARCHITECTURES
from tests.models.random_models import save_random_model
from tests.support.quick_interpreter import quick_interpreter
from tests.support.stand_in_device import CARD, DEVICE, StandIn, StandInQueues, needs_stand_in

pytestmark = needs_stand_in


def a_run(policy: str, max_sequences: int, seed: int, steps_ahead: int, **options: Any) -> Run:
    """Memory and places are scarce: every kind of thing happens."""
    return Run(
        policy=policy,
        max_batched_tokens=5 * max_sequences,
        max_sequences=max_sequences,
        seed=seed,
        steps_ahead=steps_ahead,
        burst=12,
        move_share=0.06,
        **{"num_host_blocks": 12, **options},
    )


def met_on_the_stand_in(
    model_dir: Path,
    attention: str,
    runs: Sequence[Run],
    num_jobs: int = 12,
    most_tokens: int = 12,
    *,
    computing: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Counter[str]:
    """Compares the runs, inside of `computing`, with transformers; returns what happened in them."""
    torch.set_num_threads(1)
    with StandIn(late=True) as device:
        runner = load_runner(
            model_dir,
            num_blocks=36,
            block_tokens=4,
            num_host_blocks=30,
            dtype="float32",
            device=str(DEVICE),
            num_rows=12,
            attention=attention.partition(",")[0],
            machine=CARD,
            queues=StandInQueues(),
        )
        if attention.endswith("captured"):
            [report] = runner.capture(max(run.max_batched_tokens for run in runs))
            assert report.chosen, report
        waits = {call: noted(device, runner, call) for call in ("launch", "collect")}
        reference = Reference(plain_model(model_dir), runner.info.eos_token_ids)
        jobs = random_jobs(num_jobs, seed=7, most_tokens=most_tokens)
        with computing():
            met = compare(reference, runner, jobs, runs)
    assert waits["launch"].keys() == {(0, 0)}, "a launch waits for the device"
    assert waits["collect"].keys() == {(0, 1)}, "a step is over with one event"
    return met


def noted(device: StandIn, runner: TorchRunner, name: str) -> Counter[tuple[int, int]]:
    """How often calls of a method wait for the device, and for events."""
    call: Callable[[Any], Any] = getattr(runner, name)
    found: Counter[tuple[int, int]] = Counter()

    def counted(argument: Any) -> Any:
        waits, events = device.waits.total(), device.event_waits.total()
        result = call(argument)
        found[device.waits.total() - waits, device.event_waits.total() - events] += 1
        return result

    setattr(runner, name, counted)
    return found


ALL = {
    0: (a_run("vtc", 12, 1, 0), a_run("vtc", 12, 3, 0), a_run("srpt", 3, 1, 0)),
    1: (a_run("vtc", 12, 5, 1), a_run("srpt", 3, 1, 1)),
}
"""In the runs of each depth all that can happen to a sequence does."""
KERNELS = ("torch-sdpa", "triton", "triton, captured")
"""Attention by name; with triton's the lean forward runs where it can, and its twins compute. At last in
captured steps."""


@pytest.mark.parametrize("attention", KERNELS)
@pytest.mark.parametrize("steps_ahead", ALL)
def test_late_execution_gives_generates_tokens(steps_ahead: int, attention: str, tmp_path: Path) -> None:
    model_dir = save_random_model("llama", tmp_path, num_hidden_layers=1)
    met = met_on_the_stand_in(model_dir, attention, ALL[steps_ahead])
    assert all(met[path] > 0 for path in PATHS), met


def test_interpreted_kernels_give_generates_tokens(tmp_path: Path) -> None:
    # Three query heads share a key head, as in the model that ships.
    changes = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "num_hidden_layers": 1}
    model_dir = save_random_model("llama", tmp_path, **changes)
    runs = [a_run("vtc", 12, 1, 1)]
    met = met_on_the_stand_in(model_dir, "triton", runs, 4, 4, computing=interpreter)
    assert met["batched"] > 0 < met["chunked"], met


@contextmanager
def interpreter() -> Iterator[None]:
    """Triton's takes the place of the twins, which cannot be called then."""
    with pytest.MonkeyPatch.context() as patch, quick_interpreter():
        patch.setattr(operators, "interpreted", True)
        patch.setattr(operators, "reference", None)
        patch.setattr(configurations, "MOST_PARTS", 2)  # each is interpreted, of short contexts for nothing
        yield


@pytest.mark.long
@pytest.mark.parametrize("attention", KERNELS)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_under_late_execution(policy: str, attention: str, tmp_path: Path) -> None:
    model_dir = save_random_model("llama", tmp_path, num_hidden_layers=1)
    for steps_ahead in (0, 1):
        runs = [a_run(policy, 7, seed, steps_ahead, num_host_blocks=12 * seed - 12) for seed in (1, 2)]
        met = met_on_the_stand_in(model_dir, attention, runs, 16, 20)
        assert all(met[path] > 0 for path in ("batched", "paused", "prefix hit", "moved with kv")), met
        assert met["swapped in"] + met["recomputed"] > 0, met


@pytest.mark.long
@pytest.mark.parametrize(
    ("attention", "name"),
    sorted(product(KERNELS, ARCHITECTURES)),
)
def test_every_architecture_under_late_execution(name: str, attention: str, tmp_path: Path) -> None:
    model_dir = save_random_model(name, tmp_path)
    runs = [a_run(policy, 12, seed, seed % 2) for policy in ("vtc", "hybrid") for seed in range(4)]
    met = met_on_the_stand_in(model_dir, attention, runs, 20, 24)
    assert all(met[path] > 0 for path in PATHS if path != "displaced"), met
