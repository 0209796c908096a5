"""From a submission to its outcome: tokens, text, leases, cancels, failures and moves, on virtual time."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import pytest
from msgspec import structs

from engine.core.core import EngineConfig, EngineCore
from engine.core.model_runner import Sampled, StepWork
from engine.entry import COUNTER_SCALE
from engine.messages import (
    Delta,
    EngineKnobs,
    SamplingParams,
    SequenceState,
    StepTime,
    Submit,
    decode_event,
    encode,
)
from engine.scheduling.options import PolicyOptions
from engine.scheduling.policy import DEFAULT_POLICY, UnknownPolicy
from engine.virtual.replica import (
    EOS_TOKEN_ID,
    VOCABULARY,
    VirtualClock,
    VirtualReplica,
    VirtualRunner,
    VirtualText,
    VirtualTexts,
)
from tests.support import builders
from tests.support.builders import set_counter

LETTERS = SamplingParams()


def make_submit(name: str = "s", **changes: Any) -> Submit:
    values = {"request_id": f"request of {name}", "tenant_id": "tenant", "max_tokens": 6}
    return builders.submit(name, **(values | changes))


def make_replica(**changes: object) -> VirtualReplica:
    config = EngineConfig(max_batched_tokens=16, max_sequences=4)
    values: dict[str, object] = {"num_blocks": 24, "block_tokens": 4, "audit": True}
    return VirtualReplica(config, **{**values, **changes})  # type: ignore[arg-type]


def step(replica: VirtualReplica) -> list[Delta]:
    result = replica.step()
    replica.core.check()
    return [delta for deltas in result.deltas.values() for delta in deltas]


def run(replica: VirtualReplica) -> list[Delta]:
    deltas: list[Delta] = []
    while replica.core.has_work():
        deltas += step(replica)
    return deltas


def of(name: str, deltas: list[Delta]) -> list[Delta]:
    return [delta for delta in deltas if delta.sequence_id == name]


def tokens(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def answer(output_tokens: int | None = None, **fields: Any) -> list[Delta]:
    """All of one sequence that nothing interrupts."""
    replica = make_replica()
    replica.submit(make_submit(**fields), output_tokens=output_tokens)
    return run(replica)


def exported(replica: VirtualReplica) -> SequenceState:
    state = replica.core.export("s")
    assert state is not None
    return state


def letters(token_ids: SequenceOf[int]) -> str:
    return "".join(VirtualText(()).logprob_text(token) for token in token_ids)


# ---------------------------------------------------------------- tokens and text


def test_an_answer_ends_with_its_eos_which_counts_and_has_no_text() -> None:
    deltas = answer(output_tokens=4)
    emitted = tokens(deltas)
    assert len(emitted) == 4
    assert emitted[-1] == EOS_TOKEN_ID
    assert text(deltas) == letters(emitted[:-1])
    outcome = deltas[-1].outcome
    assert outcome is not None
    assert (outcome.finish, outcome.emitted_tokens, outcome.computed_tokens) == ("stop", 4, 3)
    assert all(delta.outcome is None for delta in deltas[:-1])


def test_an_answer_ends_at_max_tokens() -> None:
    deltas = answer()
    assert len(tokens(deltas)) == 6
    assert text(deltas) == letters(tokens(deltas))
    assert deltas[-1].outcome is not None
    assert deltas[-1].outcome.finish == "length"


def test_token_k_is_sent_once_and_says_which_it_is() -> None:
    next_index = 0
    for delta in answer():
        assert delta.first_index == next_index
        next_index += len(delta.token_ids)
    assert next_index == 6


def test_an_ignored_eos_is_a_token_like_any_other() -> None:
    deltas = answer(output_tokens=2, sampling=SamplingParams(ignore_eos=True))
    assert len(tokens(deltas)) == 6
    assert text(deltas) == letters(tokens(deltas))


def test_a_stop_string_stops_the_very_step_and_is_not_shown() -> None:
    whole = text(answer(max_tokens=12))
    stop = whole[4:6]
    before = whole[: whole.index(stop)]
    deltas = answer(max_tokens=12, sampling=SamplingParams(stop=(stop,)))
    assert text(deltas) == before
    assert len(tokens(deltas)) == len(before) + len(stop)
    assert deltas[-1].outcome is not None
    assert deltas[-1].outcome.finish == "stop"


def test_text_that_may_become_a_stop_string_is_held_back_and_shown_at_the_end() -> None:
    whole = text(answer())
    deltas = answer(sampling=SamplingParams(stop=(whole[-1] + "§",)))
    assert text(deltas) == whole
    assert deltas[-1].text.endswith(whole[-1])


def test_logprobs_come_with_their_tokens() -> None:
    deltas = answer(sampling=SamplingParams(logprobs=0))
    reported = [each for delta in deltas for each in delta.logprobs]
    assert [each.token_id for each in reported] == tokens(deltas)
    assert [each.text for each in reported] == list(letters(tokens(deltas)))


def test_times_are_counted_from_the_submission() -> None:
    replica = make_replica()
    replica.clock.advance(100.0)
    replica.submit(make_submit("first", prompt_token_ids=[1] * 40, max_tokens=2))
    step(replica)
    replica.clock.advance(5.0)
    replica.submit(make_submit("second"))
    outcome = run(replica)[-1].outcome
    assert outcome is not None
    assert outcome.sequence_id == "second"
    assert outcome.scheduled_s is not None
    assert outcome.first_token_s is not None
    assert 0 <= outcome.scheduled_s < outcome.first_token_s < outcome.finished_s < 1.0


def test_deltas_go_to_the_gateway_that_submitted() -> None:
    replica = make_replica()
    replica.submit(make_submit("a"), gateway_id="one")
    replica.submit(make_submit("b"), gateway_id="two")
    result = replica.step()
    assert {
        gateway: [delta.sequence_id for delta in deltas] for gateway, deltas in result.deltas.items()
    } == {"one": ["a"], "two": ["b"]}


def test_service_names_what_each_tenant_got_in_the_step() -> None:
    replica = make_replica()
    replica.submit(make_submit("a", tenant_id="x"))
    replica.submit(make_submit("b", tenant_id="x", prompt_token_ids=[1] * 20))
    result = replica.step()
    assert {tenant: (had.computed_tokens, had.emitted_tokens) for tenant, had in result.service.items()} == {
        "x": (16, 1)
    }
    run(replica)
    total = replica.core.snapshot("e").service["x"]
    assert (total.computed_tokens, total.emitted_tokens) == (23, 12)


# ---------------------------------------------------------------- leases


def test_no_token_is_emitted_beyond_the_lease() -> None:
    replica = make_replica()
    replica.submit(make_submit(lease_tokens=2))
    deltas = run(replica)
    assert len(tokens(deltas)) == 2
    assert [live.state for live in replica.core.running()] == ["paused"]
    assert replica.core.top_up("s", 4)
    deltas += run(replica)
    assert len(tokens(deltas)) == 4
    assert replica.core.top_up("s", 6)
    deltas += run(replica)
    assert tokens(deltas) == tokens(answer())
    assert deltas[-1].outcome is not None


def test_a_top_up_of_a_stranger_is_harmless() -> None:
    assert make_replica().core.top_up("unknown", 5) is False


# ---------------------------------------------------------------- cancel


@pytest.mark.parametrize("state", ["waiting", "prefilling", "running", "paused", "preempted"])
@pytest.mark.parametrize("cause", ["cancelled", "expired", "budget", "failed"])
def test_a_cancel_frees_everything_at_once_and_the_outcome_follows(state: str, cause: str) -> None:
    replica = make_replica(num_blocks=8)
    prompt = [1] * (20 if state == "prefilling" else 12)
    lease = 2 if state in ("paused", "preempted") else 6
    replica.submit(make_submit(prompt_token_ids=prompt, lease_tokens=lease, trace_context="00-abc"))
    if state != "waiting":
        step(replica)
        step(replica) if lease == 2 else None
    if state == "preempted":
        replica.submit(make_submit("big", prompt_token_ids=[2] * 24, max_tokens=1, lease_tokens=1))
        run(replica)
    (live,) = replica.core.running()
    assert live.state == ("running" if state == "prefilling" else state)
    emitted = live.emitted_tokens
    assert replica.core.cancel("s", cause)
    replica.core.check()
    assert replica.core.table.pool.num_free == 8
    assert replica.core.running() == []
    assert replica.core.has_work(), "there is an outcome to hand out"
    (delta,) = step(replica)
    assert delta.token_ids == []
    assert delta.outcome is not None
    assert (delta.outcome.finish, delta.outcome.emitted_tokens) == (cause, emitted)
    assert delta.outcome.trace_context == "00-abc"
    assert not replica.core.has_work()
    assert replica.core.cancel("s", cause) is False


def test_an_unknown_cause_is_a_cancel() -> None:
    replica = make_replica()
    replica.submit(make_submit())
    replica.core.cancel("s", "because")
    assert step(replica)[0].outcome.finish == "cancelled"  # type: ignore[union-attr]


# ---------------------------------------------------------------- failure


class FailingRunner(VirtualRunner):
    """A device that fails in given steps."""

    failing = False

    def launch(self, work: StepWork) -> list[Sampled | None]:
        if self.failing:
            raise RuntimeError("CUDA error: an illegal memory access was encountered at 0xdeadbeef")
        return super().launch(work)


def failing_core() -> tuple[EngineCore, FailingRunner]:
    clock = VirtualClock()
    runner = FailingRunner(clock, num_blocks=16, block_tokens=4)
    config = EngineConfig(max_batched_tokens=8, max_sequences=2)
    return EngineCore(runner, VirtualTexts(), config, clock), runner


def test_a_failed_step_fails_its_sequences_and_the_engine_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    core, runner = failing_core()
    for name in ("a", "b", "c"):
        core.submit(make_submit(name, tenant_id=name), "g")
    core.step()
    charged = core.counters.values()
    runner.failing = True
    result = core.step()
    core.check()
    ended = {delta.sequence_id: delta.outcome for delta in result.deltas["g"] if delta.outcome}
    assert set(ended) == {"a", "b"}
    for outcome in ended.values():
        assert outcome.finish == "failed"
        assert outcome.message == "the engine failed while computing a step"
        assert "CUDA" not in outcome.message
    assert core.counters.values() == charged, "what was not computed is not charged"
    assert "illegal memory access" in caplog.text
    assert core.table.pool.num_free == 16
    runner.failing = False
    rest = []
    while core.has_work():
        rest += core.step().deltas.get("g", [])
    assert [delta.sequence_id for delta in rest if delta.outcome] == ["c"]
    assert rest[-1].outcome.finish == "length"  # type: ignore[union-attr]


def test_a_failed_prefill_gives_its_charge_back() -> None:
    core, runner = failing_core()
    core.submit(make_submit(prompt_token_ids=[1] * 20), "g")
    core.step()
    assert core.counters.value("tenant") == 20 * COUNTER_SCALE, "the whole prompt, when it starts"
    runner.failing = True
    outcome = core.step().deltas["g"][-1].outcome
    assert outcome is not None
    assert outcome.computed_tokens == 8
    assert core.counters.value("tenant") == 8 * COUNTER_SCALE


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "code", "names"),
    [
        ({"prompt_token_ids": []}, "invalid_request", "prompt_token_ids"),
        ({"prompt_token_ids": [1, 1024]}, "invalid_request", "between 0 and 1023"),
        ({"prompt_token_ids": [-1]}, "invalid_request", "prompt_token_ids"),
        ({"max_tokens": 0}, "invalid_request", "max_tokens"),
        ({"lease_tokens": 0}, "invalid_request", "lease_tokens"),
        ({"weight": 0.0}, "invalid_request", "weight"),
        ({"weight": float("inf")}, "invalid_request", "weight"),
        ({"weight": float("nan")}, "invalid_request", "weight"),
        ({"tier": -1}, "invalid_request", "tier"),
        ({"prompt_token_ids": [1] * 150, "max_tokens": 51}, "context_length_exceeded", "context is 200"),
        ({"prompt_token_ids": [1] * 60, "max_tokens": 38}, "too_large", "holds 96 tokens"),
        ({"sequence_id": "known"}, "duplicate_sequence", "'known' exists already"),
    ],
)
def test_what_can_never_run_is_refused_at_the_door(changes: dict[str, object], code: str, names: str) -> None:
    replica = make_replica(context_tokens=200)
    assert replica.submit(make_submit("known")) is None
    refused = replica.core.submit(make_submit(**changes), "g")
    assert refused is not None
    assert refused.code == code
    assert names in refused.message
    assert len(replica.core.running()) == 1
    replica.core.check()


def test_what_just_fits_runs() -> None:
    replica = make_replica(context_tokens=200)
    assert replica.submit(make_submit(prompt_token_ids=[1] * 60, max_tokens=37, lease_tokens=37)) is None
    assert len(tokens(run(replica))) == 37


def test_a_full_queue_refuses() -> None:
    replica = VirtualReplica(EngineConfig(max_waiting=2), num_blocks=16, block_tokens=4)
    assert replica.submit(make_submit("a")) is None
    assert replica.submit(make_submit("b")) is None
    refused = replica.submit(make_submit("c"))
    assert refused is not None
    assert refused.code == "engine_full"


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"policy": "best"}, "no policy 'best'"),
        ({"max_batched_tokens": 0}, "max_batched_tokens"),
        ({"max_sequences": 0}, "max_sequences"),
        ({"max_waiting": 0}, "max_waiting"),
        ({"policy": "fcfs", "max_sequences": 600}, "every running sequence needs a token"),
        ({"watermark_permille": 501}, "watermark_permille"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_named(changes: dict[str, object], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        EngineConfig(**changes)  # type: ignore[arg-type]


# ---------------------------------------------------------------- counters and policy


def test_a_gateway_has_charged_ahead_so_that_no_token_counts_twice() -> None:
    replica = make_replica()
    replica.submit(make_submit(counter=500 * COUNTER_SCALE, had=40 * COUNTER_SCALE))
    assert replica.core.counters.value("tenant") == 500 * COUNTER_SCALE
    step(replica)
    assert replica.core.counters.value("tenant") == 500 * COUNTER_SCALE, "the queue goes by what is charged"
    had = replica.core.table.standings.value(1, "tenant")
    assert had == (40 + 3 + 2) * COUNTER_SCALE, "the steps go by what was had"
    set_counter(replica.core.table, "tenant", 80)
    assert replica.core.counters.value("tenant") == 80, "an owner may also correct downwards"


def test_what_was_reported_is_not_added_to_a_word_that_contains_it() -> None:
    replica = make_replica()
    replica.submit(make_submit(counter=90 * COUNTER_SCALE, had=10 * COUNTER_SCALE))
    shares = replica.step().shares["tenant"]
    assert shares.serials == dict.fromkeys(range(3), 5 * COUNTER_SCALE), "three prompt tokens and one emitted"
    replica.step()
    replica.submit(
        make_submit("next", counter=95 * COUNTER_SCALE, had=15 * COUNTER_SCALE, heard=shares.serials[1])
    )
    had = replica.core.table.standings.value(1, "tenant")
    assert had == (15 + 2) * COUNTER_SCALE, "the second step's token alone comes on top"


def test_service_is_told_by_gateway_and_serials_to_all() -> None:
    replica = make_replica()
    replica.submit(make_submit("a", counter=1, had=1), gateway_id="g1")
    replica.submit(make_submit("b", counter=1, had=1), gateway_id="g2")
    share = replica.step().shares["tenant"]
    assert {name: (each.computed_tokens, each.emitted_tokens) for name, each in share.by_gateway.items()} == {
        "g1": (3, 1),
        "g2": (3, 1),
    }
    assert share.serials == dict.fromkeys(range(3), 10 * COUNTER_SCALE)


def test_the_last_steps_are_explained_with_their_tokens_by_tenant() -> None:
    replica = make_replica()
    replica.submit(make_submit("a", tenant_id="x"))
    replica.submit(make_submit("b", tenant_id="y", prompt_token_ids=[1] * 20))
    for _ in range(3):
        replica.step()
    explained = replica.core.explain(steps=2)
    assert decode_event(encode(explained)) == explained
    assert [record.step for record in explained.steps] == [2, 3]
    second, third = explained.steps
    assert second.decodes == {"x": 1}
    assert second.prompts["y"] > 0
    assert third.decodes == {"x": 1, "y": 1}
    assert third.left_tokens == 14
    assert replica.core.explain().steps == []


def test_a_gateways_counters_decide_who_is_next() -> None:
    replica = VirtualReplica(EngineConfig(max_sequences=1), num_blocks=16, block_tokens=4)
    for name, counter in (("runs", 1), ("much", 900), ("little", 7)):
        replica.submit(make_submit(name, tenant_id=name, counter=counter))
    ended = [delta.sequence_id for delta in run(replica) if delta.outcome]
    assert ended == ["runs", "little", "much"]


def test_the_policy_can_be_changed_by_name() -> None:
    replica = make_replica()
    assert replica.core.policy == DEFAULT_POLICY
    replica.core.set_policy("fcfs", PolicyOptions(slots=7, max_displacements=1))
    assert replica.core.policy == "fcfs"
    assert replica.core.explain().options == {"slots": 7, "max_displacements": 1}
    assert replica.core.table.policy.options.max_displacements == 1
    with pytest.raises(UnknownPolicy, match=r"no policy .lottery.; there are"):
        replica.core.set_policy("lottery")
    assert replica.core.policy == "fcfs"
    replica.core.set_policy("sjf")
    assert replica.core.explain().options == {"slots": 7, "max_displacements": 1}, "the options stay"


def test_a_policy_that_does_not_go_with_the_sizes_is_refused() -> None:
    config = EngineConfig("vtc", PolicyOptions(compose="slack"), max_sequences=64, max_batched_tokens=32)
    replica = VirtualReplica(config, num_blocks=16, block_tokens=4)
    with pytest.raises(ValueError, match="every running sequence needs a token of each step"):
        replica.core.set_policy("vtc", PolicyOptions(compose="decode-first"))
    assert replica.core.explain().choices["compose"] == "slack"


def test_a_token_budget_makes_chunks_smaller_but_leaves_a_token_for_everybody() -> None:
    replica = make_replica()
    replica.submit(make_submit(prompt_token_ids=list(range(1, 61)), max_tokens=2, lease_tokens=2))
    computed = []
    for share in (0.5, 0.01, 1.0):
        replica.core.set_knobs(EngineKnobs(token_share=share))
        computed.append(replica.step().num_tokens)
    assert computed == [8, 4, 16], "of 16 tokens and 4 sequences"
    for share in (0.0, -1.0, 1.01, float("nan")):
        with pytest.raises(ValueError, match="above 0 and at most 1"):
            replica.core.set_knobs(EngineKnobs(token_share=share))


def test_knobs_outlast_a_change_of_the_policy_and_a_bad_one_changes_nothing() -> None:
    replica = make_replica()
    replica.core.set_knobs(EngineKnobs(token_share=0.5, slot_share=0.5, reserve_permille=100))
    replica.core.set_policy("hybrid", PolicyOptions(cap_tokens=8))
    compose: Any = replica.core.table.policy.compose
    admit: Any = replica.core.table.policy.admit
    assert (compose.slots, compose.cap_tokens, admit.permille) == (2, 8, 100)
    with pytest.raises(ValueError, match="reserve_permille"):
        replica.core.set_knobs(EngineKnobs(reserve_permille=-1))
    assert (replica.core.table.max_batched_tokens, admit.permille) == (8, 100)
    assert replica.core.explain().options == {
        "cap_tokens": 8, "max_num_partial_prefills": 4, "target_step_s": 0.2, "small_lane_permille": 75,
    }, "what the policy says, without the knobs"  # fmt: skip
    replica.core.set_knobs(EngineKnobs())
    assert (replica.core.table.max_batched_tokens, compose.slots) == (16, 0)


# ---------------------------------------------------------------- learning and load


def test_the_step_time_is_learned() -> None:
    replica = make_replica()
    for number in range(12):
        replica.submit(make_submit(f"s{number}", prompt_token_ids=[1] * (3 + number)))
    run(replica)
    step_time = replica.core.snapshot("e").step_time
    assert step_time.samples > 10
    assert step_time.relative_error < 0.05


def test_a_snapshot_tells_the_load() -> None:
    replica = make_replica()
    for number in range(6):
        replica.submit(make_submit(f"s{number}"))
    step(replica)
    step(replica)
    snapshot = replica.core.snapshot("e1")
    assert (len(snapshot.running), len(snapshot.waiting)) == (4, 2)
    assert snapshot.free_blocks + snapshot.cached_blocks + snapshot.referenced_blocks == 24
    assert snapshot.referenced_blocks == 4
    assert [live.emitted_tokens for live in snapshot.running] == [2, 2, 2, 2]
    assert decode_event(encode(snapshot)) == snapshot


def test_without_work_a_step_does_nothing() -> None:
    replica = make_replica()
    assert not replica.core.has_work()
    result = replica.step()
    assert (result.deltas, result.service, result.num_tokens, replica.clock.now_s) == ({}, {}, 0, 0.0)


# ---------------------------------------------------------------- export and import


def moved(state: SequenceState) -> SequenceState:
    """Through the wire."""
    from engine.messages import Exported

    answer = decode_event(encode(Exported(state.submit.sequence_id, state)))
    assert isinstance(answer, Exported)
    assert answer.state is not None
    return answer.state


@pytest.mark.parametrize("steps", range(7))
@pytest.mark.parametrize("keep_kv", [True, False])
def test_an_exported_sequence_goes_on_elsewhere_token_for_token(steps: int, keep_kv: bool) -> None:
    submit = make_submit(prompt_token_ids=list(range(1, 21)), max_tokens=9)
    expected = answer(prompt_token_ids=submit.prompt_token_ids, max_tokens=9)

    here, there = make_replica(), make_replica()
    there.submit(make_submit("neighbour"))
    here.submit(submit, gateway_id="g7")
    deltas: list[Delta] = []
    for _ in range(steps):
        deltas += step(here)
    state = exported(here)
    assert here.core.export("s") is None
    here.core.check()
    assert here.core.table.pool.num_free == 24
    assert bool(state.kv) == (steps > 0)
    state = moved(state)
    if not keep_kv:
        state = structs.replace(state, kv=[])
    assert there.core.import_(state) is None
    there_deltas = of("s", run(there))
    deltas += there_deltas
    assert tokens(deltas) == tokens(expected)
    assert text(deltas) == text(expected)
    assert there_deltas[0].first_index == len(state.output_token_ids)
    outcome, unmoved = deltas[-1].outcome, expected[-1].outcome
    assert outcome is not None
    assert unmoved is not None
    assert (outcome.emitted_tokens, outcome.computed_tokens) == (unmoved.emitted_tokens, 20)
    served = there.core.snapshot("e").service["tenant"].computed_tokens
    here_served = here.core.snapshot("e").service.get("tenant")
    first_time = served - 3 + (here_served.computed_tokens if here_served else 0)
    assert first_time == 20, "each prompt token is charged once, wherever it was computed"
    assert outcome.recomputed_tokens == (0 if keep_kv or steps == 0 else state.kv_tokens)


def test_a_paused_sequence_moves_too_and_waits_for_its_lease() -> None:
    here, there = make_replica(), make_replica()
    here.submit(make_submit(lease_tokens=2))
    deltas = run(here)
    assert there.core.import_(moved(exported(here))) is None
    assert not there.core.has_work()
    assert there.core.top_up("s", 6)
    deltas += run(there)
    assert tokens(deltas) == tokens(answer())


def test_a_counter_from_a_dispatch_long_ago_is_not_taken_over() -> None:
    here, there = make_replica(), make_replica()
    here.submit(make_submit(counter=7))
    set_counter(there.core.table, "tenant", 900)
    assert there.core.import_(exported(here)) is None
    assert there.core.counters.value("tenant") == 900


def test_held_back_text_is_not_lost_on_the_way() -> None:
    whole = text(answer())
    here, there = make_replica(), make_replica()
    here.submit(make_submit(sampling=SamplingParams(stop=(whole[2] + whole[3] + "§",))))
    deltas: list[Delta] = []
    for _ in range(4):
        deltas += step(here)
    assert text(deltas) == whole[:2], "two letters are held back"
    assert there.core.import_(moved(exported(here))) is None
    assert text(deltas + run(there)) == whole


def test_text_that_was_never_sent_is_sent_after_the_move() -> None:
    expected = answer()
    there = make_replica()
    state = SequenceState(submit=make_submit(), output_token_ids=tokens(expected)[:3], text_sent=1)
    assert there.core.import_(state) is None
    assert text(run(there)) == text(expected)[1:]


def test_kv_that_does_not_fit_fails_that_sequence_alone() -> None:
    here, there = make_replica(), make_replica()
    here.submit(make_submit())
    step(here)
    state = exported(here)
    there.submit(make_submit("neighbour"))
    assert there.core.import_(structs.replace(state, kv=[state.kv[0][:-1]])) is None
    deltas = run(there)
    assert [delta.outcome.finish for delta in of("s", deltas) if delta.outcome] == ["failed"]
    assert len(tokens(of("neighbour", deltas))) == 6
    assert there.core.table.pool.num_free == 24


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"output_token_ids": [1] * 6}, "max_tokens is 6"),
        ({"output_token_ids": [1, 2, 3], "submit": make_submit(lease_tokens=2)}, "lease covers 2"),
        ({"kv_tokens": 3}, "kv_tokens is 3"),
        ({"kv_tokens": -1}, "kv_tokens is -1"),
        ({"text_sent": -1}, "text_sent"),
        ({"output_token_ids": [5, VOCABULARY]}, f"output_token_ids must lie between 0 and {VOCABULARY - 1}"),
        ({"output_token_ids": [-1]}, "output_token_ids must lie between 0"),
        ({"kv": [b"12345678"]}, "kv_tokens is 0"),
        ({"kv_tokens": 2, "cached_tokens": 3}, "cached_tokens is 3; of the prompt, 2 tokens"),
        ({"cached_tokens": -1}, "cached_tokens is -1"),
    ],
)
def test_a_state_that_contradicts_itself_is_refused(changes: dict[str, object], names: str) -> None:
    values: dict[str, object] = {"submit": make_submit(), "output_token_ids": [], "text_sent": 0}
    replica = make_replica()
    refused = replica.core.import_(SequenceState(**{**values, **changes}))  # type: ignore[arg-type]
    assert refused is not None
    assert (refused.code, names in refused.message) == ("invalid_state", True)
    assert replica.core.running() == []


# ---------------------------------------------------------------- a ceiling


@pytest.mark.parametrize(("ceiling", "ended_s"), [(0.0, 0.0), (10.0, 0.8)])
def test_steps_last_until_the_ceiling_is_kept(ceiling: float, ended_s: float) -> None:
    """3 prompt tokens and 5 steps of one: 8 tokens, on a device that takes no time."""
    clock = VirtualClock()
    no_time = StepTime(0.0, 0.0, 0.0, 0.0, samples=0, relative_error=0.0)
    runner = VirtualRunner(clock, num_blocks=24, block_tokens=4, step_time=no_time)
    config = EngineConfig(max_batched_tokens=16, max_sequences=4, max_tokens_per_s=ceiling)
    core = EngineCore(runner, VirtualTexts(), config, clock, sleep=clock.advance)
    runner.set_length("s", 6)
    assert core.submit(make_submit(), "gateway") is None
    emitted = 0
    while core.has_work():
        result = core.step()
        emitted += sum(len(delta.token_ids) for deltas in result.deltas.values() for delta in deltas)
    assert emitted == 6
    assert clock() == pytest.approx(ended_s)
