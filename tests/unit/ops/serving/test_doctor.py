"""Tests of `fairgate doctor` for a gateway without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine.process.options import EngineSettings
from ops.serving import doctor
from ops.settings.settings import Settings

Check = Callable[[Settings], Awaitable[doctor.Finding]]


@pytest.mark.parametrize("check", [doctor._engine, doctor._speed])
def test_a_gateway_that_is_to_have_no_engine_is_not_examined_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: Check
) -> None:
    monkeypatch.setattr(doctor, "missing_packages", lambda: ["torch"])
    with_engine = Settings(data_dir=tmp_path)
    without = replace(with_engine, engine=EngineSettings(serve=False))

    async def detail(settings: Settings) -> str:
        return (await check(settings)).detail

    assert "installed" in asyncio.run(detail(with_engine))
    assert "engine.serve=no" in asyncio.run(detail(without))
