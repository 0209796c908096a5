"""Attaches a model's length probe to its runner, and writes collected samples."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from engine.core.learned_state import Samples
from engine.forecast.length.samples import LengthSample
from engine.model.length_probe.probe import FILE_NAME, LengthReadings, ProbeRefused, load_probe
from engine.model.runner import TorchRunner

log = logging.getLogger("fairgate.engine")


def attach_readings(runner: TorchRunner, model_dir: Path, fingerprint: str, *, keep_states: bool) -> str:
    """Makes the runner read its states if the model has a probe, or if samples are collected; returns which.
    A refused probe is ignored with a line in the log: forecasts are less accurate then."""
    path = model_dir / FILE_NAME
    reader = runner.state_reader()
    weights = None
    if path.exists():
        try:
            weights = load_probe(path, reader, fingerprint, torch.device(runner.info.device))
            log.info("length probe %s, trained on %d readings", path, weights.samples)
        except ProbeRefused as refused:
            log.warning("output lengths are foreseen without a probe: %s", refused)
    if weights is None and not keep_states:
        return "off"
    runner.readings = LengthReadings(reader, weights, keep_states=keep_states)
    return "on" if weights is not None else "collecting"


def samples_of(runner: TorchRunner, fingerprint: str, kept: Sequence[LengthSample]) -> Samples:
    """Content of the samples file for `fairgate forecast train`."""
    reader = runner.state_reader()
    rows = [(each.generated, each.remaining, each.state) for each in kept]
    return Samples(fingerprint, list(reader.layers), reader.width, rows)


def threads_in_use() -> int:
    """Number of threads of the matrix products."""
    return int(torch.get_num_threads())
