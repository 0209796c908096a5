"""Saves and loads what forecasts have learned: lengths of answers, and corrections of estimates."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from engine.forecast.calibration import Calibration
from engine.forecast.length.length import LengthForecast

LENGTHS_FILE = "lengths.json"
CALIBRATIONS_FILE = "calibration.json"

log = logging.getLogger("fairgate.gateway.estimates")
T = TypeVar("T")


class LearnedFiles:
    """Of a data directory; without one nothing is kept. A damaged file costs accuracy, never a start."""

    def __init__(self, data_dir: Path | None) -> None:
        self._data_dir = data_dir
        self._observed = 0

    def lengths(self) -> LengthForecast:
        """What an earlier run learned."""
        return self._read(LENGTHS_FILE, LengthForecast.from_dict) or LengthForecast()

    def calibrations(self) -> dict[str, Calibration]:
        """By served model."""
        return self._read(CALIBRATIONS_FILE, _calibrations) or {}

    async def save(
        self, lengths: LengthForecast, calibrations: Mapping[str, Calibration], observed: int
    ) -> None:
        """Nothing where no answer was observed since the last time."""
        if self._data_dir is None or observed == self._observed:
            return
        corrections = {model: calibration.to_dict() for model, calibration in calibrations.items()}
        texts = {LENGTHS_FILE: json.dumps(lengths.to_dict()), CALIBRATIONS_FILE: json.dumps(corrections)}
        try:
            await asyncio.to_thread(_write, self._data_dir, texts)
            self._observed = observed
        except OSError as error:
            log.warning("what forecasts have learned could not be saved: %s", error.strerror)

    def _read(self, name: str, parse: Callable[[Any], T]) -> T | None:
        if self._data_dir is None:
            return None
        try:
            return parse(json.loads((self._data_dir / name).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, AttributeError) as error:
            log.warning("%s of the last run is not usable: %s", name, error)
            return None


def _calibrations(stored: Any) -> dict[str, Calibration]:
    return {str(model): Calibration.from_dict(calibration) for model, calibration in stored.items()}


def _write(data_dir: Path, texts: Mapping[str, str]) -> None:
    """Each atomically."""
    for name, text in texts.items():
        temporary = data_dir / f"{name}.new"
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, data_dir / name)
