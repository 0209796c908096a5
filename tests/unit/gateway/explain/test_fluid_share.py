"""The ideal fair share, on small cases whose times can be computed by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.messages import StepTime
from gateway.explain.fluid_share import FluidMachine, FluidShare, Job, alone, fair_share, max_min

SIMPLE = StepTime(0.010, 0.001, 0.0, 0.0, 1, 0.0)
"""A step takes 10 ms, and 1 ms more for each token."""


def _machine(places: int = 2, tokens: int = 10, kv_tokens: int = 100_000, replicas: int = 1) -> FluidMachine:
    return FluidMachine(SIMPLE, places, tokens, kv_tokens, replicas)


def _job(name: str, tenant: str = "", at_s: float = 0.0, **fields: float) -> Job:
    numbers = {"tier": 1, "weight": 1.0, "input_tokens": 10, "output_tokens": 5} | fields
    return Job(name, tenant or name, arrived_s=at_s, **numbers)  # type: ignore[arg-type]


def test_max_min_exceeds_no_demand_and_shares_the_rest_by_weight() -> None:
    assert max_min([1, 10, 10], [1, 1, 1], 9) == [1, 4, 4]
    assert max_min([10, 10], [3, 1], 8) == [6, 2]
    assert max_min([1, 2], [1, 1], 9) == [1, 2]


def test_alone_a_request_takes_its_prompt_in_full_steps_and_one_step_a_token() -> None:
    # 20 prompt tokens at 10 a step of 20 ms; then four further tokens in steps of 11 ms.
    finish = alone(_job("a", input_tokens=20, output_tokens=5), _machine())

    assert finish.first_token_s == pytest.approx(0.040)
    assert finish.last_token_s == pytest.approx(0.040 + 4 * 0.011)


def test_two_tenants_that_decode_together_share_the_steps() -> None:
    found = fair_share([_job("a", input_tokens=1), _job("b", input_tokens=1)], _machine())

    # One step of two prompt tokens, then four of two tokens: 12 ms each.
    assert found["a"] == found["b"]
    assert found["a"].last_token_s == pytest.approx(5 * 0.012)


def test_a_later_job_does_not_change_what_was_before() -> None:
    early = fair_share([_job("a")], _machine())["a"]
    found = fair_share([_job("a"), _job("b", at_s=10.0)], _machine())

    assert found["a"] == early
    assert found["b"].last_token_s == pytest.approx(10.0 + early.last_token_s)


def test_a_flood_takes_one_place_and_leaves_the_other_to_the_light_tenant() -> None:
    flood = [_job(f"f{number}", "flood", input_tokens=1, output_tokens=20) for number in range(50)]
    light = _job("light", at_s=0.1, input_tokens=1, output_tokens=5)
    found = fair_share([*flood, light], _machine())

    assert found["light"].last_token_s - 0.1 <= 5 * 0.012 + 1e-9


def test_weights_share_the_places() -> None:
    """Of eight places a tenant of weight three has six: of equal floods it ends three times as fast."""
    jobs = [
        _job(f"{tenant}{number}", tenant, input_tokens=1, output_tokens=10, weight=weight)
        for tenant, weight in (("heavy", 3.0), ("lean", 1.0))
        for number in range(48)
    ]
    found = fair_share(jobs, _machine(places=8, tokens=100))

    heavy_s = max(found[f"heavy{number}"].last_token_s for number in range(48))
    lean_by_then = sum(found[f"lean{number}"].last_token_s <= heavy_s + 1e-9 for number in range(48))
    assert lean_by_then == 16


def test_the_last_place_goes_to_the_tenant_that_had_least() -> None:
    """One place for two tenants: a long answer of one, then six short ones of the other."""
    long = [_job(f"a-{number}", "long", input_tokens=1, output_tokens=20) for number in range(2)]
    short = [_job(f"b-{number}", "short", input_tokens=1, output_tokens=2) for number in range(6)]
    found = fair_share([*long, *short], _machine(places=1))

    assert max(found[each.job_id].last_token_s for each in short) < found["a-1"].first_token_s


def test_a_tenant_that_was_idle_is_owed_nothing() -> None:
    """It arrives when the other has had much: from then on they alternate."""
    busy = [_job(f"a-{number}", "busy", input_tokens=1, output_tokens=10) for number in range(20)]
    back = [_job(f"b-{number}", "back", at_s=1.0, input_tokens=1, output_tokens=10) for number in range(5)]
    found = fair_share([*busy, *back], _machine(places=1))

    since = sum(1.0 < found[each.job_id].last_token_s < found["b-4"].last_token_s for each in busy)
    assert 3 <= since <= 6


def test_a_higher_tier_is_seated_first() -> None:
    below = [_job(f"b{number}", f"below-{number}", tier=1, output_tokens=50) for number in range(4)]
    above = [_job(f"a{number}", f"above-{number}", tier=0, at_s=0.05, output_tokens=5) for number in range(2)]
    found = fair_share([*below, *above], _machine())

    assert max(found[each.job_id].last_token_s for each in above) < min(
        found[each.job_id].last_token_s for each in below
    )


def test_within_a_tenant_who_came_first_goes_first() -> None:
    jobs = [_job(f"j{number}", "one", at_s=number / 1000) for number in range(6)]
    found = fair_share(jobs, _machine())

    ends = [found[f"j{number}"].last_token_s for number in range(6)]
    assert ends == sorted(ends)


def test_a_large_prompt_takes_its_share_of_each_step_and_no_more() -> None:
    """Beside it one answer is decoded: of each step's time the prompt has one half."""
    giant = _job("giant", input_tokens=100_000, output_tokens=1)
    small = _job("small", at_s=1.0, input_tokens=1, output_tokens=11)
    found = fair_share([giant, small], FluidMachine(SIMPLE, 4, 1000, 10_000_000))

    # 11 ms are the answer's part of a step; with as much again for the prompt a step takes 22 ms.
    assert found["small"].last_token_s - 1.0 == pytest.approx(11 * 0.022, rel=0.02)
    assert found["giant"].first_token_s > 50


