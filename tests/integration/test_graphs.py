"""Captured steps, on the stand-in for a GPU: replayed they are the padded steps, and these the plain ones.

A graph repeats launches with their memory, and none of the model's Python: a number of the host's, a question
to the device and memory that another graph uses are found when steps are captured.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import engine.model.graphs
from engine.core.model_runner import DeviceLost, OutOfDeviceMemory, RowStart, StepWork
from engine.messages import SamplingParams
from engine.model.forward import Forward
from engine.model.graphs import StepGraphs
from engine.model.length_probe.probe import READ_EVERY, LengthReadings
from engine.model.loader import LoadedModel, load_model
from engine.model.runner import TorchRunner
from engine.model.sampler import MOST_LOGPROBS
from kernels.batch import PackedBatch
from tests.models.random_models import save_random_model
from tests.support.stand_in_device import CARD, DEVICE, StandIn, StandInQueues, needs_stand_in
from tests.support.stand_in_streams import current
from tests.support.step_work import mask_of

pytestmark = needs_stand_in
FILE = "tests/integration/test_graphs.py"
ROWS, BLOCK_TOKENS, BLOCKS = 8, 4, 80
ROW_BLOCKS = BLOCKS // ROWS - 1
"""Of each row; the last blocks belong to none."""
SIZES = (1, 2, 4, 8)
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
EVERYTHING = SamplingParams(
    temperature=0.9, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.2, frequency_penalty=0.4,
    presence_penalty=0.3, logit_bias={7: 2.0, 11: -3.0}, logprobs=3, ignore_eos=True,
)  # fmt: skip


@dataclass(frozen=True)
class Runners:
    """The same model with captured steps, with padded ones, and with plain ones."""

    model: LoadedModel
    captured: TorchRunner
    padded: TorchRunner
    plain: TorchRunner

    def each(self) -> tuple[TorchRunner, ...]:
        return self.captured, self.padded, self.plain

    def pad_to(self, sizes: tuple[int, ...]) -> None:
        for runner in (self.captured, self.padded):
            graphs_of(runner).decode_sizes = sizes


def a_runner(model: LoadedModel) -> TorchRunner:
    return model.runner(num_blocks=BLOCKS, block_tokens=BLOCK_TOKENS, num_rows=ROWS, queues=StandInQueues())


def graphs_of(runner: TorchRunner) -> StepGraphs:
    if runner._graphs is None:
        [report] = runner.capture(64)
        assert report.chosen, report
    assert runner._graphs is not None
    return runner._graphs


def launch_again(graphs: StepGraphs) -> None:
    """What would be replayed is launched piece by piece."""
    for key, step in graphs._steps.items():
        graphs._steps[key] = replace(step, replay=partial(graphs._run, step.shape))
    graphs._choices.clear()


@pytest.fixture(scope="module", params=["lean", "plain"])
def runners(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runners]:
    torch.set_num_threads(1)
    model_dir = save_random_model("llama", tmp_path_factory.mktemp("model"), num_hidden_layers=1)
    with pytest.MonkeyPatch.context() as patched, StandIn(late=True):
        patched.setattr(engine.model.graphs, "MOST_SECONDS", 600.0)
        model = load_model(
            model_dir, dtype="float32", device=str(DEVICE), attention="triton", machine=CARD,
            fast_paths=request.param == "lean",
        )  # fmt: skip
        runners = Runners(model, *(a_runner(model) for _ in range(3)))
        graphs_of(runners.captured)
        launch_again(graphs_of(runners.padded))
        for runner in runners.each():
            for cache in runner._caches.values():
                cache.keys.fill_(50.0)  # whatever is read that was not written changes the tokens
                cache.values.fill_(50.0)
        yield runners


def a_step(
    slices: dict[int, tuple[int, int]], sampling: SamplingParams = GREEDY, *, ends: bool = True
) -> StepWork:
    """Of rows, each with a position and a number of tokens; one token from a position on is a decode's."""
    work = StepWork()
    for row, (position, count) in slices.items():
        prompt = [(5 * row + 3 * place) % 90 + 3 for place in range(position, position + count)]
        if position == 0:
            work.starts.append(RowStart(row, str(row), 0, count, prompt, sampling, row))
        work.rows.append(row)
        work.positions.append(position)
        work.num_tokens.append(count)
        work.samples.append(ends or row % 2 == 0)
        work.token_ids.append(prompt if count > 1 else [])
        first, last = -(-position // BLOCK_TOKENS), -(-(position + count) // BLOCK_TOKENS)
        # Backwards: a table that is read beyond its end finds another block.
        work.blocks += [(row, index, (row + 1) * ROW_BLOCKS - 1 - index) for index in range(first, last)]
    return work


def written(work: StepWork) -> set[tuple[int, int]]:
    """Blocks and places of the step's tokens."""
    return {
        ((row + 1) * ROW_BLOCKS - 1 - place // BLOCK_TOKENS, place % BLOCK_TOKENS)
        for row, position, count in zip(work.rows, work.positions, work.num_tokens, strict=True)
        for place in range(position, position + count)
    }


def cache_of(runner: TorchRunner) -> torch.Tensor:
    return torch.cat([part.cpu() for cache in runner._caches.values() for part in (cache.keys, cache.values)])


def check(runners: Runners, work: StepWork, replays: int, masks: dict[int, np.ndarray] | None = None) -> int:
    """Runs a step on each; the captured one is `replays` replays. How many states were read."""
    before, outputs, device = cache_of(runners.captured), [], current()
    for runner in runners.each():
        device.reset()
        work.awaits_masks = bool(masks)
        ticket = runner.launch(work)
        if masks:
            device.host_ms += 1e6  # the device waits for the masks
            runner.choose(ticket, masks)
        output = runner.collect(ticket)
        outputs.append(output.sampled)
        assert 0 < (output.device_s or 0.0) < 1e3, "waiting is no computing"
        if runner is runners.captured:
            replayed = sum(count for name, count in device.launches.items() if name.endswith("graph replay"))
            assert replayed == replays, device.launches
    captured, padded, plain = map(cache_of, runners.each())
    assert torch.equal(captured, padded)
    assert (captured - plain).abs().max() < 1e-4
    changed = (captured != before).flatten(2).any(-1).nonzero().tolist()
    found = {(block % BLOCKS, place) for block, place in changed}
    assert found <= written(work), "a slot changed that is not the step's"
    assert outputs[0] == outputs[1]
    for one, other in zip(outputs[0], outputs[2], strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.token_id == other.token_id
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            states = [np.frombuffer(each.state, np.float16) for each in (one, other)]
            np.testing.assert_allclose(*states, atol=1e-2)
    return sum(one is not None and len(one.state) > 0 for one in outputs[0])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("sampling", [GREEDY, EVERYTHING], ids=["greedy", "everything"])
def test_every_number_of_rows_up_to_a_size(size: int, sampling: SamplingParams, runners: Runners) -> None:
    runners.pad_to((size,))
    for count in range(1, size + 1):
        prompts = {row: (0, 2 + row) for row in range(ROWS - count, ROWS)}
        check(runners, a_step(prompts, sampling), 2)
        for ahead in range(2):
            decodes = {row: (2 + row + ahead, 1) for row in prompts}
            check(runners, a_step(decodes, sampling), 2)


@pytest.mark.parametrize("sampling", [GREEDY, EVERYTHING], ids=["greedy", "everything"])
def test_masks_come_between_a_step_and_its_choice(sampling: SamplingParams, runners: Runners) -> None:
    """Also of a part of the rows; afterwards every token may be chosen again."""
    runners.pad_to(SIZES)
    check(runners, a_step({row: (0, 2 + row) for row in range(5)}, sampling), 2)
    for ahead, masked in enumerate(((0, 3), (3,), (), (1, 2, 4))):
        work = a_step({row: (2 + row + ahead, 1) for row in range(5)}, sampling)
        masks = {row: mask_of([50 + row, 60 + ahead], runners.model.info.vocabulary) for row in masked}
        check(runners, work, 2, masks)


def test_whole_prompts_chunks_and_decodes_in_a_step(runners: Runners) -> None:
    runners.pad_to(SIZES)
    check(runners, a_step({0: (0, 9), 1: (0, 17), 3: (0, 1)}), 2)
    check(runners, a_step({0: (9, 1), 1: (17, 13), 2: (0, 24), 3: (1, 1)}, EVERYTHING, ends=False), 2)
    check(runners, a_step({5: (0, 7)}, ends=False), 1)  # none chooses
    check(runners, a_step(dict.fromkeys(range(ROWS), (0, 8))), 2)  # no token is padding
    check(runners, a_step({0: (0, 33), 2: (0, 32)}), 0)  # more than was captured


def test_more_changed_tables_and_biases_than_a_graph_has_room_for(runners: Runners) -> None:
    runners.pad_to(SIZES)
    check(runners, a_step({4: (0, 30)}), 2)
    back = a_step({4: (30, 1)})
    back.blocks = [(4, index, 5 * ROW_BLOCKS - 1 - index) for index in range(8)]
    check(runners, back, 2)
    many = SamplingParams(temperature=0.0, logit_bias={7: 1.5} | {token + 90: -1.0 for token in range(1100)})
    check(runners, a_step({4: (0, 9)}, many), 1)  # the captured choice has too few places for biases
    for ahead in range(2):
        check(runners, a_step({4: (9 + ahead, 1)}, many), 1)


def test_a_choice_that_was_not_captured_fails_for_memory_and_smaller_steps_begin_anew(
    runners: Runners,
) -> None:
    runners.pad_to(SIZES)
    many = SamplingParams(temperature=0.0, logprobs=MOST_LOGPROBS + 1, repetition_penalty=1.3)
    prompts = {row: list(range(20 * row + 5, 20 * row + 14)) for row in (1, 3)}
    work = a_step({row: (0, len(prompt)) for row, prompt in prompts.items()}, many)
    check(runners, work, 1)
    current().fail_next(torch.OutOfMemoryError("full"), after=3)
    failed = a_step({row: (len(prompt), 1) for row, prompt in prompts.items()})
    with pytest.raises(OutOfDeviceMemory, match="full"):
        runners.captured.launch(failed)
    for runner in (runners.padded, runners.plain):
        runner.collect(runner.launch(failed))
    for row, prompt in prompts.items():
        anew = a_step({row: (9, 1)})
        anew.token_ids, tokens = [[40 + row]], [*prompt, 40 + row]
        anew.starts = [RowStart(row, str(row), 9, 9, tokens, many, row)]
        anew.blocks = [(row, index, (row + 1) * ROW_BLOCKS - 1 - index) for index in range(3)]
        check(runners, anew, 1)
    check(runners, a_step(dict.fromkeys(prompts, (10, 1))), 1)


def test_states_are_read_after_captured_steps(runners: Runners) -> None:
    runners.pad_to(SIZES)
    for runner in runners.each():
        runner.readings = LengthReadings(runner.state_reader(), None, keep_states=True)
    read = [check(runners, a_step({2: (0, 9), 5: (0, 6), 6: (0, 3)}, ends=False), 2)]
    read += [check(runners, a_step({2: (9 + ahead, 1), 6: (3 + ahead, 1)}), 2) for ahead in range(READ_EVERY)]
    for runner in runners.each():
        assert runner.readings is not None
        assert not runner.readings.has_failed
        runner.readings = None
    assert sum(read) == 2 + 2, "two prompts' ends, and two sequences after some steps"


def test_a_device_that_is_lost_while_steps_are_captured_ends_the_load(
    runners: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StandIn(late=True) as device:
        runner = a_runner(runners.model)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", device.current_stream.synchronize)
        device.fail_next(RuntimeError("an illegal memory access"), after=200, lost=True)
        with pytest.raises(DeviceLost, match="an illegal memory access"):
            runner.capture(64)


class Strange:
    """A forward pass that does what cannot be captured."""

    def __init__(self, forward: Forward, way: str) -> None:
        self.name, self.tile_tokens, self.captures = forward.name, forward.tile_tokens, True
        self.reserve, self._forward, self._way = forward.reserve, forward, way
        self._calls, self._kept = 0, torch.zeros(1, device=DEVICE)

    def __call__(self, batch: PackedBatch, *rest: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        logits = self._forward(batch, *rest, out=out)
        self._calls += 1
        if self._way == "counts":
            logits += self._calls
        elif self._way == "knows contexts":
            logits += max(batch.context_lens, default=0)
        elif self._way == "asks":
            logits += logits.amax().item()
        elif self._way == "keeps memory" and current().graph is not None:
            self._kept = torch.ones(1, device=DEVICE)
        return logits.mul_(self._kept + 1)


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("counts", "replayed, a step of 64 tokens does not give the same logits"),
        ("knows contexts", "padded to 64 tokens, a step gives other logits than without"),
        ("asks", f"{FILE}:.* _local_scalar_dense: not while a graph is captured"),
        ("keeps memory", "replayed, a step of .* tokens does not give the same logits"),
    ],
)
def test_a_forward_pass_that_cannot_be_captured_is_found(way: str, message: str, runners: Runners) -> None:
    runner = a_runner(replace(runners.model, forward=Strange(runners.model.forward, way)))
    [report] = runner.capture(64)
    assert not report.chosen
    assert re.search(message, str(report)), report
    assert runner.graph_sizes == runner.mixed_sizes == ()


def test_what_takes_too_much_is_left_out(runners: Runners, monkeypatch: pytest.MonkeyPatch) -> None:
    queues = runners.captured._queues
    assert queues is not None
    monkeypatch.setattr(engine.model.graphs, "MOST_BYTES", queues.memory_bytes() - 1)
    runner = a_runner(runners.model)
    used, left_out = runner.capture(64)
    assert used.chosen
    assert str(left_out).startswith(
        "captured steps of decodes, 1 tokens: not used, captured steps would take"
    )
    assert (runner.graph_sizes, runner.mixed_sizes) == (SIZES[1:], (64,))


def test_what_takes_too_long_is_left_out(runners: Runners, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.model.graphs, "MOST_SECONDS", -1.0)
    runner = a_runner(runners.model)
    reports = runner.capture(64)
    assert not any(report.chosen for report in reports)
    assert {report.reason for report in reports[1:]} == {"-1 s have passed"}
    assert len(reports) == 2 + len(SIZES)
    assert runner.graph_sizes == ()
    current().current_stream.finish()  # what was launched to prepare them


def test_what_cannot_be_captured_says_so(runners: Runners) -> None:
    forward = Strange(runners.model.forward, "")
    forward.captures = False
    [report] = a_runner(replace(runners.model, forward=forward)).capture(64)
    assert str(report) == (
        "captured steps: not used, each step is launched piece by piece: the forward pass or its attention"
        " cannot be captured"
    )
