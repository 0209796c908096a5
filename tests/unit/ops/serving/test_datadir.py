"""Tests of the data directory: permissions, the serve lock, and damaged files."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest

from ops.serving import datadir
from ops.serving.datadir import DataDirRefused, ServerFile
from ops.settings.settings import Settings, load


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    found = load({"data_dir": tmp_path / "data"})
    datadir.ensure(found.data_dir)
    return found


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_everything_is_for_the_owner_only(settings: Settings) -> None:
    datadir.pepper(settings, create=True)
    datadir.write_server_file(settings.data_dir, ServerFile("http://x", 1, "token"))
    assert mode(settings.data_dir) == mode(settings.data_dir / "run") == 0o700
    assert mode(settings.data_dir / "pepper") == 0o600
    assert mode(settings.data_dir / "run" / "server.json") == 0o600


def test_the_pepper_is_made_once_even_by_many_at_once(settings: Settings) -> None:
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.append(datadir.pepper(settings, create=True))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert datadir.pepper(settings, create=False) == found[0]
    assert [path.name for path in settings.data_dir.glob("pepper*")] == ["pepper"]


def test_a_pepper_from_the_settings_wins_and_writes_nothing(settings: Settings, tmp_path: Path) -> None:
    given = load({"data_dir": tmp_path / "data"}, {"FAIRGATE_PEPPER": "p" * 40})
    assert datadir.pepper(given, create=True) == b"p" * 40
    assert not (given.data_dir / "pepper").exists()


def test_a_lost_or_damaged_pepper_is_never_replaced_in_silence(settings: Settings) -> None:
    with pytest.raises(DataDirRefused, match="restore it"):
        datadir.pepper(settings, create=False)
    (settings.data_dir / "pepper").write_text("short\n")
    with pytest.raises(DataDirRefused, match="damaged"):
        datadir.pepper(settings, create=True)
    assert (settings.data_dir / "pepper").read_text() == "short\n"


def test_one_server_a_directory(settings: Settings) -> None:
    data_dir = settings.data_dir
    assert not datadir.is_serving(data_dir)
    with datadir.serve_lock(data_dir):
        datadir.write_server_file(data_dir, ServerFile("http://127.0.0.1:1", 42, "token"))
        assert datadir.is_serving(data_dir)
        assert datadir.running_server(data_dir) == ServerFile("http://127.0.0.1:1", 42, "token")
        with (
            pytest.raises(DataDirRefused, match=r"process 42, http://127\.0\.0\.1:1"),
            datadir.serve_lock(data_dir),
        ):
            raise AssertionError("two servers on one directory")
    assert not datadir.is_serving(data_dir)
    assert datadir.running_server(data_dir) is None, "what a dead server left is not believed"
    with datadir.serve_lock(data_dir):
        pass


def test_what_is_no_server_file_is_ignored(settings: Settings) -> None:
    for text in ("", "{}", "[1]", '{"url": "x", "pid": "y", "control_token": "z"}'):
        (settings.data_dir / "run" / "server.json").write_text(text)
        assert datadir.read_server_file(settings.data_dir) is None
    datadir.remove_server_file(settings.data_dir)
    datadir.remove_server_file(settings.data_dir)


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataDirRefused, match=r"file/data cannot be created: Not a directory"):
        datadir.ensure(tmp_path / "file" / "data")


def test_a_gateway_keeps_its_name(settings: Settings) -> None:
    first = datadir.gateway_id(settings.data_dir)
    assert first.startswith("gw_")
    assert datadir.gateway_id(settings.data_dir) == first
