"""Fair steps inside vLLM, on a stand-in of its scheduler and virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from engine.vllm_plugin.fair_steps import UnfairStep
from tests.support.vllm_scheduler import FairStandIn, Server, StandInRequest, StandInScheduler, Status, stock

Make = Callable[..., Server]


@pytest.fixture
def fair(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes a server with the plug-in: slots, and the sizes of the stand-in."""

    def make(slots: int | str = 0, cls: Any = FairStandIn, **sizes: int) -> Server:
        monkeypatch.setenv("FAIRGATE_VLLM_SLOTS", str(slots))
        return Server(cls(**sizes))

    return make


def add_crowd(server: Server, tenant: str, count: int, **terms: Any) -> None:
    for number in range(count):
        server.add(f"{tenant}{number}", tenant_id=tenant, **terms)


def add_streams(server: Server, count: int, **terms: Any) -> None:
    for number in range(count):
        server.add(f"a{number}", tenant_id="a", weight=1, **terms)
        server.add(f"b{number}", tenant_id="b", weight=3, **terms)


def test_tokens_are_shared_by_weight_in_every_step(fair: Make) -> None:
    server = fair(slots=4, places=16)
    add_streams(server, 8, tokens=2000)
    server.run(1200)
    assert all(sum(step.values()) == 4 for step in server.tokens[100:])
    for since in range(100, 1100, 100):
        had = [
            sum(c for step in server.tokens[since : since + 100] for n, c in step.items() if n[0] == t)
            for t in "ab"
        ]
        assert had == [100, 300]
    assert server.scheduler.freed_tokens == 0


def test_by_default_the_slots_are_what_the_measured_step_time_gives(fair: Make) -> None:
    server = fair(slots="", places=16)
    server.fixed_s, server.row_s = 0.001, 0.0002
    add_streams(server, 4, tokens=4000)
    server.run(100)
    add_crowd(server, "c", 8, tokens=4000)
    server.run(700)
    described = server.scheduler.describe()
    assert 8 <= described["slots"] <= 12
    assert {sum(step.values()) for step in server.tokens[-20:]} == {described["slots"]}
    assert described["decode_slots"].is_auto
    assert 0.89 < described["decode_slots"].tokens_per_s / described["decode_slots"].all_tokens_per_s < 1


def test_without_the_plugin_it_is_who_came_first() -> None:
    server = stock(places=4)
    add_streams(server, 8, tokens=2000)
    server.run(300)
    assert server.emitted("a") == server.emitted("b")


def test_a_sequence_without_a_slot_keeps_its_place_and_its_memory(fair: Make) -> None:
    server = fair(slots=2, places=8)
    add_streams(server, 4, tokens=400)
    server.run(200)
    assert len(server.scheduler.running) == 8
    assert min(server.emitted(f"{t}{n}") for t in "ab" for n in range(4)) > 5


def test_a_newcomer_has_its_first_token_within_three_steps_beside_a_crowd(fair: Make) -> None:
    server = fair(slots=16, places=64)
    add_crowd(server, "a", 60, tokens=3000)
    server.run(100)
    for number in range(20):
        came = len(server.tokens)
        server.add(f"b{number}", tokens=8, tenant_id="b")
        server.run(3)
        assert server.emitted(f"b{number}", came) >= 1
        server.run(12)


def test_a_tenant_below_its_share_gets_places_though_all_are_taken(fair: Make) -> None:
    server = fair(slots=8, places=8)
    add_crowd(server, "a", 16, tokens=1000)
    server.run(50)
    add_crowd(server, "b", 16, tokens=1000, weight=3)
    server.run(100)
    seats = Counter(request.request_id[0] for request in server.scheduler.running)
    assert seats == {"a": 2, "b": 6}
    since = len(server.tokens)
    server.run(400)
    assert server.emitted("b", since) == pytest.approx(3 * server.emitted("a", since), rel=0.05)


