"""Keys of engine connections: which addresses need them, and files that are not taken."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine.client.keys import ENGINE_FILE, GATEWAY_FILE, KeysRefused, engine_keys, gateway_keys, make_keys

TCP = "tcp://10.0.0.5:5555"


def test_made_keys_name_one_another_and_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    make_keys(tmp_path)
    ours, theirs = engine_keys(TCP, tmp_path), gateway_keys(TCP, tmp_path)
    assert ours is not None
    assert theirs is not None
    assert (ours.public, ours.gateway_public) == (theirs.engine_public, theirs.public)
    assert ours.secret not in (tmp_path / GATEWAY_FILE).read_text()
    assert theirs.secret not in (tmp_path / ENGINE_FILE).read_text()
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in (ENGINE_FILE, GATEWAY_FILE)] == [0o600] * 2
    assert len(list(tmp_path.iterdir())) == 2


def test_an_engines_own_keys_go_before_those_of_all_and_a_named_file_before_both(tmp_path: Path) -> None:
    make_keys(tmp_path)
    make_keys(tmp_path, "one")
    of_all, own = engine_keys(TCP, tmp_path, "two"), engine_keys(TCP, tmp_path, "one")
    assert of_all == engine_keys(TCP, tmp_path)
    assert of_all is not None
    assert own is not None
    for name, file, pair in (("two", "", of_all), ("one", "", own), ("one", GATEWAY_FILE, of_all)):
        theirs = gateway_keys(TCP, tmp_path, name, str(tmp_path / file) if file else "")
        assert theirs is not None
        assert theirs.engine_public == pair.public
    assert (tmp_path / "engine-gateway.one.keys").exists()


def test_new_keys_replace_all_of_the_old_ones(tmp_path: Path) -> None:
    make_keys(tmp_path)
    old = engine_keys(TCP, tmp_path)
    make_keys(tmp_path)
    new = engine_keys(TCP, tmp_path)
    assert old is not None
    assert new is not None
    assert not {old.public, old.secret, old.gateway_public} & {new.public, new.secret, new.gateway_public}


def test_a_socket_in_the_data_directory_needs_none(tmp_path: Path) -> None:
    assert engine_keys("ipc:///run/engine.sock", tmp_path) is None
    assert gateway_keys("ipc:///run/engine.sock", tmp_path) is None


def test_without_a_file_the_way_to_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(KeysRefused, match=rf"{TCP} needs keys, .*{ENGINE_FILE} .*`fairgate engine keys"):
        engine_keys(TCP, tmp_path)
    with pytest.raises(KeysRefused, match=rf"{TCP} needs keys, .*: copy {GATEWAY_FILE} there"):
        gateway_keys(TCP, tmp_path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"{", "is damaged"),
        (b"\xff", "is damaged"),
        (msgspec.json.encode({"public": "a", "secret": "b", "engine_public": "c"}), "is damaged"),
        (
            msgspec.json.encode({"public": "a" * 40, "secret": "a" * 40, "engine_public": "é" * 40}),
            "is damaged",
        ),
        (msgspec.json.encode({"public": "a" * 40}), "is damaged"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / GATEWAY_FILE
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(KeysRefused, match=f"{path} {complaint}"):
        gateway_keys(TCP, tmp_path)


def test_a_file_that_others_can_read_is_not_taken(tmp_path: Path) -> None:
    make_keys(tmp_path)
    (tmp_path / ENGINE_FILE).chmod(0o640)
    with pytest.raises(KeysRefused, match="is readable by others: chmod 600"):
        engine_keys(TCP, tmp_path)
