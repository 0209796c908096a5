"""Figures of a simulation."""

from __future__ import annotations

import math

import pytest

from engine.messages import StepTime
from engine.scheduling.options import PolicyOptions
from engine.virtual.step_shapes import LinearTiming
from ops.pages.page import ReportPage, html
from ops.reporting import jain_index, recorded
from ops.simulate.figures.fairness import Fairness, service_bound
from ops.simulate.figures.figures import figures, quantiles
from ops.simulate.machines.machines import Machine, roofline_machine
from ops.simulate.pool import PoolObserver, SimulatedPool
from ops.simulate.records import Records
from ops.simulate.report.charts import BINS, charts, curves
from ops.simulate.report.show import sections, show
from ops.simulate.run import Scenario, run_policy, simulate
from ops.simulate.slo import SloLimits
from ops.simulate.sustained import BISECTIONS, PRECISION, compare, ratios, sustained
from ops.simulate.traffic.requests import SimulatedRequest

STEP_TIME = StepTime(10e-3, 1e-3, 0.0, 0.0, samples=1, relative_error=0.0)
"""10 ms and 1 ms a token."""


class Listed(list[SimulatedRequest]):
    """A source for tests."""

    name = "listed"
    has_prefixes = False


def machine(*, places: int = 2, kv_tokens: int = 1000, context_tokens: int = 500) -> Machine:
    return Machine("small", LinearTiming(STEP_TIME), STEP_TIME, kv_tokens, context_tokens, places, 64)


def request(
    at_s: float, tenant: str = "one", input_tokens: int = 10, output_tokens: int = 5
) -> SimulatedRequest:
    return SimulatedRequest(at_s, tenant, input_tokens, output_tokens)


def pool_of(
    requests: list[SimulatedRequest], size: Machine, policy: str = "fcfs", **asked: object
) -> SimulatedPool:
    pool = SimulatedPool(policy, size, **asked)  # type: ignore[arg-type]
    pool.run(requests)
    return pool


def test_one_request_alone_takes_what_its_steps_take() -> None:
    pool = pool_of([request(1.0)], machine())
    records = pool.records
    # A prompt of 10 tokens takes 20 ms, each of four more steps 11 ms.
    assert records.ttft_s(0) == pytest.approx(0.020)
    assert records.e2e_s(0) == pytest.approx(0.064)
    assert records.tpot_s(0) == pytest.approx(0.011)
    found = figures(pool, Fairness(), SloLimits(1.0, 1.0))
    assert found["busy_share"] == pytest.approx(0.064 / 1.064)
    assert found["longest_idle_s"] == pytest.approx(1.0)
    assert found["idle_gaps"] == 1
    assert found["attainment"] == 1.0
    assert pool.service_by_now() == {"one": 10 + 2 * 5}


def test_what_can_never_run_is_refused_and_counts_as_a_miss() -> None:
    pool = pool_of([request(0.0, input_tokens=499, output_tokens=2), request(0.0)], machine())
    found = figures(pool, Fairness(), SloLimits(1.0, 1.0))
    assert found["refused"] == 1
    assert found["attainment"] == 0.5
    assert found["violation_rate"] == 0.5
    assert found["ttft_s"]["p99"] == math.inf
    assert found["goodput_per_s"] == pytest.approx(1 / found["span_s"])


def test_every_target_counts() -> None:
    records = pool_of([request(0.0)], machine()).records
    assert SloLimits(0.021, 0.012).met(records, 0)
    assert not SloLimits(0.019, 0.012).met(records, 0)
    assert not SloLimits(0.021, 0.010).met(records, 0)
    assert not SloLimits(0.021, 0.012, e2e_s=0.06).met(records, 0)


def test_targets_are_read_and_refused() -> None:
    assert SloLimits.of("ttft=0.5, e2e=30s") == SloLimits(0.5, math.inf, 30.0)
    assert str(SloLimits.of("ttft=0.5,e2e=30")) == "ttft 0.5 s, e2e 30 s"
    for text, why in (
        ("ttft", "is no target; targets are ttft=SECONDS"),
        ("wait=3", "is no target"),
        ("ttft=soon", "ttft must be a number of seconds"),
        ("tpot=0", "tpot must be above 0 s, not 0"),
        ("tpot=nan", "tpot must be above 0 s"),
    ):
        with pytest.raises(ValueError, match=why):
            SloLimits.of(text)


def test_quantiles_are_nearest_rank() -> None:
    assert quantiles(range(1, 101)) == {"mean": 50.5, "p50": 50, "p90": 90, "p95": 95, "p99": 99}
    assert quantiles([3.0])["p50"] == 3.0
    assert all(math.isnan(value) for value in quantiles([]).values())


def test_preemption_and_memory_are_told() -> None:
    requests = [request(0.0, output_tokens=100) for _ in range(4)]
    all_in = PolicyOptions(admit="prompt-only")
    pool = pool_of(requests, machine(places=4, kv_tokens=160), options=all_in)
    found = figures(pool, Fairness(), SloLimits())
    assert found["preemptions"] > 0
    assert found["recomputed_tokens"] > 0
    assert 0.5 < found["kv_use_most"] <= 1.0


