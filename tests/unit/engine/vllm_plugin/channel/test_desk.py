"""The gateway's side inside a vLLM server, on virtual time."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from engine.messages import TenantShare
from engine.vllm_plugin.protocol import MAX_REPORTED_SEQUENCES, PluginReport, PolicyChoice
from engine.vllm_plugin.seam import DEFAULT_TENANT
from engine.vllm_plugin.signature import ChannelRefused
from tests.support.vllm_plugin import FOREIGN_KEY, WALL_S, StandInScheduler, exchange, signed, stand_in


def ask(server: StandInScheduler, gateway_id: str = "gw", **fields: object) -> PluginReport:
    """An exchange over vLLM's own HTTP: between two steps."""
    server.desk.ask_now()
    return server.desk.exchange(exchange(gateway_id, **fields), server.now_s)


def serving(lease: int, **options: Any) -> StandInScheduler:
    """With one sequence, `s1`."""
    server = stand_in(**options)
    server.add(signed("s1", lease))
    return server


def end_of(report: PluginReport) -> tuple[str, int]:
    """How `s1` ended, and with how many tokens."""
    outcome = report.sequences["s1"].outcome
    assert outcome is not None
    return outcome.finish, outcome.emitted_tokens


def test_a_sequence_rests_at_its_lease_and_goes_on_when_topped_up() -> None:
    server = serving(50)
    server.run(80)
    news = ask(server).sequences["s1"]
    assert (news.state, news.emitted_tokens, news.lease_tokens) == ("parked", 50, 50)
    ask(server, top_ups={"s1": 120})
    ask(server, top_ups={"s1": 120})
    ask(server, top_ups={"s1": 60})
    server.run(100)
    assert ask(server).sequences["s1"].emitted_tokens == 120
    ask(server, top_ups={"s1": 500})
    server.run(100)
    report = ask(server)
    assert (report.sequences["s1"].state, report.sequences["s1"].emitted_tokens) == ("ended", 200)
    assert end_of(report) == ("length", 200)


def test_an_evicted_one_whose_lease_is_used_up_is_parked_as_well() -> None:
    server = serving(3)
    server.run(5)
    server.live["s1"].is_evicted = True
    report = ask(server)
    assert report.sequences["s1"].state == "parked"
    assert (report.parked, report.waiting, report.running) == (1, 0, 0)


def test_a_top_up_that_overtakes_its_request_counts() -> None:
    """The channel is quicker than an API server that tokenises a long prompt."""
    server = stand_in()
    ask(server, top_ups={"s1": 90})
    assert server.add(signed("s1", 50)).submit.lease_tokens == 90
    server.run(150)
    assert ask(server).sequences["s1"].emitted_tokens == 90


def test_a_cancel_that_overtakes_its_request_counts() -> None:
    server = stand_in()
    ask(server, cancels={"s1": "expired"})
    server.add(signed("s1", 50))
    server.run(1)
    assert end_of(ask(server)) == ("expired", 0)


def test_a_late_word_about_an_ended_sequence_is_not_kept() -> None:
    server = stand_in()
    server.add(signed("s1", 50), max_tokens=2)
    server.run(3)
    ask(server, top_ups={"s1": 90}, cancels={"s1": "budget"})
    assert not next(iter(server.desk._gateways)).early


def test_nothing_more_ends_it_with_the_cause_that_was_given() -> None:
    server = serving(50)
    server.run(60)
    ask(server, cancels={"s1": "budget"})
    server.run(1)
    assert end_of(ask(server)) == ("budget", 50)


def test_a_gateway_cannot_touch_the_sequences_of_another() -> None:
    server = serving(5)
    server.add(signed("s2", 5, gateway_id="other"), name="cmpl-2")
    server.run(9)
    ask(server, "other", top_ups={"s1": 90}, cancels={"s1": "failed"}, acknowledges=["s1"])
    server.run(9)
    assert server.live["s1"].emitted_tokens == 5
    assert set(ask(server, "other").sequences) == {"s2"}


@pytest.mark.attack
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "missing"),
        ("x" * 9000, "malformed"),
        (signed(key=FOREIGN_KEY), "foreign"),
        (signed()[:-4] + "AAAA", "foreign"),
        (signed(issued_at_s=WALL_S - 61), "time"),
        (signed(issued_at_s=WALL_S + 61), "time"),
        (signed(tier=7), "form"),
        (signed(life="another server's"), "server"),
        ({"tenant_id": "acme", "weight": 99}, "malformed"),
    ],
)
def test_a_request_without_a_good_signature_is_of_the_default_tenant(text: object, reason: str) -> None:
    server = stand_in()
    terms = server.add(text)
    assert not terms.is_verified
    assert (terms.submit.tenant_id, terms.submit.weight, terms.submit.tier) == (DEFAULT_TENANT, 1.0, 1)
    assert (terms.submit.counter, terms.submit.heard, terms.gateway_id) == (0, 0, "")
    assert terms.submit.sequence_id == f"{DEFAULT_TENANT}/cmpl-1"
    server.run(10)
    report = ask(server)
    assert report.refused_signatures == {reason: 1}
    assert report.service == {}
    assert report.sequences == {}


