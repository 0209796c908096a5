"""What the channel's memories hold at most, and what they do when they are full."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from engine.vllm_plugin.channel.claims_check import SeenOnce
from engine.vllm_plugin.channel.gateways import (
    EARLY_S,
    MAX_EARLY,
    MAX_OUTCOMES,
    ChannelGateway,
    ServiceLog,
    UntoldService,
)
from engine.vllm_plugin.channel.setup import make_desk
from engine.vllm_plugin.key_file import read_key
from engine.vllm_plugin.protocol import MAX_REPORTED_SEQUENCES, MAX_REPORTED_TENANTS, SequenceNews
from engine.vllm_plugin.signature import MAX_FRAME_BYTES, SKEW_S, encode_report
from tests.support.vllm_plugin import KEY, exchange, signed, stand_in


def test_a_name_is_seen_once() -> None:
    seen = SeenOnce()
    assert seen.is_first("a", 100.0, 100.0)
    assert not seen.is_first("a", 100.0, 150.0)
    assert not seen.is_first("a", 101.0, 150.0)


def test_what_is_no_longer_good_is_forgotten() -> None:
    seen = SeenOnce()
    for second in range(1000):
        assert seen.is_first(str(second), float(second), float(second))
    assert len(seen) <= SKEW_S + 1


def test_a_full_memory_refuses_rather_than_lets_twice() -> None:
    seen = SeenOnce(most=10)
    for second in range(20):
        assert seen.is_first(str(second), 100.0 + second, 120.0)
    assert len(seen) == 10
    assert not any(seen.is_first(str(second), 100.0 + second, 120.0) for second in range(20))
    assert not seen.is_first("never seen", 105.0, 120.0)
    assert seen.is_first("younger", 121.0, 121.0)


def test_a_clock_that_goes_forward_and_back_makes_nothing_good_twice() -> None:
    seen = SeenOnce()
    assert seen.is_first("old", 100.0, 100.0)
    assert seen.is_first("ahead", 300.0, 300.0)
    assert not seen.is_first("old", 100.0, 101.0)
    assert seen.is_first("next", 101.0, 101.0)


def test_names_signed_by_a_fast_clock_that_fill_the_memory_keep_no_other_out() -> None:
    seen = SeenOnce(most=10)
    for number in range(10):
        assert seen.is_first(f"fast {number}", 100.0 + SKEW_S, 100.0)
    assert all(seen.is_first(str(second), 100.0 + second, 100.0 + second) for second in range(20))
    assert not any(seen.is_first(str(second), 100.0 + second, 120.0) for second in range(20))


def test_early_words_are_bounded_in_number_and_time() -> None:
    gateway = ChannelGateway("gw", "", 0.0)
    for number in range(MAX_EARLY + 5):
        gateway.say_early(str(number), 1.0, lease_tokens=number)
    assert len(gateway.early) == MAX_EARLY
    gateway.say_early("late", 2.0 + EARLY_S, cause="budget")
    assert list(gateway.early) == ["late"]


def test_outcomes_that_had_to_be_forgotten_are_counted() -> None:
    gateway = ChannelGateway("gw", "", 0.0)
    for number in range(MAX_OUTCOMES + 3):
        gateway.keep(str(number), SequenceNews("ended", 1, 1))
    assert (len(gateway.outcomes), gateway.lost_outcomes) == (MAX_OUTCOMES, 3)


def test_service_of_more_tenants_than_a_report_holds_comes_with_the_next() -> None:
    log = ServiceLog()
    for number in range(MAX_REPORTED_TENANTS + 7):
        log.add(f"t{number}", UntoldService(0, 1))
    first = log.take(0, 1)
    log.add("t0", UntoldService(0, 1))
    second = log.take(1, 2)
    assert (len(first), len(second)) == (MAX_REPORTED_TENANTS, 8)
    assert (
        sum(each.emitted_tokens for each in (*first.values(), *second.values())) == MAX_REPORTED_TENANTS + 8
    )
    assert log.take(2, 3) == {}


def test_the_longest_report_fits_into_a_frame() -> None:
    """With the longest ids, and all that a report may hold."""
    server = stand_in()
    gateway_id, tenant_id = "g" * 256, "t" * 252
    for number in range(MAX_REPORTED_SEQUENCES + 5):
        name = f"{number:04}" + "s" * 252
        text = signed(
            name, 9, gateway_id=gateway_id, request_id="r" * 256, tenant_id=tenant_id + f"{number:04}"
        )
        assert server.add(text, name=name).is_verified
    server.run(2)
    for name in list(server.live):
        server.finish(name, "budget")
    log = next(iter(server.desk._gateways)).service
    for number in range(MAX_REPORTED_TENANTS):
        log.add(f"{number:04}" + "t" * 252, UntoldService(10**9, 10**9, dict.fromkeys((0, 1, 2), 10**18)))
    report = server.desk.exchange(exchange(gateway_id), server.now_s)
    assert (len(report.sequences), len(report.service)) == (MAX_REPORTED_SEQUENCES, MAX_REPORTED_TENANTS)
    assert len(encode_report(report, KEY)) < MAX_FRAME_BYTES


def key_file(folder: Path, text: str = "a" * 40, mode: int = 0o600) -> str:
    path = folder / "key"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_a_key_is_the_files_text(tmp_path: Path) -> None:
    assert read_key(key_file(tmp_path, "a" * 40 + "\n")) == b"a" * 40


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        ("a" * 40, 0o640, "chmod 600"),
        ("a" * 40, 0o604, "chmod 600"),
        ("s3cr" * 7, 0o600, "28 bytes"),
        ("a" * 5000, 0o600, "4096"),
    ],
)
def test_a_key_file_that_is_not_good_is_refused(tmp_path: Path, text: str, mode: int, says: str) -> None:
    with pytest.raises(ValueError, match=says) as refused:
        read_key(key_file(tmp_path, text, mode))
    assert "s3cr" not in str(refused.value)


def test_a_missing_key_file_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"No such file.*openssl"):
        read_key(str(tmp_path / "none"))
    with pytest.raises(ValueError, match="not a file"):
        read_key("/dev/null")


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"FAIRGATE_VLLM_SOCKET": "/x"}, "set FAIRGATE_VLLM_KEY_FILE"),
        ({"FAIRGATE_VLLM_KEY_FILE": "/nothing/here"}, "FAIRGATE_VLLM_KEY_FILE: key file /nothing/here"),
        ({"FAIRGATE_VLLM_GATEWAY_TIMEOUT_S": "soon"}, "from 1 to 3600"),
        ({"FAIRGATE_VLLM_GATEWAY_TIMEOUT_S": "nan"}, "from 1 to 3600"),
        ({"FAIRGATE_VLLM_GATEWAY_TIMEOUT_S": "0.5"}, "from 1 to 3600"),
    ],
)
def test_settings_that_do_not_hold_are_refused_at_start(environ: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_desk(environ)


def test_a_socket_file_is_for_its_owner_and_no_file_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    path.write_text("something of value")
    environ = {"FAIRGATE_VLLM_KEY_FILE": key_file(tmp_path), "FAIRGATE_VLLM_SOCKET": str(path)}
    with pytest.raises(ValueError, match="no socket"):
        make_desk(environ)
    path.unlink()
    make_desk(environ)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(ValueError, match="another process listens"):
        make_desk(environ)
