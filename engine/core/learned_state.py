"""Learned state that outlives an engine: step-time model and length samples.

`<engine>.learned.json`: the step-time model of this machine, model and number format, and the accuracy of
length forecasts. `<engine>.length-samples`: a length probe's training data, where collected. Written
atomically every `KEEP_EVERY_S` and at the end, for their owner only; damaged or foreign files are ignored,
and logged.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine.core.core import EngineCore
from engine.forecast.length.samples import MAX_SAMPLES, LengthSample
from engine.step_time.model import StepTimeModel

KEEP_EVERY_S = 180.0
FIRST_SAMPLES = 200
"""Samples that a probe can be trained on: written at once when there are as many."""
VERSION = 1
MAX_FILE_BYTES = 1 << 28

log = logging.getLogger("fairgate.engine")


@dataclass(frozen=True, slots=True)
class LearnedKey:
    """Where a step-time model is valid."""

    machine: str
    fingerprint: str
    dtype: str
    device: str
    attention: str
    threads: int


class Samples(msgspec.Struct, frozen=True):
    """Content of a file of samples."""

    fingerprint: str
    layers: list[int]
    width: int
    """Numbers of one state."""
    rows: list[tuple[int, int, bytes]]
    """(tokens emitted so far, tokens that followed, state)."""
    version: int = VERSION


class SamplesRefused(Exception):
    """The file holds no samples for this model; the message says why."""


def learned_path(data_dir: Path, engine_id: str) -> Path:
    return data_dir / f"{engine_id}.learned.json"


def samples_path(data_dir: Path, engine_id: str) -> Path:
    return data_dir / f"{engine_id}.length-samples"


def load_step_time(path: Path, key: LearnedKey) -> StepTimeModel | None:
    """The saved step-time model; None: none for this machine and model."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["version"] != VERSION:
            raise ValueError(f"version {content['version']!r} is not known")
        if content["key"] != asdict(key):
            log.info("%s was learned on another machine or model: step times are learned anew", path)
            return None
        return StepTimeModel.from_dict(content["step_time"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s cannot be used (%s): step times are learned anew", path, error)
        return None


def read_learned(path: Path) -> dict[str, Any] | None:
    """The whole content, for a report; None: no file. Raises ValueError for a damaged file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise ValueError(f"{path} is no file of what an engine learned")
    return content


def read_samples(path: Path, fingerprint: str) -> Samples:
    """Reads a file of samples. Raises `SamplesRefused`."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise SamplesRefused(f"{path} has more than {MAX_FILE_BYTES >> 20} MiB")
        samples = msgspec.msgpack.decode(path.read_bytes(), type=Samples)
    except OSError as error:
        raise SamplesRefused(f"{path} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise SamplesRefused(f"{path} holds no length samples: {error}") from None
    if samples.version != VERSION or not all(len(row[2]) == 2 * samples.width for row in samples.rows):
        raise SamplesRefused(f"{path} holds no length samples of this version")
    if samples.fingerprint != fingerprint:
        raise SamplesRefused(f"{path} was collected with another model")
    return samples


class LearnedStateWriter:
    """Writes a core's learned state every `KEEP_EVERY_S` and at the end. For the engine's one thread."""

    def __init__(
        self,
        core: EngineCore,
        path: Path,
        key: LearnedKey,
        samples: Callable[[list[LengthSample]], tuple[Path, Samples]] | None,
        now_s: float,
    ) -> None:
        """`samples` makes the file of samples; None: none are collected."""
        self._core = core
        self._path = path
        self._key = key
        self._samples = samples
        self._due_s = now_s + KEEP_EVERY_S
        self._kept_steps = core.step_time.samples
        self._kept_samples = 0

    def tick(self, now_s: float) -> None:
        """Writes if it is due; call between steps."""
        can_train_first = self._samples is not None and not self._kept_samples
        if now_s >= self._due_s or (can_train_first and self._core.samples.total >= FIRST_SAMPLES):
            self._due_s = now_s + KEEP_EVERY_S
            self.keep()

    def keep(self) -> None:
        """Writes now, unless nothing is new. A failed write is logged and does not stop the engine."""
        core = self._core
        try:
            if core.step_time.samples != self._kept_steps:
                content = {
                    "version": VERSION,
                    "key": asdict(self._key),
                    "step_time": core.step_time.to_dict(),
                    "fit": msgspec.to_builtins(core.step_time.to_message()),
                    "length_probe": msgspec.to_builtins(core.lengths.describe()),
                }
                _replace(self._path, json.dumps(content, indent=1).encode())
                self._kept_steps = core.step_time.samples
            if self._samples is not None and core.samples.total != self._kept_samples:
                path, samples = self._samples(core.samples.kept()[-MAX_SAMPLES:])
                _replace(path, msgspec.msgpack.encode(samples))
                self._kept_samples = core.samples.total
        except OSError as error:
            log.warning("what was learned cannot be kept in %s: %s", self._path.parent, error.strerror)


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(path.name + ".new")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
    os.replace(temporary, path)
