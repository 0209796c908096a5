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


def test_an_attention_kernel_by_name_that_cannot_run_here_is_a_fault() -> None:
    settings = Settings(engine=EngineSettings(device="cpu", attention="triton"))
    finding = asyncio.run(doctor._speed(settings))
    assert not finding.ok
    assert finding.detail.startswith("attention triton: not used, attention kernel 'triton' cannot run:")
    assert "another engine.attention" in finding.advice


@pytest.mark.parametrize(
    ("theirs_s", "skew_s"), [(100.0, 0.0), (100.5, 0.0), (101.0, 0.0), (103.5, 2.5), (97.0, 3.0)]
)
def test_a_clock_is_off_by_what_its_reading_lies_outside_of_the_two_around_it(
    theirs_s: float, skew_s: float
) -> None:
    assert doctor.clock_skew_s(100.0, theirs_s, 101.0) == skew_s


@pytest.mark.parametrize(
    ("waited_s", "every_s", "late_s"),
    [(None, 60.0, None), (180.0, 60.0, None), (181.0, 60.0, 181.0), (30.0, 1.0, None), (31.0, 1.0, 31.0)],
)
def test_a_signature_is_late_after_some_intervals(
    waited_s: float | None, every_s: float, late_s: float | None
) -> None:
    oldest_us = None if waited_s is None else round((1_000.0 - waited_s) * 1e6)
    assert doctor.late_signature(oldest_us, 1_000.0, every_s) == late_s


@pytest.mark.parametrize(
    ("url", "is_open"),
    [
        ("redis://127.0.0.1:6379/0", False),
        ("redis://[::1]:6379/0", False),
        ("redis://localhost", False),
        ("redis:///0", False),
        ("redis://:secret@cache:6379/0", False),
        ("rediss://user:secret@cache", False),
        ("redis://cache:6379/0", True),
        ("redis://user@10.0.0.7", True),
        ("rediss://cache", True),
        ("redis+cluster://127.0.0.1:1,[::1]:2", False),
        ("redis+cluster://127.0.0.1:1,cache", True),
        ("redis+cluster://:secret@cache,other", False),
        ("redis+sentinel://localhost,cache/main", True),
    ],
)
def test_a_redis_wants_a_password_unless_it_is_of_this_machine(url: str, is_open: bool) -> None:
    assert bool(doctor.open_redis(url)) is is_open


def test_a_socket_of_redis_is_private_where_its_directory_is(tmp_path: Path) -> None:
    url = f"unix://{tmp_path}/redis.sock?db=0"
    tmp_path.chmod(0o700)
    assert doctor.open_redis(url) is None
    tmp_path.chmod(0o755)
    assert "open to every user" in str(doctor.open_redis(url))
    assert doctor.open_redis(f"unix://:secret@{tmp_path}/redis.sock") is None