def test_prefix_hits_are_those_of_the_block_ids() -> None:
    size = Machine("large", LinearTiming(STEP_TIME), STEP_TIME, 20_000, 8000, 2, 2048)
    shared = SimulatedRequest(0.0, "one", 1100, 2, (1, 2, 3))
    again = SimulatedRequest(100.0, "one", 1100, 2, (1, 2, 4))
    stranger = SimulatedRequest(200.0, "two", 1100, 2, (1, 2, 3))
    records = pool_of([shared, again, stranger], size).records
    assert list(records.cached_tokens) == [0, 1024, 0], "a tenant sees its own prefixes alone"
    assert list(pool_of([shared, again], size, prefix_caching=False).records.cached_tokens) == [0, 0]


def test_without_anything_shared_a_prefix_cache_changes_nothing() -> None:
    requests = [request(0.05 * number, f"t{number % 3}", 40, 30) for number in range(40)]
    instants = [
        list(pool_of(requests, machine(places=6), "vtc", prefix_caching=caches).records.last_s)
        for caches in (True, False)
    ]
    assert instants[0] == instants[1]


def test_several_replicas_share_the_work() -> None:
    requests = [request(0.0, output_tokens=50) for _ in range(8)]
    alone = pool_of(requests, machine(places=2))
    four = pool_of(requests, machine(places=2), replicas=4)
    assert alone.now_s / four.now_s == pytest.approx(4, rel=0.05)


def watched(policy: str, requests: list[SimulatedRequest]) -> tuple[SimulatedPool, Fairness]:
    return run_policy(Scenario(Listed(requests), machine(places=4)), policy)


def flood() -> list[SimulatedRequest]:
    """One sends ten times as much as the other, both more than is served."""
    many = [request(0.01 * number, "flood", 20, 20) for number in range(1000)]
    few = [request(0.1 * number, "calm", 20, 20) for number in range(100)]
    return sorted(many + few, key=lambda each: each.arrival_s)


def test_fair_queueing_is_seen_to_be_fairer_than_first_come_first_served() -> None:
    (_, fair), (pool, unfair) = watched("vtc", flood()), watched("fcfs", flood())
    assert fair.jain_index is not None
    assert unfair.jain_index is not None
    assert fair.jain_index > 0.99
    assert unfair.jain_index < 0.7
    bound = service_bound(longest_input=20, longest_output=20, kv_tokens=1000, sequences=4, least_weight=1.0)
    assert fair.widest_gap <= bound
    assert unfair.widest_gap > 10 * bound
    assert figures(pool, unfair, SloLimits())["service_gap_over_bound"] > 10


def test_a_tenant_that_ceased_to_wait_meanwhile_is_not_compared() -> None:
    pool = SimulatedPool("fcfs", machine(), watch=PoolObserver())
    pool.records.weights.update(a=1.0, b=1.0)
    fairness = Fairness(period_s=1.0)
    pool.queued.update(a=1, b=1)
    fairness.look(pool)
    pool.now_s = 1.0
    pool.service.update(a=100)
    pool.emptied.add("a")
    fairness.look(pool)
    assert fairness.widest_gap == 0.0
    pool.now_s = 2.0
    pool.service.update(b=30)
    fairness.look(pool)
    assert fairness.widest_gap == 30.0
    pool.now_s = 3.0
    pool.service.update(b=35, a=110)
    fairness.look(pool)
    assert fairness.widest_gap == 30.0


def test_the_jain_index() -> None:
    assert jain_index([2.0, 2.0]) == 1.0
    assert jain_index([1.0, 0.0, 0.0, 0.0]) == 0.25
    assert jain_index([]) is None


def test_a_report_has_every_policy_and_every_tenant_and_is_plain_json() -> None:
    requests = [request(0.1 * number, f"t{number % 2}") for number in range(30)]
    scenario = Scenario(Listed(requests), roofline_machine("h200", "1b"), claims={"fcfs": "much"})
    seen: list[int] = []
    report = simulate(scenario, ["fcfs", "vtc"], on_rows=seen.append)
    assert [row["policy"] for row in report["policies"]] == ["fcfs", "vtc"]
    assert report["policies"][0]["published"] == "much"
    assert "published" not in report["policies"][1]
    assert set(report["policies"][0]["tenants"]) == {"t0", "t1"}
    assert report["policies"][0]["energy"]["joules"] > 0
    assert report["policies"][0]["jain_index"] is None, "no tenant ever waited"
    assert sum(seen) == 2 * 2 * 30, "each request arrives and ends, under each policy"
    assert [title.split()[0] for title, _, _ in sections(report)] == [
        "latency", "service", "devices", "tenants",
    ]  # fmt: skip


