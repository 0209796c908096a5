"""Learned corrections survive a restart; a damaged file costs nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.forecast.calibration import Bucket, Calibration
from engine.forecast.length.length import LengthForecast
from engine.forecast.wait.forecast import Forecast
from gateway.estimates.persistence import CALIBRATIONS_FILE, LearnedFiles

RAW = Forecast((1.0, 2.0), (1.0, 2.0), (0.1, 0.2), (3.0, 6.0), (5, 9), {}, "replay", 1, False)
HERE = Bucket("plain", False, 1, 3)


async def test_it_is_read_again(tmp_path: Path) -> None:
    calibration = Calibration()
    for number in range(100):
        calibration.observe(HERE, RAW, RAW, {"ttft": 3.0 + number / 100, "e2e": 9.0})
    await LearnedFiles(tmp_path).save(LengthForecast(), {"m": calibration}, 1)
    again = LearnedFiles(tmp_path).calibrations()["m"]
    assert again.correct(RAW, HERE) == calibration.correct(RAW, HERE)
    assert again.correct(RAW, HERE).e2e_s[0] > RAW.e2e_s[0]
    assert LearnedFiles(None).calibrations() == {}


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"m": {}}', '{"m": {"version": 1, "shifts": [1]}}'])
def test_a_damaged_file_is_none(tmp_path: Path, damage: str) -> None:
    (tmp_path / CALIBRATIONS_FILE).write_text(damage)
    assert LearnedFiles(tmp_path).calibrations() == {}