def test_a_lease_is_never_exceeded_and_goes_on_when_topped_up(fair: Make) -> None:
    server = fair(places=8)
    request = server.add("a0", tokens=200, lease_tokens=50)
    server.run(100)
    assert request.num_output_tokens == 50
    assert server.scheduler.sequences()[0].state == "paused"
    assert server.scheduler.top_up("a0", 120)
    assert server.scheduler.top_up("a0", 120)
    server.run(100)
    assert request.num_output_tokens == 120
    server.scheduler.top_up("a0", 200)
    server.run_all()
    assert [(each.finish, each.emitted_tokens) for each in server.desk.ends] == [("length", 200)]
    assert not server.scheduler.top_up("a0", 300)


def test_one_that_was_evicted_while_it_rested_emits_nothing_past_its_lease(fair: Make) -> None:
    server = fair(places=8, blocks=40)
    rests = [server.add(f"a{number}", tokens=200, lease_tokens=60) for number in range(6)]
    server.run(100)
    others = [server.add(f"b{number}", tokens=150, tenant_id="b") for number in range(4)]
    server.run(400)
    assert all(other.num_output_tokens == 150 for other in others)
    evicted = [each for each in rests if each.num_preemptions]
    assert evicted
    assert all(each.num_output_tokens == 60 for each in rests)
    for number in range(6):
        server.scheduler.top_up(f"a{number}", 200)
    server.run_all()
    assert all(each.num_output_tokens == 200 for each in rests)


def test_prompts_are_divided_by_weight_inside_a_step(fair: Make) -> None:
    server = fair(places=64, tokens=256)
    add_streams(server, 12, prompt=1500, tokens=2)
    server.run(30)
    computed = {t: sum(_computed(server, t)) for t in "ab"}
    assert computed["b"] == pytest.approx(3 * computed["a"], rel=0.05)
    both = [s for s in server.desk.services if {"a", "b"} <= s.shares.keys()]
    assert len(both) > 20


def _computed(server: Server, tenant_id: str) -> list[int]:
    return [
        service.shares[tenant_id].total.computed_tokens
        for service in server.desk.services
        if tenant_id in service.shares
    ]


def test_when_memory_is_short_the_tenant_that_had_most_gives_way(fair: Make) -> None:
    server = fair(slots=4, places=16, blocks=100)
    add_streams(server, 8, tokens=300, predicted_output_tokens=16)
    server.run(500)
    assert server.scheduler.freed_tokens > 0
    assert server.emitted("b", 100) == 3 * server.emitted("a", 100)
    server.run_all()
    assert {each.emitted_tokens for each in server.desk.ends} == {300}


@pytest.mark.parametrize("blocks", [120, 300])
def test_no_more_is_recomputed_than_without_the_plugin(fair: Make, blocks: int) -> None:
    lost = []
    for server in (stock(places=48, blocks=blocks), fair(slots=16, places=48, blocks=blocks)):
        add_streams(server, 24, tokens=200)
        server.run_all()
        lost.append(server.scheduler.freed_tokens)
    assert lost[1] <= lost[0]


def test_what_the_prefix_cache_holds_is_not_charged(fair: Make) -> None:
    server = fair()
    server.add("a0", prompt=100, cached=64, tokens=3)
    server.run_all()
    assert sum(_computed(server, "a")) == 36
    assert server.desk.ends[0].cached_tokens == 64


def test_service_is_reported_by_tenant_with_serials(fair: Make) -> None:
    server = fair()
    server.add("a0", prompt=20, tokens=5)
    server.run_all()
    shares = [service.shares["a"] for service in server.desk.services if service.shares]
    assert sum(share.total.computed_tokens for share in shares) == 20
    assert sum(share.total.emitted_tokens for share in shares) == 5
    serials = [share.serials[1] for share in shares]
    assert serials == sorted(serials)
    assert serials[-1] == 30 * 1_000_000