@pytest.mark.attack
def test_a_signature_is_good_once() -> None:
    server = stand_in()
    text = signed("s1", 5, life="life")
    assert server.add(text).is_verified
    assert not server.add(text, name="cmpl-2").is_verified
    server.run(9)
    server.finish("s1", "stop")
    assert not server.add(text, name="cmpl-3").is_verified
    assert ask(server).refused_signatures == {"replayed": 2}
    # Nor at the server that is started in its place, which remembers none.
    assert not stand_in(life="next life").add(text).is_verified


@pytest.mark.attack
def test_a_request_named_like_a_sequence_is_not_taken_for_it() -> None:
    server = serving(5)
    server.add(None, name="s1")
    server.run(20)
    ask(server, cancels={"s1": "budget"})
    server.run(1)
    assert server.live[f"{DEFAULT_TENANT}/s1"].emitted_tokens == 21
    assert [each.sequence_id for each in server.ended] == ["s1"]


def test_without_a_key_requests_without_a_signature_are_nothing_to_tell(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = stand_in(None)
    server.add(None)
    assert caplog.messages == []
    server.add(signed(), name="cmpl-2")
    assert "FAIRGATE_VLLM_KEY_FILE is not set" in caplog.text


@pytest.mark.attack
def test_the_log_holds_no_key_and_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    server = stand_in()
    for number in range(500):
        server.add(signed(f"s{number}", key=FOREIGN_KEY), name=f"cmpl-{number}")
    ask(server)
    assert len(caplog.messages) < 5
    assert "kkkk" not in caplog.text
    assert "ffff" not in caplog.text


def test_service_is_told_until_it_was_heard_and_once() -> None:
    server = stand_in()
    server.add(signed("s1", 50, weight=2.0))
    server.run(10)
    first = ask(server)
    assert first.service["acme"] == TenantShare(0, 10, dict.fromkeys((0, 1, 2), server.serials["acme"]))
    server.run(5)
    # The first report was lost: the next one tells its service again.
    second = ask(server, life="life", report_from=0)
    assert second.service["acme"].emitted_tokens == 15
    server.run(5)
    third = ask(server, life="life", report_from=second.step)
    assert third.service["acme"].emitted_tokens == 5
    assert third.service["acme"].serials[1] == server.serials["acme"]
    assert ask(server, life="life", report_from=third.step).service == {}


def test_only_what_changed_is_told_again() -> None:
    server = serving(5)
    server.add(signed("s2", 50), name="cmpl-2")
    server.run(9)
    first = ask(server)
    assert set(first.sequences) == {"s1", "s2"}
    server.run(1)
    second = ask(server, life="life", report_from=first.step)
    assert set(second.sequences) == {"s2"}
    assert set(ask(server, life="life", report_from=first.step).sequences) == {"s2"}
    assert set(ask(server, life="another", report_from=second.step).sequences) == {"s1", "s2"}


def test_outcomes_are_told_until_they_are_acknowledged() -> None:
    server = stand_in()
    server.add(signed("s1", 50), max_tokens=3)
    server.run(5)
    first = ask(server)
    second = ask(server, life="life", report_from=first.step)
    assert first.sequences["s1"].outcome == second.sequences["s1"].outcome is not None
    assert ask(server, acknowledges=["s1"]).sequences == {}


def test_a_long_report_is_cut_with_the_outcomes_first() -> None:
    server = stand_in()
    for number in range(MAX_REPORTED_SEQUENCES + 10):
        server.add(signed(f"s{number}", 50), max_tokens=1 if number % 2 else 9, name=f"cmpl-{number}")
    server.run(2)
    found = ask(server).sequences
    assert len(found) == MAX_REPORTED_SEQUENCES
    ended = [each for each in found.values() if each.outcome is not None]
    assert len(ended) == MAX_REPORTED_SEQUENCES // 2 + 5


def test_what_a_report_cuts_off_comes_with_the_next_one() -> None:
    server, count = stand_in(), MAX_REPORTED_SEQUENCES + 10
    for number in range(count):
        server.add(signed(f"s{number}", 50), name=f"cmpl-{number}")
    server.run(2)
    first = ask(server)
    second = ask(server, life="life", report_from=first.step)
    assert len(first.sequences.keys() | second.sequences.keys()) == count
    # All go on: the last ones must not wait for ever behind the first.
    server.run(2)
    told = set(ask(server, life="life", report_from=second.step).sequences)
    server.run(2)
    told |= set(ask(server, life="life", report_from=second.step + 1).sequences)
    assert len(told) == count


def test_the_description_is_told() -> None:
    report = ask(stand_in())
    about = report.about
    assert (about.policy, about.slots, about.places, about.vllm_version) == ("hybrid", 4, 8, "0.0.0")
    assert about.not_supported == ["LoRA"]
    assert report.kv_usage == 0.25
    assert report.life == "life"


def test_the_policy_reaches_the_scheduler_before_its_next_step() -> None:
    server = stand_in()
    report = ask(server, policy=PolicyChoice("vtc"))
    assert (report.about.policy, server.policy) == ("vtc", "hybrid")
    server.run(1)
    assert server.policy == "vtc"
    assert server.desk.about.policy == "vtc"


def test_a_policy_that_does_not_exist_is_refused_with_those_that_do() -> None:
    server = stand_in()
    report = ask(server, policy=PolicyChoice("nonsense"))
    assert "hybrid" in report.policy_refusal
    assert "no option" in ask(server, policy=PolicyChoice("vtc", {"x": 1})).policy_refusal
    assert ask(server, policy=PolicyChoice("vtc")).policy_refusal == ""


def test_a_policy_that_the_scheduler_refuses_does_not_stop_it() -> None:
    server = serving(50)
    ask(server, policy=PolicyChoice("edf"))
    server.run(5)
    assert "does not go with this server" in ask(server).policy_refusal
    assert server.live["s1"].emitted_tokens == 5


def test_what_rests_for_a_silent_gateway_ends_and_its_outcome_stays() -> None:
    server = stand_in(timeout_s=30)
    server.add(signed("rests", 5))
    server.add(signed("runs", 40), name="cmpl-2")
    server.run(20)
    server.run(1, step_s=30.5)
    # It rests; the other one runs on until its lease is used up.
    assert [(each.sequence_id, each.finish, each.emitted_tokens) for each in server.ended] == [
        ("rests", "budget", 5)
    ]
    server.run(60, step_s=0.3)
    assert [(each.sequence_id, each.emitted_tokens) for each in server.ended] == [("rests", 5), ("runs", 40)]
    found = ask(server).sequences
    assert {name: each.emitted_tokens for name, each in found.items()} == {"rests": 5, "runs": 40}


def test_a_gateway_that_speaks_keeps_its_resting_sequences() -> None:
    server = serving(5, timeout_s=30)
    for _ in range(20):
        server.run(10, step_s=1.0)
        ask(server)
    assert server.ended == []


def test_outcomes_of_a_dead_gateway_go_to_the_one_that_adopts_them() -> None:
    server = serving(5, timeout_s=30)
    server.add(signed("s2", 500), name="cmpl-2", max_tokens=1000)
    server.run(10)
    assert set(ask(server, "heir", adopt=True).sequences) == set()
    server.run(1, step_s=31)
    ask(server, "heir")
    assert ask(server, "heir", adopt=True).sequences.keys() >= {"s1"}
    server.run(1)
    report = ask(server, "heir")
    outcomes = {name: each.outcome for name, each in report.sequences.items()}
    assert {name: each and (each.finish, each.emitted_tokens) for name, each in outcomes.items()} == {
        "s1": ("budget", 5),
        "s2": ("cancelled", 11),
    }
    assert report.gateways == ["heir"]
    assert ask(server, "heir", acknowledges=["s1", "s2"]).sequences == {}


def test_a_new_life_of_a_gateway_ends_and_inherits_what_the_last_one_left() -> None:
    server = stand_in()
    server.add(signed("s1", 50, session="a"))
    server.run(7)
    before = server.words_begun
    ask(server, session="b")
    server.run(1)
    assert server.words_begun == before + 1
    assert end_of(ask(server, session="b")) == ("cancelled", 7)
    with pytest.raises(ChannelRefused, match="id of its own"):
        ask(server, session="a")
    assert not server.add(signed("s2", session="a"), name="cmpl-2").is_verified


@pytest.mark.attack
def test_an_exchange_is_good_once() -> None:
    server = stand_in()
    said = exchange(policy=PolicyChoice("vtc"))
    server.desk.exchange(said, server.now_s)
    with pytest.raises(ChannelRefused, match="sent before"):
        server.desk.exchange(said, server.now_s)


@pytest.mark.attack
def test_a_sequence_runs_once_at_a_time() -> None:
    """Signed anew while it runs: there is one count of its tokens."""
    server = stand_in()
    assert server.add(signed("s1", 5, request_id="r1")).is_verified
    assert not server.add(signed("s1", 5, issued_at_s=WALL_S + 1), name="cmpl-2").is_verified


@pytest.mark.attack
def test_gateways_are_bounded() -> None:
    server = stand_in(timeout_s=30)
    for number in range(64):
        ask(server, f"gw-{number}")
    with pytest.raises(ChannelRefused, match="takes no more"):
        ask(server, "one-more")
    server.now_s += 31
    assert ask(server, "one-more").step > 0
