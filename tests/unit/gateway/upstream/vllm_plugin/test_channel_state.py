"""What is said to a plug-in until it is confirmed, and what follows from what it reports."""

from __future__ import annotations

from typing import Any

from engine.messages import SequenceOutcome, Submit
from engine.vllm_plugin.protocol import (
    MAX_REPORTED_SEQUENCES,
    About,
    PluginReport,
    PolicyChoice,
    SequenceNews,
)
from gateway.upstream.vllm_plugin.channel_state import CANCEL_TIMES, MAX_KEPT, ChannelState

NONCE = "0123456789abcdef"


def submit(name: str = "s", lease: int = 16, **fields: Any) -> Submit:
    return Submit(name, f"request of {name}", "ten", [1, 2], 200, lease, **fields)


def outcome(wire_id: str, emitted: int = 5) -> SequenceOutcome:
    return SequenceOutcome(wire_id, "r", "ten", "cancelled", 2, 0, 2, emitted)


def ended(wire_id: str) -> SequenceNews:
    return SequenceNews("ended", 5, 16, "r", "ten", outcome=outcome(wire_id))


class Talk:
    """A state, and the exchanges with it."""

    def __init__(self, *names: str) -> None:
        """These sequences have begun."""
        self.state = ChannelState("gw", "life-1")
        self.step = 0
        for name in names:
            self.state.begin(submit(name), 1.0)

    def exchange(self, life: str = "server-1", **fields: Any) -> Any:
        """One exchange that is answered; returns what was said."""
        said = self.state.exchange(NONCE, 1.0)
        self.step += 1
        about = About("1", "0.32.0", "hybrid")
        self.state.heard(said, PluginReport(nonce=NONCE, life=life, about=about, step=self.step, **fields))
        return said


def test_claims_are_those_of_the_sequence_and_each_attempt_has_an_id_of_its_own() -> None:
    state = ChannelState("gw", "life-1")
    asked = submit(weight=3.0, tier=0, counter=9, had=7, heard=5, is_owed=True, ttft_target_s=0.5, index=2)
    claims = state.begin(asked, 12.0)
    assert (claims.gateway_id, claims.session, claims.issued_at_s) == ("gw", "life-1", 12.0)
    assert (claims.sequence_id, claims.request_id, claims.tenant_id) == ("s", "request of s", "ten")
    assert (claims.weight, claims.tier, claims.lease_tokens, claims.ttft_target_s) == (3.0, 0, 16, 0.5)
    assert (claims.counter, claims.had, claims.heard, claims.is_owed) == (9, 7, 5, True)
    assert claims.index == 2
    state.over("s", has_outcome=False)
    assert state.begin(asked, 13.0).sequence_id == "s~1"
    assert state.exchange(NONCE, 1.0).cancels == {"s": "cancelled"}


def test_claims_are_good_at_the_server_that_was_heard_alone() -> None:
    talk = Talk()
    assert talk.state.begin(submit(), 1.0).life == ""
    talk.exchange("server-1")
    assert talk.state.begin(submit(), 1.0).life == "server-1"
    talk.exchange("server-2")
    assert talk.state.begin(submit(), 1.0).life == "server-2"


def test_a_lease_is_said_until_a_report_shows_it() -> None:
    talk = Talk("s")
    assert talk.exchange().top_ups == {}, "it came with the request"
    assert talk.state.top_up("s", 40)
    assert not talk.state.top_up("s", 40)
    assert not talk.state.top_up("another", 40)
    assert talk.exchange().top_ups == {"s": 40}
    assert talk.exchange(sequences={"s": SequenceNews("running", 20, 16)}).top_ups == {"s": 40}
    assert talk.exchange(sequences={"s": SequenceNews("running", 21, 40)}).top_ups == {"s": 40}
    assert talk.exchange().top_ups == {}
    assert talk.state.news("s").state == "running"
    assert not talk.state.top_up("s", 30), "it never shrinks"


def test_a_lost_exchange_changes_nothing() -> None:
    talk = Talk("s")
    talk.state.top_up("s", 40)
    talk.state.begin(submit("before"), 1.0)
    talk.state.over("before", has_outcome=True)
    talk.state.acknowledge(["before"])
    talk.state.set_policy(PolicyChoice("vtc"))
    first, again = talk.state.exchange(NONCE, 1.0), talk.state.exchange(NONCE, 1.0)
    assert (again.top_ups, again.acknowledges, again.policy) == (
        first.top_ups, first.acknowledges, first.policy
    )  # fmt: skip
    assert again.top_ups == {"s": 40}
    assert talk.state.has_to_say
    talk.exchange()
    said = talk.state.exchange(NONCE, 1.0)
    assert (said.acknowledges, said.policy) == ([], None)


def test_a_cancel_is_said_until_its_sequence_has_ended_and_not_for_ever() -> None:
    talk = Talk("s")
    talk.state.cancel("s", "budget")
    talk.state.cancel("s", "cancelled")
    assert talk.exchange().cancels == {"s": "budget"}, "the first cause holds"
    assert talk.exchange(sequences={"s": ended("s")}).cancels == {"s": "budget"}
    assert talk.exchange().cancels == {}
    talk.state.cancel("of an earlier life", "cancelled")
    assert [bool(talk.exchange().cancels) for _ in range(CANCEL_TIMES + 1)] == [True] * CANCEL_TIMES + [False]


