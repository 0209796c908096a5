"""Judgement of the control loop by segments, reversals and advice."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from click.testing import CliRunner

from gateway.flow.control_rules import ControlMode, Move
from gateway.flow.deadline_check import STRICT
from gateway.flow.knobs import Knob
from ops.bench.estimates import control
from ops.bench.estimates.control import REST, SETTINGS, ControlCase, Setting, dist_shift, most_reversals, run
from ops.cli.main import cli
from ops.simulate.control.steering import Steering
from ops.simulate.pool import PoolObserver, SimulatedPool
from ops.simulate.slo import SloLimits
from ops.simulate.traffic.requests import Sped
from tests.unit.ops.simulate.test_figures import Listed, machine, request

TIGHT = machine(places=8, kv_tokens=160)
"""Four requests fill its cache."""


def crowd(count: int = 120) -> Listed:
    return Listed([request(0.05 * number, input_tokens=20, output_tokens=15) for number in range(count)])


def steered(mode: ControlMode) -> tuple[SimulatedPool, Steering]:
    steering = Steering(mode, SloLimits())
    pool = SimulatedPool("vtc", TIGHT, watch=PoolObserver(steering.look))
    pool.run(crowd(500))
    return pool, steering


def test_a_full_cache_turns_the_knobs_of_a_simulated_queue_and_advice_turns_nothing() -> None:
    off, acting, advice = (
        steered(mode) for mode in (ControlMode.OFF, ControlMode.ACTING, ControlMode.ADVICE)
    )
    assert off[1].moves == []
    moved = [move for move in acting[1].moves if move.knob is Knob.LOOKAHEAD]
    assert [(move.before, move.after, move.is_made) for move in moved[:2]] == [(2, 1, True), (1, 0, True)]
    assert "KV nearly full" in moved[0].reason
    assert {move.knob for move in advice[1].moves} >= {Knob.LOOKAHEAD, Knob.BATCH_CAP}
    assert not any(move.is_made for move in advice[1].moves)
    assert advice[0].records.last_s == off[0].records.last_s
    assert advice[0].flow.placement.window == off[0].flow.placement.window != acting[0].flow.placement.window


def move(at_s: float, up: bool, knob: Knob = Knob.LOOKAHEAD) -> Move:
    return Move(at_s, knob, 1.0, 2.0 if up else 0.0, "constructed", True)


@pytest.mark.parametrize(
    ("moves", "expected"),
    [
        ([], 0),
        ([move(0, True), move(5, True), move(70, False)], 1),
        ([move(0, True), move(60, False), move(119, True)], 2),
        ([move(0, True), move(60, False), move(120, True)], 1),
        ([move(0, True), move(60, False), move(0, True, Knob.AGEING), move(61, False, Knob.AGEING)], 2),
    ],
)
def test_reversals_of_all_knobs_within_a_minute_are_counted(moves: list[Move], expected: int) -> None:
    assert most_reversals(moves) == expected


def test_each_segment_is_compared_with_its_own_best_fixed_place() -> None:
    shares: dict[Setting | None, list[float]] = {setting: [0.5, 0.9] for setting in SETTINGS}
    shares |= {REST: [0.6, 0.8], None: [0.595, 0.88]}
    case = ControlCase("crowd", crowd(), TIGHT, 1, 3.0, SloLimits())
    [found] = run([case])["cases"]
    assert [segment["from_s"] for segment in found["segments"]] == [0.0, 3.0]
    assert found["advice_changes_nothing"]
    assert found["advised_moves"] > 0
    assert found["ok"] == all(segment["below_best"] <= 0.01 for segment in found["segments"])
    judged = control.judge(shares, case, [], changes_nothing=True)
    best = [segment["best_fixed"] for segment in judged["segments"]]
    assert best == ["2 ahead, strictness 0", "0 ahead, strictness 0"]
    assert [segment["below_best"] for segment in judged["segments"]] == pytest.approx([0.005, 0.02])
    assert not judged["ok"], "two points below in the second"
    assert not control.judge(shares | {None: [0.6, 0.9]}, case, [], changes_nothing=False)["ok"]
    swinging = [move(0, True), move(30, False), move(59, True)]
    assert not control.judge(shares | {None: [0.6, 0.9]}, case, swinging, changes_nothing=True)["ok"]
    assert control.judge(shares | {None: [0.6, 0.9]}, case, [], changes_nothing=True)["ok"]


def test_the_published_setting_is_the_one_that_was_published() -> None:
    case = dist_shift(SloLimits())
    requests = list(case.source)
    assert len(requests) == 1890
    assert {(each.input_tokens, each.output_tokens) for each in requests} == {(256, 256)}
    assert {each.tenant for each in requests} == {"client-0", "client-1"}
    report = run([replace(case, source=Sped(case.source, limit=40))])
    assert report["cases"][0]["advice_changes_nothing"]


def test_a_trace_that_is_none_is_refused(tmp_path: object) -> None:
    result = CliRunner().invoke(cli, ["bench", "control", "--trace", f"{tmp_path}/none.csv"])
    assert (result.exit_code, "none.csv" in result.output) == (1, True), result.output
    wrong = CliRunner().invoke(cli, ["bench", "control", "--trace", "dist_shift", "--slo", "speed=1"])
    assert (wrong.exit_code, "'speed=1' is no target" in wrong.output) == (2, True)


def served(strictness: float, mode: ControlMode = ControlMode.OFF) -> tuple[SimulatedPool, Steering]:
    """Three times as much as can be served within 0.2 s to the first token."""
    slo = SloLimits(ttft_s=0.2, tpot_s=1.0)
    steering = Steering(mode, slo)
    steering.admission.strictness = strictness
    pool = SimulatedPool("fcfs", machine(places=2), watch=steering.watch)
    pool.run(crowd(400))
    return pool, steering


def met(pool: SimulatedPool) -> int:
    slo = SloLimits(ttft_s=0.2, tpot_s=1.0)
    return sum(slo.met(pool.records, row) for row in range(len(pool.records)))


def test_who_would_be_late_is_refused_and_the_others_are_in_time() -> None:
    open_, _ = served(0.0)
    strict, _ = served(STRICT)
    assert sum(open_.records.refused) == 0
    assert met(open_) < 40
    refused = sum(strict.records.refused)
    assert met(strict) > 4 * met(open_)
    assert met(strict) > 0.75 * (400 - refused), "of those let in"


def test_acting_the_loop_refuses_by_itself_and_with_advice_nobody() -> None:
    acting, steering = served(0.0, ControlMode.ACTING)
    moves = [move for move in steering.moves if move.knob is Knob.ADMISSION]
    assert moves[0].after > 0
    assert moves[0].is_made
    assert sum(acting.records.refused) > 50
    assert met(acting) > 2 * met(served(0.0)[0])


def test_to_foresee_who_is_late_changes_nothing_for_those_that_learn_lengths_meanwhile() -> None:
    def answered(steering: Steering | None) -> list[float]:
        drawn = random.Random(5)
        # Three tenants that send seldom and one that sends the rest.
        requests = [
            request(
                0.03 * number, f"t{min(number % 13, 3)}", output_tokens=1 + round(drawn.lognormvariate(3, 1))
            )
            for number in range(800)
        ]
        pool = SimulatedPool("sjf", machine(places=8), watch=steering.watch if steering else None)
        pool.run(Listed(requests))
        return list(pool.records.last_s)

    assert answered(Steering(ControlMode.ADVICE, SloLimits(0.2))) == answered(None)


def test_with_advice_nobody_is_refused() -> None:
    advised, _ = served(0.0, ControlMode.ADVICE)
    assert sum(advised.records.refused) == 0
    assert advised.records.last_s == served(0.0)[0].records.last_s