def test_ended_by_the_gateway_at_rest_and_in_mid_flight(fair: Make) -> None:
    server = fair()
    rests = server.add("a0", tokens=200, lease_tokens=10)
    runs = server.add("a1", tokens=200)
    server.run(30)
    assert server.scheduler.end("a0", "budget")
    assert server.scheduler.end("a1", "budget")
    server.run(4)
    assert server.last == ["a0", "a1"]
    assert rests.num_output_tokens == 10
    found = {each.sequence_id: (each.finish, each.emitted_tokens) for each in server.desk.ends}
    assert found == {"a0": ("budget", 10), "a1": ("budget", runs.num_output_tokens)}
    assert runs.status == Status.FINISHED_LENGTH_CAPPED
    assert not server.scheduler.end("a1", "budget")


def test_a_request_whose_grammar_is_not_ready_holds_nobody_up(fair: Make) -> None:
    server = fair()
    request = StandInRequest("a0", 16, 5, {})
    request.status = Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    server.scheduler.add_request(request)
    server.add("a1", tokens=5)
    server.run(4)
    assert server.emitted("a1") == 4
    assert server.emitted("a0") == 0
    request.status = Status.WAITING
    server.run_all()
    assert request.num_output_tokens == 5


def test_another_policy_from_the_next_step_on(fair: Make) -> None:
    server = fair(slots=4, places=16)
    add_streams(server, 8, tokens=1000)
    server.run(50)
    server.scheduler.set_policy("fcfs")
    assert server.scheduler.describe()["policy"] == "fcfs"
    server.run(50)
    with pytest.raises(ValueError, match="no policy 'best'"):
        server.scheduler.set_policy("best")


def test_a_policy_that_serves_all_needs_a_token_for_each_place(fair: Make) -> None:
    server = fair(places=64, tokens=32)
    says = r"--max-num-seqs \(64\) must not exceed --max-num-batched-tokens \(32\)"
    with pytest.raises(ValueError, match=says):
        server.scheduler.set_policy("fcfs")


def test_without_a_forecast_a_length_is_the_mean_of_those_that_ended(fair: Make) -> None:
    server = fair()
    for number in range(60):
        server.add(f"a{number}", tokens=200, predicted_output_tokens=0)
        server.run(210)
    server.add("b0", tokens=500, predicted_output_tokens=0)
    (live,) = server.scheduler.sequences()
    assert live.predicted_output_tokens == pytest.approx(200, abs=10)


def test_a_session_with_streaming_input_is_ended(fair: Make) -> None:
    server = fair()
    request = StandInRequest("a0", 16, 100, {})
    request.resumable = True  # type: ignore[attr-defined]
    server.scheduler.add_request(request)
    server.run(3)
    assert server.last == ["a0"]
    assert server.emitted("a") == 0


class Careless(StandInScheduler):
    """Does not look at `next_decode_eligible_step`."""

    def schedule(self) -> Any:
        for request in self.running:
            request.next_decode_eligible_step = 0
        return super().schedule()


class Forgetful(StandInScheduler):
    """Leaves one running request out."""

    def schedule(self) -> Any:
        if self.current_step > 10:
            self.running[0].next_decode_eligible_step = self.current_step + 5
        return super().schedule()


@pytest.mark.parametrize(
    ("base", "reason"),
    [(Careless, "1 tokens were given to .*, 0 were planned"), (Forgetful, "was chosen and got no token")],
)
def test_a_difference_between_plan_and_step_is_never_silent(fair: Make, base: Any, reason: str) -> None:
    server = fair(slots=4, places=16, cls=type("Fair", (FairStandIn.__mro__[1], base), {}))
    add_streams(server, 8, tokens=1000)
    with pytest.raises(UnfairStep, match=reason):
        server.run(40)


def test_nothing_runs_while_the_server_is_asleep(fair: Make) -> None:
    server = fair()
    server.add("a0", tokens=5)
    server.scheduler._pause_state = SimpleNamespace(name="PAUSED_ALL")
    server.scheduler.max_num_scheduled_tokens, kept = 0, server.scheduler.max_num_scheduled_tokens
    server.run(3)
    assert server.emitted("a") == 0
    server.scheduler._pause_state = SimpleNamespace(name="UNPAUSED")
    server.scheduler.max_num_scheduled_tokens = kept
    server.run_all()
    assert server.emitted("a") == 5


