"""Length probe of a running engine: follows the file beside the model, and writes collected samples."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from engine.core.learned_state import Samples
from engine.forecast.length.probe_gate import ProbeGate
from engine.forecast.length.samples import LengthSample
from engine.model.length_probe.probe import FILE_NAME, LengthReadings, ProbeRefused, ProbeWeights, load_probe
from engine.model.runner import TorchRunner

LOOK_EVERY_S = 1.0

log = logging.getLogger("fairgate.engine")


class ProbeFollower:
    """Follows the probe file beside a runner's model, and every one that takes its place; a refused one
    leaves a line in log and reports. For the engine's one thread."""

    def __init__(
        self, gate: ProbeGate, runner: TorchRunner, model_dir: Path, fingerprint: str, *, keep_states: bool
    ) -> None:
        """`gate` judges what is read; `keep_states`: samples are collected."""
        self._gate = gate
        self._runner = runner
        self._path = model_dir / FILE_NAME
        self._fingerprint = fingerprint
        self._keep_states = keep_states
        self._seen: tuple[int, int, int] | None = None
        """The file as it was last looked at."""
        self._due_s = float("-inf")
        if keep_states:
            runner.readings = LengthReadings(runner.state_reader(), None, keep_states=True)
        self._without()

    def tick(self, now_s: float) -> None:
        """Looks at the file if that is due; call between steps."""
        if now_s >= self._due_s:
            self._due_s = now_s + LOOK_EVERY_S
            self.look()

    def look(self) -> None:
        """Takes over a probe that is new or has changed; stops reading one whose file is gone."""
        readings = self._runner.readings
        if readings is not None and readings.has_failed:
            self._gate.without_probe("off", "the model's states could not be read: see the engine's log")
            return
        try:
            stat = self._path.stat()
            seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        except OSError:
            seen = None
        if seen == self._seen:
            return
        self._seen = seen
        if seen is None:
            log.info("length probe %s is gone", self._path)
            self._read_by(None)
            return
        device = torch.device(self._runner.info.device)
        try:
            weights = load_probe(self._path, self._runner.state_reader(), self._fingerprint, device)
        except ProbeRefused as refused:
            log.warning("a length probe is not used: %s", refused)
            self._gate.refused(str(refused))
            return
        log.info("length probe %s, trained on %d readings", self._path, weights.samples)
        self._read_by(weights)

    def _read_by(self, weights: ProbeWeights | None) -> None:
        readings = self._runner.readings
        if readings is None:
            readings = self._runner.readings = LengthReadings(
                self._runner.state_reader(), None, keep_states=self._keep_states
            )
        readings.weights = weights
        if weights is None:
            self._without()
        else:
            self._gate.took_over(weights.samples)

    def _without(self) -> None:
        self._gate.without_probe("collecting" if self._keep_states else "off")


def samples_of(runner: TorchRunner, fingerprint: str, kept: Sequence[LengthSample]) -> Samples:
    """Content of the samples file for `fairgate forecast train`."""
    reader = runner.state_reader()
    rows = [(sample.generated, sample.remaining, sample.state) for sample in kept]
    return Samples(fingerprint, list(reader.layers), reader.width, rows)


def threads_in_use() -> int:
    return int(torch.get_num_threads())
