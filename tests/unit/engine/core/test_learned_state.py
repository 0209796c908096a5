"""Learned state across a restart; foreign and damaged files are ignored."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.core.core import EngineConfig, EngineCore
from engine.core.learned_state import (
    FIRST_SAMPLES,
    KEEP_EVERY_S,
    LearnedKey,
    LearnedStateWriter,
    Samples,
    SamplesRefused,
    learned_path,
    load_step_time,
    read_learned,
    read_samples,
    samples_path,
)
from engine.forecast.length.samples import LengthSample
from engine.step_time.model import StepTimeModel
from engine.virtual.replica import VirtualClock, VirtualRunner, VirtualTexts

KEY = LearnedKey("a machine", "f" * 32, "float32", "cpu", "numba", 2)


def core_with(step_time: StepTimeModel | None = None) -> EngineCore:
    clock = VirtualClock()
    runner = VirtualRunner(clock)
    return EngineCore(runner, VirtualTexts(), EngineConfig(), clock, step_time=step_time)


def taught(core: EngineCore, steps: int) -> None:
    for number in range(steps):
        sequences = 1 + number % 7
        core.step_time.observe(sequences, 100 * sequences, sequences, 5e-3 + 1e-3 * sequences)


def kept(path: Path, key: LearnedKey, steps: int = 50) -> EngineCore:
    """A core that learned, and whose keeper wrote it down."""
    core = core_with()
    keeper = LearnedStateWriter(core, path, key, None, now_s=0.0)
    taught(core, steps)
    keeper.keep()
    return core


def test_a_restarted_engine_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    path = learned_path(tmp_path, "engine-0")
    core = kept(path, KEY, steps=300)

    again = load_step_time(path, KEY)
    assert again is not None
    assert again.to_message() == core.step_time.to_message()
    # And learns on as the first would have: sums are kept, not only the fit.
    core.step_time.observe(3, 300, 3, 0.5)
    again.observe(3, 300, 3, 0.5)
    assert again.to_message() == core.step_time.to_message()
    assert core_with(again).step_time.predict(3, 300, 3) == pytest.approx(8e-3, rel=0.1)
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "other",
    [
        replace(KEY, machine="another"),
        replace(KEY, fingerprint="0" * 32),
        replace(KEY, dtype="bfloat16"),
        replace(KEY, threads=8),
    ],
    ids=["machine", "model", "dtype", "threads"],
)
def test_what_was_learned_elsewhere_is_ignored(tmp_path: Path, other: LearnedKey) -> None:
    path = learned_path(tmp_path, "engine-0")
    kept(path, other)

    assert load_step_time(path, KEY) is None


def with_step_time(**fields: object) -> Callable[[Any], str]:
    return lambda content: json.dumps({**content, "step_time": {**content["step_time"], **fields}})


@pytest.mark.parametrize(
    "change",
    [
        lambda content: "{",
        lambda content: json.dumps([1]),
        lambda content: json.dumps({**content, "version": 9}),
        lambda content: json.dumps({**content, "step_time": {}}),
        with_step_time(moment=[1, 2]),
        with_step_time(coefficients=[-1] * 4),
        with_step_time(coefficients=[0] * 4),
        with_step_time(gram=[[1e999] * 4] * 4),
    ],
)
def test_a_damaged_file_costs_what_was_learned_and_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Callable[[Any], str]
) -> None:
    path = learned_path(tmp_path, "engine-0")
    kept(path, KEY)
    path.write_text(change(json.loads(path.read_text())))

    assert load_step_time(path, KEY) is None
    assert "step times are learned anew" in caplog.text


def test_it_is_written_now_and_then_and_only_where_something_is_new(tmp_path: Path) -> None:
    path = learned_path(tmp_path, "engine-0")
    assert load_step_time(path, KEY) is None
    assert read_learned(path) is None
    core = core_with()
    keeper = LearnedStateWriter(core, path, KEY, None, now_s=100.0)
    taught(core, 20)
    keeper.tick(100.0 + KEEP_EVERY_S - 1)
    assert not path.exists()
    keeper.tick(100.0 + KEEP_EVERY_S)
    content = read_learned(path)
    assert content is not None
    assert content["fit"]["samples"] == 20
    assert content["length_probe"] == {"state": "off"}
    path.unlink()
    keeper.keep()
    assert not path.exists()


def test_a_full_disk_is_survived(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept(tmp_path / "missing" / "file", KEY)
    assert "cannot be kept" in caplog.text


def keeper_of_samples(directory: Path) -> tuple[EngineCore, LearnedStateWriter, Path]:
    path = samples_path(directory, "engine-0")
    core = core_with()

    def content(kept: list[LengthSample]) -> tuple[Path, Samples]:
        rows = [(each.generated, each.remaining, each.state) for each in kept]
        return path, Samples("f", [1, 3], 2, rows)

    return core, LearnedStateWriter(core, learned_path(directory, "engine-0"), KEY, content, now_s=0.0), path


def test_samples_come_back_and_those_of_another_model_are_refused(tmp_path: Path) -> None:
    core, keeper, path = keeper_of_samples(tmp_path)
    core.samples.note("s", 0, b"abcd")
    core.samples.ended("s", 9)
    keeper.keep()
    assert read_samples(path, "f").rows == [(0, 9, b"abcd")]
    with pytest.raises(SamplesRefused, match="another model"):
        read_samples(path, "g")
    path.write_bytes(msgspec.msgpack.encode(Samples("f", [1], 2, [(0, 9, b"odd")])))
    with pytest.raises(SamplesRefused, match="of this version"):
        read_samples(path, "f")
    path.write_bytes(b"nonsense")
    with pytest.raises(SamplesRefused, match="holds no length samples"):
        read_samples(path, "f")
    with pytest.raises(SamplesRefused, match="cannot be read"):
        read_samples(tmp_path / "none", "f")


def test_samples_are_written_as_soon_as_a_probe_could_be_trained_on_them(tmp_path: Path) -> None:
    core, keeper, path = keeper_of_samples(tmp_path)

    def collect(samples: int) -> None:
        for _ in range(samples):
            core.samples.note("s", 0, b"abcd")
            core.samples.ended("s", 9)

    collect(FIRST_SAMPLES - 1)
    keeper.tick(1.0)
    assert not path.exists()
    collect(1)
    keeper.tick(2.0)
    assert len(read_samples(path, "f").rows) == FIRST_SAMPLES
    collect(FIRST_SAMPLES)
    keeper.tick(2.0 + KEEP_EVERY_S - 0.1)
    assert len(read_samples(path, "f").rows) == FIRST_SAMPLES, "later ones wait their time"
    keeper.tick(2.0 + KEEP_EVERY_S)
    assert len(read_samples(path, "f").rows) == 2 * FIRST_SAMPLES
