"""`fairgate forecast`: from what an engine collected to a probe that the next one uses, and the report."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from engine.core.learned_state import Samples, samples_path
from engine.forecast.length.features import features_of
from engine.forecast.length.length import LengthForecast
from engine.forecast.length.probe_gate import ProbeGate
from engine.model.length_probe.probe import FILE_NAME
from engine.model.loader import load_runner
from engine.model.probe_attachment import ProbeFollower
from engine.process.fingerprint import model_fingerprint
from gateway.estimates.persistence import LENGTHS_FILE
from ops.cli.main import cli
from tests.support.tiny_model import save_tiny_model


def fairgate(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["forecast", *arguments], prog_name="fairgate")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def collected(model_dir: Path, data_dir: Path, readings: int, fingerprint: str | None = None) -> None:
    """A file as an engine writes it, whose states tell the length."""
    reader = load_runner(model_dir, num_blocks=8, device="cpu", fast_paths=False).state_reader()
    rng = random.Random(1)
    rows = []
    for _ in range(readings):
        remaining = rng.choice((2, 20, 200))
        state = np.random.default_rng(remaining).normal(size=reader.width) + rng.gauss(0, 0.1)
        rows.append((0, remaining, state.astype(np.float16).tobytes()))
    data_dir.mkdir(exist_ok=True)
    samples = Samples(fingerprint or model_fingerprint(model_dir), list(reader.layers), reader.width, rows)
    samples_path(data_dir, "engine-0").write_bytes(msgspec.msgpack.encode(samples))


def test_what_was_collected_becomes_a_probe_that_an_engine_uses(model_dir: Path, tmp_path: Path) -> None:
    collected(model_dir, tmp_path, 400)
    trained = fairgate("train", "--model", str(model_dir), "--data-dir", str(tmp_path), "--json")
    try:
        assert trained.exit_code == 0, trained.output
        told = json.loads(trained.stdout)
        assert told["probe"] == str(model_dir / FILE_NAME)
        assert (told["readings"], told["held_out"]) == (360, 40)
        assert told["mean_error_tokens"] < 0.3 * told["blind_error_tokens"]
        runner = load_runner(model_dir, num_blocks=8, device="cpu", fast_paths=False)
        fingerprint = model_fingerprint(model_dir)
        gate = ProbeGate()
        ProbeFollower(gate, runner, model_dir, fingerprint, keep_states=False).look()
        assert gate.describe().state == "on"
    finally:
        (model_dir / FILE_NAME).unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("readings", "fingerprint", "complaint"),
    [
        (None, None, "nothing was collected. Set engine.collect_lengths to yes"),
        (20, None, "20 readings are too few"),
        (300, "another", "was collected with another model"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_with_a_way_out(
    model_dir: Path, tmp_path: Path, readings: int | None, fingerprint: str | None, complaint: str
) -> None:
    if readings is not None:
        collected(model_dir, tmp_path, readings, fingerprint)
    refused = fairgate("train", "--model", str(model_dir), "--data-dir", str(tmp_path))
    assert refused.exit_code == 1
    assert complaint in refused.output
    assert not (model_dir / FILE_NAME).exists()


def test_the_report_has_every_layer_and_an_empty_one_is_no_error(tmp_path: Path) -> None:
    empty = fairgate("report", "--data-dir", str(tmp_path))
    assert empty.exit_code == 0
    assert "none" in empty.output

    lengths = LengthForecast()
    for number in range(60):
        features = features_of(f"List {number} rivers.", prompt_tokens=9)
        lengths.observe("t", "m", 3 + 4 * number, features)
    (tmp_path / LENGTHS_FILE).write_text(json.dumps(lengths.to_dict()))
    report = json.loads(fairgate("report", "--data-dir", str(tmp_path), "--json").stdout)
    layers = report["gateway"]["m"]["layers"]
    assert {name: layer["samples"] for name, layer in layers.items()} == {
        "sketches": 60,
        "features": 60,
        "user": 0,
        "conversation": 0,
    }
    assert 0 <= layers["features"]["rank_accuracy"] <= 1
    assert "2 features" in fairgate("report", "--data-dir", str(tmp_path)).output

    (tmp_path / LENGTHS_FILE).write_text("[1]")
    damaged = fairgate("report", "--data-dir", str(tmp_path))
    assert damaged.exit_code == 1
    assert "is no length forecast" in damaged.output
