"""Saves and loads learned lengths and forecast corrections."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from engine.forecast.calibration import Calibration
from engine.forecast.length.length import LengthForecast

LENGTHS_FILE = "lengths.json"

FILE = "calibration.json"

log = logging.getLogger("fairgate.gateway.estimates")


def load_calibrations(data_dir: Path | None) -> dict[str, Calibration]:
    """By served model; a damaged file costs accuracy, never a start."""
    if data_dir is None:
        return {}
    try:
        found = json.loads((data_dir / FILE).read_text(encoding="utf-8"))
        return {str(model): Calibration.from_dict(calibration) for model, calibration in found.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        log.warning("the calibration of the last run is not usable: %s", error)
        return {}


def as_text(calibrations: Mapping[str, Calibration]) -> str:
    """Call where the calibrations live; the text can be written anywhere."""
    return json.dumps({model: calibration.to_dict() for model, calibration in calibrations.items()})


def save_calibrations(data_dir: Path, text: str) -> None:
    """Atomically."""
    temporary = data_dir / (FILE + ".new")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, data_dir / FILE)


def load_lengths(data_dir: Path | None) -> LengthForecast:
    """What an earlier run learned; a damaged file costs accuracy, never a start."""
    if data_dir is None:
        return LengthForecast()
    try:
        return LengthForecast.from_dict(json.loads((data_dir / LENGTHS_FILE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return LengthForecast()
    except (OSError, ValueError) as error:
        log.warning("the length forecast of the last run is not usable: %s", error)
        return LengthForecast()


class LearnedFiles:
    """What a gateway learned, in its data directory; None: nothing is kept."""

    def __init__(self, data_dir: Path | None) -> None:
        self._data_dir = data_dir
        self._observed = 0

    async def save(
        self, lengths: LengthForecast, calibrations: Mapping[str, Calibration], observed: int
    ) -> None:
        """Nothing if no request was observed since the last time."""
        if self._data_dir is None or observed == self._observed:
            return
        text = json.dumps(lengths.to_dict())
        try:
            await asyncio.to_thread(save_lengths, self._data_dir, text)
            await asyncio.to_thread(save_calibrations, self._data_dir, as_text(calibrations))
            self._observed = observed
        except OSError as error:
            log.warning("the length forecast could not be saved: %s", error.strerror)


def save_lengths(data_dir: Path, text: str) -> None:
    """Atomically."""
    temporary = data_dir / (LENGTHS_FILE + ".new")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, data_dir / LENGTHS_FILE)