def test_one_that_the_plan_evicts_and_admits_anew_in_the_same_step_is_whole(fair: Make) -> None:
    server = fair(places=8, blocks=46)
    for name in ("a0", "a1"):
        server.add(name, prompt=170, tokens=50, lease_tokens=1)
    server.run(3)
    server.add("a2", prompt=170, tokens=50, lease_tokens=1)
    server.run()
    # All rest, with more memory than one tenant's paused sequences may hold: the first loses its own.
    server.scheduler.top_up("a0", 50)
    for _ in range(60):
        server.run()
        server.scheduler.planner.table.check()
    assert [(each.sequence_id, each.emitted_tokens, each.preemptions) for each in server.desk.ends] == [
        ("a0", 50, 1)
    ]


def test_a_lease_that_comes_after_the_end_sets_nothing_going_again(fair: Make) -> None:
    server = fair()
    server.add("a0", tokens=200, lease_tokens=100)
    server.run(10)
    server.scheduler.end("a0", "cancelled")
    server.scheduler.top_up("a0", 200)
    server.run(4)
    assert [(each.finish, each.emitted_tokens) for each in server.desk.ends] == [("cancelled", 10)]


def test_without_a_lease_nothing_is_emitted_until_one_comes(fair: Make) -> None:
    server = fair()
    request = server.add("a0", tokens=20, lease_tokens=0)
    server.run(10)
    assert server.emitted("a0") == 0
    assert [each.state for each in server.scheduler.sequences()] == ["preempted"]
    server.scheduler.top_up("a0", 20)
    server.run_all()
    assert request.num_output_tokens == 20


def test_those_that_sit_out_are_told_as_paused(fair: Make) -> None:
    server = fair(slots=8, places=32)
    add_crowd(server, "a", 32, tokens=1000)
    server.run(60)
    assert Counter(each.state for each in server.scheduler.sequences()) == {"running": 8, "paused": 24}


class Aligning(StandInScheduler):
    """Cuts chunks of prompts at the edges of 64 tokens, as vLLM does for models with Mamba layers."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.need_mamba_block_aligned_split = True

    def _mamba_block_aligned_split(self, request: StandInRequest, num_new_tokens: int) -> int:
        end = request.num_computed_tokens + num_new_tokens
        if end >= request.num_tokens:
            return num_new_tokens
        return max(0, end // 64 * 64 - request.num_computed_tokens)


def test_a_chunk_that_ends_before_an_edge_of_a_mamba_block_is_no_unfair_step(fair: Make) -> None:
    server = fair(places=16, tokens=100, cls=type("Fair", (FairStandIn.__mro__[1], Aligning), {}))
    for number in range(6):
        server.add(f"{'ab'[number % 2]}{number}", prompt=300, tokens=10, tenant_id="ab"[number % 2])
    server.run_all(500)
    assert {each.emitted_tokens for each in server.desk.ends} == {10}


@pytest.mark.parametrize("lease_tokens", [10, 30])
def test_what_was_under_way_when_the_cache_is_reset_is_computed_again(fair: Make, lease_tokens: int) -> None:
    server = fair(places=8)
    for number in range(4):
        server.add(f"a{number}", prompt=16 + number, tokens=10 + number, lease_tokens=lease_tokens)
    # The last token of the first is under way: vLLM drops it, as those of the others.
    server.run(10)
    server.scheduler.reset_prefix_cache()
    for _ in range(40):
        server.run()
        server.scheduler.planner.table.check()
    emitted = [min(10 + number, lease_tokens) for number in range(4)]
    assert [request.num_output_tokens for request in server.requests] == emitted
    assert len(server.desk.ends) == (1 if lease_tokens == 10 else 4)
