"""Reading the model's state: from the right places, the same however a prompt was computed, harmless, refused
where it does not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.core.core import EngineConfig, EngineCore
from engine.core.detokenizer import load_texts
from engine.forecast.length.probe import RANGES
from engine.forecast.length.probe_gate import ProbeGate
from engine.messages import SamplingParams
from engine.model.length_probe.fit import TooFewReadings, fit_probe
from engine.model.length_probe.probe import (
    FILE_NAME,
    MAX_FILE_BYTES,
    LengthReadings,
    ProbeRefused,
    ProbeWeights,
    load_probe,
)
from engine.model.loader import load_runner
from engine.model.probe_attachment import ProbeFollower
from engine.model.runner import TorchRunner
from engine.process.fingerprint import machine_name, model_fingerprint
from tests.support.builders import submit
from tests.support.step_work import SequenceSlice, run_step
from tests.support.tiny_model import save_tiny_model

BLOCK_TOKENS = 4
PROMPT = list(range(1, 23))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def runner(model_dir: Path) -> TorchRunner:
    runner = load_runner(model_dir, num_blocks=256, block_tokens=BLOCK_TOKENS, dtype="float32", device="cpu")
    runner.readings = LengthReadings(runner.state_reader(), None, keep_states=True)
    return runner


def piece(tokens: list[int], position: int, count: int, blocks: list[int], name: str = "s") -> SequenceSlice:
    return SequenceSlice(
        name, tokens, len(PROMPT), position, count, blocks, position + count == len(tokens),
        SamplingParams(), 1,
    )  # fmt: skip


def state_after(runner: TorchRunner, chunks: list[int], blocks: list[int], name: str) -> torch.Tensor:
    position = 0
    for count in chunks:
        last = piece(PROMPT, position, count, blocks, name)
        [choice] = run_step(runner, [last])
        position += count
    assert choice is not None
    return torch.frombuffer(bytearray(choice.state), dtype=torch.float16).float()


def weights_for(runner: TorchRunner, fingerprint: str, seed: int = 0) -> ProbeWeights:
    width = runner.state_reader().width
    generator = torch.Generator().manual_seed(seed)
    return ProbeWeights(
        mean=torch.zeros(width),
        deviation=torch.ones(width),
        hidden=torch.randn(8, width, generator=generator),
        hidden_bias=torch.zeros(8),
        output=torch.randn(RANGES, 8, generator=generator),
        output_bias=torch.zeros(RANGES),
        fingerprint=fingerprint,
        layers=tuple(runner.state_reader().layers),
        samples=300,
    )


def test_the_state_is_that_of_the_tokens_wherever_they_lie_and_however_they_came(runner: TorchRunner) -> None:
    at_once = state_after(runner, [22], [0, 1, 2, 3, 4, 5], "a")
    in_chunks = state_after(runner, [5, 1, 16], [90, 7, 33, 200, 41, 11], "b")
    torch.testing.assert_close(at_once, in_chunks, rtol=1e-4, atol=1e-5)


def test_the_state_is_read_from_the_values_in_the_cache(runner: TorchRunner) -> None:
    """Against plain indexing of the very cache, part by part."""
    blocks = [9, 3, 77, 12, 5, 60]
    state = state_after(runner, [22], blocks, "s")
    reader = runner.state_reader()
    caches = runner._caches
    values = [
        torch.stack(
            [caches[layer].values[blocks[place // 4], place % 4].flatten() for place in range(len(PROMPT))]
        )
        for layer in reader.layers
    ]
    expected = [each.mean(0) for each in values]
    for each in values:
        expected += [each[-1], each[-8:].mean(0)]
    # What is kept is in half precision.
    torch.testing.assert_close(state, torch.cat(expected).half().float())


def answers(runner: TorchRunner, model_dir: Path) -> tuple[list[list[int]], EngineCore]:
    config = EngineConfig(max_sequences=8, max_batched_tokens=64)
    core = EngineCore(runner, load_texts(model_dir), config, clock=lambda: 0.0)
    tokens: dict[str, list[int]] = {}
    for number in range(12):
        sampling = SamplingParams(temperature=1.0, seed=number)
        asked = submit(
            f"s{number}", prompt_token_ids=[1 + number, *PROMPT], max_tokens=40 + number, lease_tokens=99,
            sampling=sampling, predicted_output_tokens=7,
        )  # fmt: skip
        core.submit(asked, "g")
    while core.has_work():
        for deltas in core.step().deltas.values():
            for delta in deltas:
                tokens.setdefault(delta.sequence_id, []).extend(delta.token_ids)
    core.check()
    return [tokens[f"s{number}"] for number in range(12)], core


def test_reading_changes_no_token_and_every_answer_is_judged(model_dir: Path) -> None:
    def fresh() -> TorchRunner:
        return load_runner(
            model_dir, num_blocks=256, block_tokens=BLOCK_TOKENS, dtype="float32", device="cpu"
        )

    plain, _ = answers(fresh(), model_dir)
    runner = fresh()
    runner.readings = LengthReadings(runner.state_reader(), weights_for(runner, "x"), keep_states=True)
    read, core = answers(runner, model_dir)

    assert read == plain
    assert core.lengths.describe().answers == 12
    kept = core.samples.kept()
    assert {sample.generated for sample in kept} > {0}
    assert sum(sample.generated == 0 for sample in kept) == 12
    assert all(len(sample.state) == 2 * runner.state_reader().width for sample in kept)
    first = [sample.remaining for sample in kept if sample.generated == 0]
    assert sorted(first) == sorted(len(each) for each in plain)


def test_a_reading_that_fails_switches_readings_off_and_no_step_fails(
    model_dir: Path, runner: TorchRunner, caplog: pytest.LogCaptureFixture
) -> None:
    weights = weights_for(runner, "x")
    broken = replace(weights, hidden=torch.zeros(8, 3))
    runner.readings = LengthReadings(runner.state_reader(), broken, keep_states=False)
    read, core = answers(runner, model_dir)

    assert all(read)
    assert core.lengths.describe().answers == 0
    assert runner.readings.weights is None
    assert len([each for each in caplog.records if "states could not be read" in each.message]) == 1
    gate = ProbeGate()
    gate.took_over(300)
    ProbeFollower(gate, runner, model_dir, "x", keep_states=False).look()
    assert gate.describe().state == "off"
    assert "could not be read" in gate.describe().problem


def follower(
    runner: TorchRunner, model_dir: Path, *, keep_states: bool = False
) -> tuple[ProbeFollower, ProbeGate]:
    gate = ProbeGate()
    runner.readings = None
    fingerprint = model_fingerprint(model_dir)
    return ProbeFollower(gate, runner, model_dir, fingerprint, keep_states=keep_states), gate


def test_a_probe_beside_the_model_is_used_and_one_of_another_model_is_refused(
    model_dir: Path, runner: TorchRunner, caplog: pytest.LogCaptureFixture
) -> None:
    path = model_dir / FILE_NAME
    fingerprint = model_fingerprint(model_dir)
    reader = runner.state_reader()
    try:
        follows, gate = follower(runner, model_dir)
        follows.look()
        assert gate.describe().state == "off"
        assert runner.readings is None
        assert follower(runner, model_dir, keep_states=True)[1].describe().state == "collecting"

        weights = weights_for(runner, fingerprint)
        weights.save(path)
        loaded = load_probe(path, reader, fingerprint, torch.device("cpu"))
        assert torch.equal(loaded.output, weights.output)
        follows, gate = follower(runner, model_dir)
        follows.look()
        assert (gate.describe().state, gate.describe().trained_on) == ("on", 300)
        # The model is served as before: transformers does not take the probe for weights of it.
        load_runner(model_dir, num_blocks=8, dtype="float32", device="cpu")

        weights_for(runner, "another model").save(path)
        with pytest.raises(ProbeRefused, match=r"another model.*fairgate forecast train"):
            load_probe(path, reader, fingerprint, torch.device("cpu"))
        follows, gate = follower(runner, model_dir)
        follows.look()
        assert gate.describe().state == "off"
        assert "another model" in gate.describe().problem
        assert "a length probe is not used" in caplog.text

        replace(weights, mean=torch.zeros(3)).save(path)
        with pytest.raises(ProbeRefused, match=r"mean has the shape \(3,\)"):
            load_probe(path, reader, fingerprint, torch.device("cpu"))
        replace(weights, output_bias=torch.full((RANGES,), float("nan"))).save(path)
        with pytest.raises(ProbeRefused, match="not finite"):
            load_probe(path, reader, fingerprint, torch.device("cpu"))
        replace(weights, layers=(0,)).save(path)
        with pytest.raises(ProbeRefused, match="reads layers"):
            load_probe(path, reader, fingerprint, torch.device("cpu"))
        path.write_bytes(b"garbage")
        with pytest.raises(ProbeRefused, match="cannot be read"):
            load_probe(path, reader, fingerprint, torch.device("cpu"))
        with path.open("wb") as file:
            file.truncate(MAX_FILE_BYTES + 1)
        with pytest.raises(ProbeRefused, match="more than 64 MiB"):
            load_probe(path, reader, fingerprint, torch.device("cpu"))
    finally:
        path.unlink(missing_ok=True)


def test_a_running_engine_takes_over_a_new_probe_keeps_the_old_one_beside_a_broken_file_and_lets_go_of_it(
    model_dir: Path, runner: TorchRunner
) -> None:
    path = model_dir / FILE_NAME
    fingerprint = model_fingerprint(model_dir)
    try:
        follows, gate = follower(runner, model_dir)
        follows.tick(0.0)
        first, second = (weights_for(runner, fingerprint, seed) for seed in (1, 2))
        first.save(path)
        follows.tick(0.5)
        assert runner.readings is None, "it is looked at once a second"
        follows.tick(1.5)
        assert runner.readings is not None
        assert torch.equal(runner.readings.weights.output, first.output)

        second.save(path)
        follows.tick(3.0)
        assert torch.equal(runner.readings.weights.output, second.output)
        assert (gate.describe().state, gate.describe().loaded) == ("on", 2)

        path.write_bytes(b"half a fi")
        follows.tick(4.5)
        assert torch.equal(runner.readings.weights.output, second.output)
        assert "cannot be read" in gate.describe().problem

        path.unlink()
        follows.tick(6.0)
        assert runner.readings.weights is None
        assert (gate.describe().state, gate.describe().problem) == ("off", "")
    finally:
        path.unlink(missing_ok=True)


def test_training_finds_what_the_state_says() -> None:
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(1500, 6, generator=generator)
    remaining = [max(1, round(20 * 2.0 ** float(row[0] - row[1]))) for row in states]
    fitted = fit_probe(states, remaining, layers=(1,), fingerprint="f")
    assert fitted.held_out == 150
    assert fitted.mean_error_tokens < 0.5 * fitted.blind_error_tokens
    again = fit_probe(states, remaining, layers=(1,), fingerprint="f")
    assert torch.equal(again.weights.output, fitted.weights.output)
    with pytest.raises(TooFewReadings, match="10 readings are too few"):
        fit_probe(states[:10], remaining[:10], layers=(1,), fingerprint="f")


def test_a_fingerprint_is_that_of_the_content(model_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "copy"
    other.mkdir()
    for name in ("config.json", "model.safetensors"):
        (other / name).write_bytes((model_dir / name).read_bytes())
    assert model_fingerprint(other) == model_fingerprint(model_dir)
    content = bytearray((other / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (other / "model.safetensors").write_bytes(bytes(content))
    assert model_fingerprint(other) != model_fingerprint(model_dir)
    assert "cores" in machine_name()