def test_outcomes_that_nothing_reads_are_orphans_until_they_are_acknowledged() -> None:
    talk = Talk("read", "lost")
    talk.state.over("read", has_outcome=True)
    talk.state.over("lost", has_outcome=False)
    talk.exchange(sequences={name: ended(name) for name in ("read", "lost", "earlier")})
    assert {each.sequence_id for each in talk.state.orphans()} == {"lost", "earlier"}
    found = talk.state.inventory("vllm-a", [])
    assert {each.sequence_id for each in found.outcomes} == {"read", "lost", "earlier"}
    talk.state.acknowledge(["read", "lost", "earlier"])
    assert (talk.state.orphans(), talk.state.inventory("vllm-a", []).outcomes) == ([], [])
    assert set(talk.exchange().acknowledges) == {"read", "lost", "earlier"}


def test_an_outcome_that_comes_after_its_acknowledgement_is_acknowledged_again() -> None:
    talk = Talk("s")
    talk.state.over("s", has_outcome=True)
    talk.state.acknowledge(["s"])
    assert talk.exchange().acknowledges == ["s"]
    talk.exchange(sequences={"s": ended("s")})
    assert talk.state.orphans() == []
    assert talk.exchange().acknowledges == ["s"]
    assert talk.exchange().acknowledges == []


def test_every_attempt_is_acknowledged() -> None:
    talk = Talk("s")
    talk.state.over("s", has_outcome=False)
    talk.state.begin(submit(), 1.0)
    talk.state.over("s", has_outcome=True)
    talk.state.acknowledge(["s"])
    assert set(talk.exchange().acknowledges) == {"s", "s~1"}


def test_sequences_of_an_earlier_life_are_in_the_inventory_and_can_be_ended() -> None:
    talk = Talk("mine")
    left = SequenceNews("parked", 7, 7, "old request", "ten", 2)
    talk.exchange(sequences={"mine": SequenceNews("running", 1, 16), "old": left}, gateways=["gw", "other"])
    found = talk.state.inventory("vllm-a", [])
    assert [(each.sequence_id, each.request_id, each.tier) for each in found.running] == [
        ("old", "old request", 2)
    ]
    assert found.gateways == ["gw", "other"]
    talk.state.cancel("old", "cancelled")
    assert talk.exchange().cancels == {"old": "cancelled"}


def test_another_life_of_the_server_knows_nothing_and_gets_the_policy_again() -> None:
    talk = Talk()
    talk.state.set_policy(PolicyChoice("vtc", {"slots": 16}))
    assert talk.exchange().policy == PolicyChoice("vtc", {"slots": 16})
    talk.exchange(sequences={"old": ended("old")})
    assert talk.exchange().policy is None
    talk.exchange(life="server-2")
    assert talk.state.orphans() == []
    said = talk.exchange(life="server-2")
    assert (said.policy, said.life) == (PolicyChoice("vtc", {"slots": 16}), "server-2")
    assert talk.exchange(life="server-2").policy is None


def test_a_refused_policy_is_told_until_another_is_set() -> None:
    talk = Talk()
    talk.state.set_policy(PolicyChoice("static"))
    talk.exchange(policy_refusal="no place for it")
    assert talk.state.policy_refusal == "no place for it"
    talk.state.set_policy(PolicyChoice("vtc"))
    assert talk.exchange().policy == PolicyChoice("vtc")
    assert talk.state.policy_refusal == ""


def test_what_another_replica_ran_is_not_acknowledged_here() -> None:
    """Every request of a pool is acknowledged at all of its replicas: at one that is away it would gather."""
    talk = Talk()
    for number in range(100):
        talk.state.acknowledge([f"elsewhere {number}"])
    assert not talk.state.has_to_say
    assert talk.exchange(sequences={"left": ended("left")}).acknowledges == []
    talk.state.acknowledge(["left"])
    talk.state.begin(submit(), 1.0)
    talk.state.over("s", has_outcome=True)
    talk.state.acknowledge(["s"])
    assert talk.exchange().acknowledges == ["left", "s"]


def test_a_report_that_is_full_may_have_left_outcomes_out() -> None:
    talk = Talk()
    talk.exchange(sequences={f"s{number}": ended(f"s{number}") for number in range(MAX_REPORTED_SEQUENCES)})
    assert talk.state.inventory("a", []).is_partial
    talk.exchange(sequences={"s": ended("s")})
    assert not talk.state.inventory("a", []).is_partial


def test_a_report_on_its_way_during_the_acknowledgement_leaves_nothing_behind() -> None:
    """It says that the sequence runs, and none after it speaks of it: recovery would wait for its end."""
    talk = Talk("s")
    asked = talk.state.exchange(NONCE, 1.0)
    talk.state.over("s", has_outcome=True)
    talk.state.acknowledge(["s"])
    late = {"s": SequenceNews("running", 5, 16, "r", "ten")}
    about = About("1", "0.32.0", "hybrid")
    talk.state.heard(asked, PluginReport(nonce=NONCE, life="server-1", about=about, step=1, sequences=late))
    assert talk.exchange().acknowledges == ["s"]
    for number in range(MAX_KEPT):
        talk.state.begin(submit(f"t{number}"), 1.0)
        talk.state.over(f"t{number}", has_outcome=True)
        talk.state.acknowledge([f"t{number}"])
    assert talk.state.inventory("a", []).running == []