def test_the_page_is_whole_and_escapes_what_tenants_are_called() -> None:
    requests = [request(0.1 * number, f"<script>{number % 2}") for number in range(10)]
    scenario = Scenario(Listed(requests), machine())
    found = []
    report = simulate(scenario, ["fcfs"], on_pool=lambda name, pool: found.append(curves(pool, scenario.slo)))
    drawn = charts(found, scenario.slo)
    text = html(ReportPage("simulated", recorded(lambda: show(report)), drawn, exact=report))
    assert "<script" not in text
    assert "&lt;script&gt;0" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", ""), "something would be fetched"
    for title, _, _ in sections(report):
        assert title in text
    for chart in drawn:
        assert f"<h2>{chart.title}</h2>" in text


def test_curves_are_small_and_count_every_request() -> None:
    pool = pool_of([request(0.1 * number) for number in range(500)], machine())
    drawn = curves(pool, SloLimits())
    assert len(drawn.ttft_s) == 200
    assert drawn.ttft_s == sorted(drawn.ttft_s)
    assert sum(drawn.arrived_per_s) * drawn.span_s / BINS == pytest.approx(500)
    assert sum(drawn.met_per_s) * drawn.span_s / BINS == pytest.approx(500)


def test_service_over_time_is_all_service_of_all_that_were_answered() -> None:
    pool = pool_of([request(0.1 * number, f"t{number % 2}") for number in range(50)], machine())
    drawn = curves(pool, SloLimits())
    assert set(drawn.service_per_s) == {"t0", "t1"}
    records = pool.records
    for tenant, values in drawn.service_per_s.items():
        rows = records.rows_of(tenant)
        wanted = sum(records.input_tokens[row] + records.output_tokens[row] for row in rows)
        assert sum(values) * drawn.span_s / BINS == pytest.approx(wanted)


def test_the_sustained_rate_is_that_at_which_the_slo_still_holds() -> None:
    requests = [request(0.1 * number, output_tokens=10) for number in range(300)]
    scenario = Scenario(Listed(requests), machine(places=4), slo=SloLimits(0.5, 0.1))
    found = sustained(scenario, "fcfs")
    assert found.attainment >= 0.9
    # A step of four decodes takes 14 ms and a prompt 20 to 23 ms: 4 requests in about 10 x 14 + 4 x 10 ms.
    assert 12 < found.rate_per_s < 30
    faster = run_policy(
        Scenario(
            Listed(
                [request(each.arrival_s * 10 / found.rate_per_s / 1.3, output_tokens=10) for each in requests]
            ),
            machine(places=4),
            slo=SloLimits(0.5, 0.1),
        ),
        "fcfs",
    )[0].records
    assert sum(scenario.slo.met(faster, row) for row in range(300)) < 270


def test_the_same_rate_is_found_wherever_the_search_begins() -> None:
    requests = [request(0.1 * number, output_tokens=10) for number in range(300)]
    scenario = Scenario(Listed(requests), machine(places=4), slo=SloLimits(0.5, 0.1))
    plain = sustained(scenario, "fcfs")
    near, far = (
        sustained(scenario, "fcfs", start_speed=speed) for speed in (plain.speed / PRECISION**3, 0.25)
    )
    assert [near.rate_per_s, far.rate_per_s] == pytest.approx([plain.rate_per_s] * 2)
    assert near.runs == 2 + BISECTIONS < far.runs


def test_a_source_too_short_to_tell_gives_a_rate_that_is_the_least() -> None:
    requests = [request(0.1 * number, output_tokens=2) for number in range(120)]
    found = sustained(Scenario(Listed(requests), machine(places=60), slo=SloLimits(10.0, 1.0)), "fcfs")
    assert found.is_least
    assert found.rate_per_s == pytest.approx(20, rel=0.05)


def test_the_table_names_the_best_and_the_ratios() -> None:
    requests = [request(0.2 * number, output_tokens=10 + number % 30) for number in range(200)]
    scenario = Scenario(Listed(requests), machine(places=4), slo=SloLimits(1.0, 0.1))
    (row,) = compare([("listed", scenario)], ["static", "fcfs"], limit=150)
    assert row["best"] == "fcfs"
    assert row["ratios"] == {"static": 1.0, "fcfs": row["rate_per_s"]["fcfs"] / row["rate_per_s"]["static"]}
    assert row["ratios"]["fcfs"] > 1.1
    assert ratios({"static": 0.0}) == {}
    assert 1.0 < PRECISION < 1.1


def test_a_scenario_says_what_is_wrong_with_it() -> None:
    with pytest.raises(ValueError, match="replicas must be between 1 and 256, not 0"):
        Scenario(Listed(), machine(), 0)
    with pytest.raises(ValueError, match="no predictions 'tarot'"):
        Scenario(Listed(), machine(), predictions="tarot")


def test_nothing_to_simulate_is_said() -> None:
    with pytest.raises(ValueError, match="listed: there are no requests"):
        run_policy(Scenario(Listed(), machine()), "fcfs")


def test_records_keep_about_a_hundred_bytes_a_request() -> None:
    records = Records()
    for number in range(1000):
        records.arrive(request(float(number)))
    columns = [value for value in vars(records).values() if hasattr(value, "itemsize")]
    assert sum(column.itemsize for column in columns) <= 100
    assert all(len(column) == 1000 for column in columns)