def test_scarce_memory_takes_places_away() -> None:
    jobs = [_job(name, input_tokens=1, output_tokens=9) for name in "abcd"]
    plenty = fair_share(jobs, _machine(places=4, tokens=100))
    scarce = fair_share(jobs, _machine(places=4, tokens=100, kv_tokens=20))

    assert max(each.last_token_s for each in scarce.values()) > 1.5 * max(
        each.last_token_s for each in plenty.values()
    )


def test_while_no_replica_serves_nothing_goes_on() -> None:
    serving = [(0.0, 1), (0.02, 0), (5.0, 1)]
    found = fair_share([_job("a", output_tokens=20)], _machine(), serving=serving)["a"]
    undisturbed = fair_share([_job("a", output_tokens=20)], _machine())["a"]

    assert found.last_token_s == pytest.approx(undisturbed.last_token_s + 4.98)


def test_two_replicas_have_room_for_twice_as_many() -> None:
    jobs = [_job(f"j{number}", f"t{number}", input_tokens=1) for number in range(4)]
    one, two = fair_share(jobs, _machine()), fair_share(jobs, _machine(replicas=2))

    assert max(each.last_token_s for each in two.values()) == pytest.approx(5 * 0.012)
    assert max(each.last_token_s for each in one.values()) == pytest.approx(10 * 0.012)


def test_a_job_that_left_takes_no_share() -> None:
    jobs = [_job("quitter", output_tokens=1000, left_s=0.5), _job("other", "quitter", at_s=0.1)]
    found = fair_share(jobs, _machine(places=1))

    assert math.isinf(found["quitter"].last_token_s)
    assert 0.5 < found["other"].last_token_s < 0.7


def test_a_fork_goes_on_by_itself() -> None:
    fluid = FluidShare([_job("a", output_tokens=50)], _machine())
    fluid.run(until_s=0.1)
    fork = fluid.fork_with(_job("b", at_s=0.2))
    fork.run()
    fluid.run()

    assert fluid.finish("a") == fair_share([_job("a", output_tokens=50)], _machine())["a"]
    assert fork.finish("b") == fair_share([_job("a", output_tokens=50), _job("b", at_s=0.2)], _machine())["b"]
    with pytest.raises(ValueError, match="already"):
        fluid.fork_with(_job("c", at_s=0.0))


JOBS = st.lists(
    st.builds(
        lambda number, tenant, at, prompt, output, weight: Job(
            f"{tenant}-{number}-{at}", tenant, 1, weight, at / 100, prompt, output
        ),
        st.integers(0, 1_000_000),
        st.sampled_from("abcd"),
        st.integers(0, 100),
        st.integers(1, 200),
        st.integers(1, 30),
        st.just(1.0),
    ),
    min_size=1,
    max_size=25,
    unique_by=lambda job: job.job_id,
)


@settings(max_examples=60, deadline=None)
@given(JOBS)
def test_every_job_ends_none_earlier_than_alone_and_the_work_is_conserved(jobs: list[Job]) -> None:
    machine = _machine(places=3, tokens=16)
    found = fair_share(jobs, machine)

    for job in jobs:
        by_itself = alone(job, machine)
        assert found[job.job_id].last_token_s >= by_itself.last_token_s - 1e-6
        assert found[job.job_id].first_token_s <= found[job.job_id].last_token_s
    # It is busy while any job waits: no later than one after the other from the last arrival on.
    latest = max(job.arrived_s for job in jobs) + sum(
        alone(job, machine).last_token_s - job.arrived_s for job in jobs
    )
    assert max(each.last_token_s for each in found.values()) <= latest + 1e-6


def test_a_fork_may_get_a_job_that_comes_before_all_others() -> None:
    fluid = FluidShare([_job("late", at_s=2.0)], _machine())
    fluid.run(until_s=1.0)
    fork = fluid.fork_with(_job("early", at_s=1.0))
    fork.run()

    assert fork.finish("early") == fair_share([_job("early", at_s=1.0)], _machine())["early"]


def test_a_run_goes_on_after_all_jobs_had_ended() -> None:
    fluid = FluidShare([_job("early", output_tokens=3)], _machine())

    fluid.run(until_s=100.0)
    fluid.run(until_s=200.0)

    assert fluid.finish("early") == fair_share([_job("early", output_tokens=3)], _machine())["early"]


def test_what_tenants_had_is_the_cost_of_their_jobs() -> None:
    fluid = FluidShare([_job("a"), _job("b", at_s=0.1, output_tokens=20)], _machine())
    fluid.run()

    assert fluid.had == pytest.approx({("a", 1): 10 + 2 * 5, ("b", 1): 10 + 2 * 20})
