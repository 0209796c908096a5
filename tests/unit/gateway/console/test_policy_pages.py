"""Pages of the policy: the form of a what-if, what its report shows, and what applying it means."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from engine.messages import StepTime
from engine.scheduling.policy import POLICIES
from gateway.console.pages.policy import policy, what_if, what_if_report
from gateway.console.pages.policy.policy_words import SAYS, what_if_said
from gateway.console.pages.policy.what_if_form import (
    FIELDS,
    asked_of,
    checked,
    offered,
    policies_typed,
    stretch_value,
)
from gateway.domain.server_description import DescribedEngine, DescribedQueue, ServerDescription
from gateway.domain.what_if import RunState, WhatIfAsked, WhatIfRun, stretches_of
from gateway.flow.dispatch_log import LogRecord, Waiting
from tenants.admin.audit import AuditRow
from tenants.admin.platform.policy import StoredPolicy
from tenants.config_file.document import ConfigLimit, ConfigPolicy
from tenants.config_file.steps import ConfigPlan, ConfigStep
from tenants.errors import Invalid

NOON_US = int(datetime(2026, 3, 2, 12, tzinfo=UTC).timestamp() * 1e6)
MINUTE_US = 60_000_000


def asked(**typed: str) -> WhatIfAsked:
    values = dict.fromkeys(FIELDS, "") | {name.rstrip("_"): value for name, value in typed.items()}
    return asked_of(values, NOON_US, policies=["fcfs", "vtc"], tenants=["acme", "slow"], models=["small"])


def test_what_is_left_empty_is_the_last_hour_as_it_served() -> None:
    found = asked()
    assert found == WhatIfAsked(NOON_US - 60 * MINUTE_US, NOON_US)
    assert found.flags() == ["--from=2026-03-02T11:00:00.000000", "--to=2026-03-02T12:00:00.000000"]


def test_all_that_can_be_typed_becomes_flags() -> None:
    found = asked(
        from_="2026-03-02T09:00", to="2026-03-02T11:30:00.5+01:00", model="small", gateway="gw_1",
        policies="vtc, fcfs vtc", options="slots=8 cap-tokens=64", replicas="2", weights="acme=2, slow=0.5",
        rows="100", limits="slow requests 5 hour\n\nslow  total_tokens 70\nacme concurrency 3",
    )  # fmt: skip
    assert found.flags("f.yaml") == [
        *("--from=2026-03-02T09:00:00.000000", "--to=2026-03-02T10:30:00.500000", "--of-model=small"),
        *("--gateway=gw_1", "--policy=vtc,fcfs", "--option=slots=8", "--option=cap_tokens=64"),
        *("--replicas=2", "--weight=acme=2", "--weight=slow=0.5", "--limits=f.yaml", "--rows=100"),
    ]
    [acme, slow] = found.file().tenants
    assert (acme.name, acme.weight) == ("acme", 2.0)
    assert acme.limits == [ConfigLimit(meter="concurrency", amount=3)]
    assert slow.limits == [
        ConfigLimit(meter="requests", amount=5, window="hour"),
        ConfigLimit(meter="total_tokens", amount=70, window="day"),
    ]


def server(policy: str = "vtc", **more: Any) -> ServerDescription:
    queue = DescribedQueue(1, 0.9, (), 0, 0.5, 0.5, 0.5, 1.0)
    engine = DescribedEngine("cpu", 1_024, 16, 64, 8, 256)
    step_time = StepTime(0.1, 0.0, 0.0, 0.0, 9, 0.0)
    made = ServerDescription("gw_1", "small", False, (engine,), policy, {}, queue, step_time)
    return msgspec.structs.replace(made, **more)


def test_a_server_that_changed_is_offered_by_stretches_the_newest_first() -> None:
    servers = {
        "a": server(), "paced": server(gateway_id="gw_2", step_time=None), "b": server("fcfs"),
        "c": server("fcfs", engines=()), "d": server("fcfs", model="large"),
    }  # fmt: skip
    ran = ["a", "paced", "b", None, "gone", "a", "d", "c"]
    found = stretches_of([(at_us, name) for at_us, name in enumerate(ran)], servers)
    assert [(each.server.model, each.since_us, each.until_us, each.requests) for each in found] == [
        ("large", 6, 7, 1), ("small", 0, 2, 2), ("small", 2, 3, 1), ("small", 5, 6, 1), ("small", 7, 8, 1),
    ]  # fmt: skip
    assert found[1].gateways == ("gw_1", "gw_2")
    values = [stretch_value(each) for each in offered(found)]
    assert values == ["6 7 large", "5 6 small", "2 3 small", "0 2 small"], "none of no known engines"
    wanted = asked(stretch=values[1])
    assert (wanted.since_us, wanted.until_us, wanted.model) == (5, 6, "small")
    assert asked(stretch=values[1], from_="2026-03-02T09:00").until_us == NOON_US, "a typed time goes first"
    with pytest.raises(Invalid, match="the server changed at 1970-01-01 00:00 UTC"):
        policy.require_one(found, "small")
    policy.require_one(found, "large")


def test_policies_are_checkboxes_of_which_some_are_checked_at_first() -> None:
    form = {"policy-vtc": "on", "weights": "acme=2", "policy-fcfs": "on"}
    assert policies_typed(form) == "vtc fcfs"
    assert policies_typed({"policies": "vtc"}) == "vtc"
    empty = dict.fromkeys(FIELDS, "")
    assert checked(empty, ["edf", "fcfs", "hybrid", "vtc"], "hybrid") == ["vtc", "fcfs"]
    assert checked(empty | {"policies": "edf, vtc"}, [], "hybrid") == ["edf", "vtc"]
    assert checked(empty | {"weights": "acme=2"}, ["vtc"], "hybrid") == [], "none were chosen"


@pytest.mark.parametrize(
    ("tried", "says"),
    [
        ([0.315, None], "Nothing here beats what you have: at best fcfs would have answered 31.5 % in time"),
        ([0.365], "Nothing here beats what you have: fcfs would"),
        ([0.4, 0.5], "fcfs would have answered 50.0 % in time instead of 36.5 %."),
        ([], ""),
    ],
)
def test_a_report_says_whether_anything_was_better(tried: list[float | None], says: str) -> None:
    rows = [row("fcfs", 0.5, attainment=part) for part in tried]
    report = {"policies": [row("vtc", 0.4, is_baseline=True, attainment=0.365), *rows]}
    assert what_if_report.verdict_of(report).startswith(says)
    assert bool(what_if_report.verdict_of(report)) == bool(says)


@pytest.mark.parametrize(
    ("field", "typed"),
    [
        ("stretch", {"stretch": "yesterday"}),
        ("stretch", {"stretch": "1 x small"}),
        ("from", {"from_": "yesterday"}),
        ("from", {"from_": "2026-03-02T13:00"}),
        ("to", {"to": "soon"}),
        ("to", {"to": "1960-01-01"}),
        ("model", {"model": "huge"}),
        ("policies", {"policies": "lottery"}),
        ("options", {"options": "slots"}),
        ("replicas", {"replicas": "0"}),
        ("replicas", {"replicas": "257"}),
        ("rows", {"rows": "-1"}),
        ("weights", {"weights": "acme"}),
        ("weights", {"weights": "nobody=2"}),
        ("weights", {"weights": "acme=0"}),
        ("weights", {"weights": "acme=x"}),
    ],
)
def test_what_makes_no_sense_is_said_at_its_field(field: str, typed: dict[str, str]) -> None:
    with pytest.raises(Invalid) as refused:
        asked(**typed)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("acme requests", "write TENANT METER AMOUNT WINDOW"),
        ("acme requests 5 day or so", "write TENANT METER AMOUNT WINDOW"),
        ("nobody requests 5", "there is no tenant 'nobody'"),
        ("acme smiles 5", "there is no meter 'smiles'; there are total_tokens, "),
        ("acme requests -5", "'-5' is not a whole number"),
        ("acme requests NaN", "'NaN' is not a whole number"),
        ("acme requests 1e9", "'1e9' is not a whole number"),
        (f"acme requests {'9' * 16}", "is not a whole number of at most 15 digits"),
        ("acme requests 5 year", "window: "),
        ("acme concurrency 5 day", "no window, rate or burst"),
        ("slow requests 6 day", "line 1 sets this limit already"),
    ],
)
def test_a_line_that_is_no_limit_is_named(line: str, says: str) -> None:
    with pytest.raises(Invalid) as refused:
        asked(limits=f"slow requests 5 day\n\n{line}")
    assert refused.value.field == "limits"
    assert refused.value.message.startswith("line 3: ")
    assert says in refused.value.message


def test_limits_have_a_limit() -> None:
    with pytest.raises(Invalid, match="line 101: give at most 100 limits"):
        asked_of(
            dict.fromkeys(FIELDS, "") | {"limits": "\n".join(f"t{n} requests 5" for n in range(101))},
            NOON_US, policies=[], tenants=[f"t{n}" for n in range(101)], models=[],
        )  # fmt: skip


def times(value: float | None) -> dict[str, Any]:
    return {"p50": value, "p90": value, "p99": value}


def row(policy: str, ttft_s: float | None, **more: Any) -> dict[str, Any]:
    its = {
        "requests": 5,
        "refused": 1,
        "ttft_s": times(ttft_s),
        "e2e_s": times(10.0),
        "attainment": 0.8,
        "goodput_per_s": 0.5,
        "preemptions": 0,
    }
    return its | {"policy": policy, "options": {}, "tenants": {"acme": its}} | more


REPORT = {
    "recorded": row("as it was", 0.5),
    "policies": [row("vtc", 0.4, is_baseline=True), row("fcfs", None, options={"slots": 8})],
    "baseline": [{"figure": "ttft_p50", "off": -0.02, "stated_error": None}],
}


def run(state: RunState = RunState.DONE, **asked_for: Any) -> WhatIfRun:
    made = WhatIfRun("r", WhatIfAsked(0, 1, **asked_for), "person:ada", 0, state)
    made.report = REPORT if state is RunState.DONE else {}
    return made


def test_a_report_is_shown_beside_what_happened() -> None:
    rows = what_if_report.rows_of(REPORT)
    assert [(each["name"], each["policy"], each["number"]) for each in rows] == [
        ("as it was", "", None),
        ("baseline: vtc", "", 0),
        ("fcfs", "fcfs", 1),
    ]
    assert rows[0]["times"] == ["500 ms"] * 3 + ["10.0 s"] * 3
    assert rows[2]["times"][:3] == ["never"] * 3
    assert [each["name"] for each in what_if_report.tenants_of(REPORT)] == [
        "as it was",
        "baseline: vtc",
        "fcfs",
    ]
    assert [each[1] for each in what_if_report.bars_of(REPORT)] == [0.5, 0.4, 0.0]
    assert what_if_report.accuracy_of(REPORT) == [
        "TTFT p50: -2.0 % (stated error: not known of so few requests)"
    ]


def test_how_far_a_run_is() -> None:
    going = run(RunState.RUNNING)
    assert what_if_report.progress_words(going) == "reading the recorded traffic"
    going.policy, going.number, going.part = "vtc", 1, 0.5
    assert what_if_report.progress_words(going) == "the baseline: vtc, 50 %"
    going.policy, going.number = "fcfs", 3
    assert what_if_report.progress_words(going) == "simulation 2: fcfs, 50 %"
    assert what_if_report.progress_words(run()) == "done"
    assert what_if_report.otherwise_of(run()) == "nothing: only the baseline"
    assert what_if_report.otherwise_of(run(RunState.RUNNING, policies=("fcfs",))) == "policy fcfs"


def test_what_is_applied_is_what_was_simulated() -> None:
    done = run(weights={"acme": 2.0}, limits={"acme": [ConfigLimit(meter="concurrency", amount=1)]})
    wanted = what_if.wanted_of(done, "1", StoredPolicy("vtc"))
    assert wanted.policy == ConfigPolicy(name="fcfs", options={"slots": 8})
    assert [(each.name, each.weight, len(each.limits)) for each in wanted.tenants] == [("acme", 2.0, 1)]
    assert what_if.wanted_of(done, "1", StoredPolicy("fcfs", {"slots": 8})).policy is None
    for refused, number in ((done, "0"), (done, "2"), (done, ""), (run(RunState.RUNNING), "1")):
        with pytest.raises(Invalid):
            what_if.wanted_of(refused, number, StoredPolicy("vtc"))


def test_the_effects_are_said_before_and_a_tenant_that_is_gone_does_not_come_back() -> None:
    changes = {"policy": ("vtc", "fcfs"), "options": ({}, {"slots": 8})}
    plan = ConfigPlan(1, (ConfigStep("policy.set", "scheduling policy", (), None, changes),), ())
    what_if.require_known(plan)
    effects = what_if.effects_of(plan, waiting=3, running=1_200, replicas=2)
    assert effects[0] == "Scheduling policy: policy vtc → fcfs; options none → slots=8."
    assert "3 requests wait and 1,200 run now" in effects[1]
    assert "to have 2" in effects[2]
    gone = ConfigPlan(1, (ConfigStep("tenant.create", "tenant acme", (), None, {}, "acme"),), ())
    with pytest.raises(Invalid, match="no tenant 'acme' any more"):
        what_if.require_known(gone)


def test_a_what_if_says_whether_a_policy_is_worse() -> None:
    worse = run()
    worse.report = {"policies": [row("vtc", 0.4, is_baseline=True), row("fcfs", 0.5, attainment=0.315)]}
    assert what_if_said([run(RunState.RUNNING), worse], "fcfs", {}) == (
        "The what-if of 1970-01-01 00:00 UTC: 31.5 % in time instead of 80.0 %. That is worse than what you"
        " have."
    )
    assert what_if_said([worse], "fcfs", {"slots": 8}) == ""
    assert set(POLICIES) <= set(SAYS)


def test_changes_and_turns_as_shown() -> None:
    before, after = {"policy": "vtc", "options": {"slots": 4}}, {"policy": "fcfs", "options": {}}
    noon, act = datetime(2026, 3, 2, 12, tzinfo=UTC), "policy.from_settings"
    audit = AuditRow(1, noon, "cli:root", "cli", act, "policy", None, before, after)
    [change] = policy.changes_of([audit])
    assert (change["at_us"], change["before"], change["after"]) == (
        NOON_US,
        "vtc (slots=4 tokens a step)",
        "fcfs (the settings)",
    )
    arrived = LogRecord("arrive", 9.0, "req_0", "ten_1", 1, 9.0, 1.0, 0)
    turns = [
        LogRecord(
            "dispatch", at_s, f"req_{at_s:g}", "ten_1", 1, 9.0, 1.0, 0, rule=rule,
            backlog=[Waiting("ten_1", 0, 9.0, 1)],
        )
        for at_s, rule in ((10.0, "aged"), (11.0, ""))
    ]  # fmt: skip
    newest, older = policy.dispatches_of({"small": [arrived, *turns]}, {"ten_1": "acme"}, NOON_US)
    assert newest == {
        "at_us": NOON_US + 11_000_000, "request_id": "req_11", "tenant": "acme", "tier": "standard",
        "waited_s": 2.0, "why": "by its tier and the policy's order", "tenants_waiting": 1,
    }  # fmt: skip
    assert older["why"] == "it had waited long"


def control(mode: str, **more: object) -> dict[str, Any]:
    return {"mode": mode, "knobs": {"batch_cap": 0.5}, "moves": []} | more


def test_knobs_of_a_loop_that_is_off_are_not_shown() -> None:
    shared = control("acting", rests={"batch_cap": 1.0}, holder="gw_2")
    controls = {"a": control("off"), "b": control("advice"), "c": shared}
    assert [tuple(row.values()) for row in policy.knobs_of(controls)] == [
        ("b", "advice", "batch cap", 0.5, None, "share of an engine's requests"),
        ("c", "acting", "batch cap", 0.5, 1.0, "share of an engine's requests"),
    ]
