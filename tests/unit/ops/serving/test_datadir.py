"""Tests of the data directory: permissions, the serve lock, and damaged files."""

from __future__ import annotations

import stat
import threading
from contextlib import suppress
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
    datadir.keep_pepper(settings, datadir.pepper(settings))
    datadir.write_owner_key(settings.data_dir, "fg_live_x")
    datadir.write_server_file(settings.data_dir, ServerFile("http://x", 1, "token"))
    assert mode(settings.data_dir) == mode(settings.data_dir / "run") == 0o700
    assert mode(settings.data_dir / "pepper") == 0o600
    assert mode(settings.data_dir / "owner-key") == 0o600
    assert mode(settings.data_dir / "run" / "server.json") == 0o600


def test_the_pepper_is_made_once_even_by_many_at_once(settings: Settings) -> None:
    kept: list[bytes] = []

    def make() -> None:
        mine = datadir.pepper(settings)
        with suppress(DataDirRefused):
            datadir.keep_pepper(settings, mine)
            kept.append(mine)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kept
    assert set(kept) == {datadir.pepper(settings)}
    assert [path.name for path in settings.data_dir.glob("pepper*")] == ["pepper"]


def test_one_that_came_second_is_told_to_try_again(settings: Settings) -> None:
    mine = datadir.pepper(settings)
    datadir.keep_pepper(settings, datadir.pepper(settings))
    with pytest.raises(DataDirRefused, match="try again"):
        datadir.keep_pepper(settings, mine)


def test_a_new_pepper_is_not_written_before_it_is_kept(settings: Settings) -> None:
    assert datadir.pepper(settings) != datadir.pepper(settings)
    assert not (settings.data_dir / "pepper").exists()


def test_a_pepper_from_the_settings_wins_and_writes_nothing(settings: Settings, tmp_path: Path) -> None:
    given = load({"data_dir": tmp_path / "data"}, {"FAIRGATE_PEPPER": "p" * 40})
    assert datadir.pepper(given) == b"p" * 40
    datadir.keep_pepper(given, b"p" * 40)
    assert not (given.data_dir / "pepper").exists()


def test_a_damaged_pepper_is_never_replaced_in_silence(settings: Settings) -> None:
    (settings.data_dir / "pepper").write_text("short\n")
    with pytest.raises(DataDirRefused, match="damaged"):
        datadir.pepper(settings)
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


def test_the_admin_api_is_found_where_it_listens(settings: Settings) -> None:
    with datadir.serve_lock(settings.data_dir):
        datadir.write_server_file(settings.data_dir, ServerFile("http://a:1", 42, "token", "http://a:2"))
        found = datadir.running_server(settings.data_dir)
        assert found is not None
        assert (found.url, found.url_of_admin) == ("http://a:1", "http://a:2")
        older = '{"url": "http://a:1", "pid": 42, "control_token": "token"}'
        (settings.data_dir / "run" / "server.json").write_text(older)
        found = datadir.running_server(settings.data_dir)
        assert found is not None
        assert found.url_of_admin == "http://a:1"


def test_a_worker_of_an_earlier_server_is_waited_for_and_named(tmp_path: Path) -> None:
    datadir.wait_for_workers(tmp_path, 0)
    place = datadir.worker_dir(tmp_path, 1)
    place.mkdir(parents=True)
    with (
        datadir.serve_lock(place),
        pytest.raises(DataDirRefused, match=rf"still runs on {place}: .*gateway.drain"),
    ):
        datadir.wait_for_workers(tmp_path, 0)
    datadir.wait_for_workers(tmp_path, 0)
