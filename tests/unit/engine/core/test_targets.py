"""Targets that come with a sequence decide in the engine. The core on virtual time."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.core import EngineConfig
from engine.messages import StepTime, Submit
from engine.scheduling.compose.slack import DeadlineSlack
from engine.scheduling.options import PolicyOptions
from engine.scheduling.policy import make_policy
from engine.virtual.replica import VirtualReplica
from tests.support import builders

STEP_TIME = StepTime(0.010, 0.001, 0.0, 0.0, samples=0, relative_error=0.0)
"""10 ms a step and 1 ms a token."""


def replica(policy: str, **config: Any) -> VirtualReplica:
    made = EngineConfig(policy=policy, **({"max_batched_tokens": 64, "max_sequences": 4} | config))
    return VirtualReplica(made, num_blocks=256, block_tokens=4, step_time=STEP_TIME)


def submit(name: str, *, tenant: str = "a", prompt: int = 4, max_tokens: int = 4, **targets: Any) -> Submit:
    return builders.submit(
        name, tenant_id=tenant, prompt_token_ids=[5] * prompt, max_tokens=max_tokens, **targets
    )


def admitted(engine: VirtualReplica) -> list[str]:
    """All that was submitted, in the order in which it got a place."""
    while engine.core.has_work():
        engine.step()
    decisions = engine.core.explain().decisions
    return [each.sequence_id for each in decisions if each.kind == "admit"]


@pytest.mark.parametrize("policy", ["edf", "priority"])
def test_places_go_by_promises_between_tenants_and_by_words_inside_one(policy: str) -> None:
    engine = replica(policy, max_sequences=1)
    for each in (
        submit("a promised 5 s", tenant="a", deadline_in_s=5.0),
        submit("b promised 10 s", tenant="b", deadline_in_s=10.0),
        submit("a asks for 1 s", tenant="a", deadline_in_s=20.0, own_deadline_in_s=1.0),
        submit("c asks for 0 s", tenant="c", deadline_in_s=22.0, own_deadline_in_s=0.0),
    ):
        assert engine.submit(each) is None
    assert admitted(engine) == ["a asks for 1 s", "b promised 10 s", "a promised 5 s", "c asks for 0 s"]


@pytest.mark.parametrize("policy", ["edf", "priority"])
def test_without_targets_places_go_by_arrival(policy: str) -> None:
    engine = replica(policy, max_sequences=1)
    for number, tenant in enumerate("abac"):
        assert engine.submit(submit(str(number), tenant=tenant)) is None
    assert admitted(engine) == ["0", "1", "2", "3"]


def first_token_s(**targets: Any) -> tuple[float, DeadlineSlack]:
    """When a prompt of 200 tokens beside three answers has its first token; and the composition."""
    engine = replica("vtc")
    policy = make_policy("vtc", PolicyOptions(compose="slack"))
    engine.core.table.set_policy(policy)
    for number in range(3):
        answer = submit(str(number), max_tokens=200, tpot_target_s=targets.get("tpot_target_s", 0.0))
        assert engine.submit(answer) is None
    for _ in range(30):
        engine.step()
    began_s = engine.clock.now_s
    ttft_s = targets.get("ttft_target_s", 0.0)
    assert engine.submit(submit("prompt", tenant="b", prompt=200, ttft_target_s=ttft_s)) is None
    while True:
        for delta in engine.step().deltas.get("virtual", ()):
            if delta.sequence_id == "prompt" and delta.token_ids:
                assert isinstance(policy.compose, DeadlineSlack)
                return engine.clock.now_s - began_s, policy.compose


def test_sequences_ahead_of_their_pace_lend_tokens_to_a_prompt_with_a_target() -> None:
    plain_s, plain = first_token_s()
    assert (plain.lent_tokens, plain.urgent_steps) == (0, 0)
    with_targets_s, slack = first_token_s(ttft_target_s=0.2, tpot_target_s=0.5)
    assert slack.urgent_steps > 0
    assert slack.lent_tokens == 3 * slack.urgent_steps, "all three answers are ahead"
    assert with_targets_s < plain_s


@pytest.mark.parametrize("targets", [{"ttft_target_s": 0.2}, {"tpot_target_s": 0.5}])
def test_without_the_other_target_nothing_is_lent(targets: dict[str, float]) -> None:
    assert first_token_s(**targets)[1].lent_tokens == 0
