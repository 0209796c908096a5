"""A learned policy in one pool: one lookup a look, the knobs that move, and hybrid otherwise."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from engine.entry import QueueEntry
from engine.forecast.length.length import LengthForecast
from engine.messages import EngineKnobs, ModelInfo, Ready, Snapshot
from engine.step_time.model import PRIOR
from gateway.flow.control_rules import ControlMode
from gateway.flow.controller import Ticket
from gateway.flow.knobs import Knob
from gateway.flow.lanes import LaneRule
from gateway.flow.learned.actions import Actions
from gateway.flow.learned.macro_state import SeenRange
from gateway.flow.learned.table_file import LearnedTable
from gateway.pools.control_loop import ControlLoop, Signals, queue_setters
from gateway.pools.engine_knobs import engine_setters
from gateway.pools.learned_actions import own_numbers
from tenants.admin.platform.policy import StoredPolicy
from tests.support.builders import flow_controller
from tests.support.learned_tables import STRICT_SLOTS, learned_table

INFO = ModelInfo("org/tiny-model", "llama", 1, 128, 1000, [0], "float32", "cpu", "cpu")
OWN = {Knob.LONG_SHARE: 0.5, Knob.PARTIAL_PREFILLS: 4.0, Knob.RESERVE_PERMILLE: 500.0}


@dataclass
class Engine:
    """A server of four places, whose knobs can be turned."""

    snapshot: Snapshot = field(
        default_factory=lambda: Snapshot("a", 1, 1.0, [], [], 90, 0, 10, 100, PRIOR, {}, 0)
    )
    ready: Ready = field(default_factory=lambda: Ready("a", INFO, "learned", 16, 100, 4, 64, 1))
    is_up: bool = True
    told: list[EngineKnobs] = field(default_factory=list)

    def set_knobs(self, knobs: EngineKnobs) -> None:
        self.told.append(knobs)


def alike_lengths() -> LengthForecast:
    """Under which no rule of the control loop has anything to say."""
    lengths = LengthForecast()
    for _ in range(300):
        lengths.observe("t", "tiny", 20)
    return lengths


@dataclass
class Pool:
    """One pool's loop with all that it turns."""

    mode: ControlMode = ControlMode.OFF
    engine: Any = field(default_factory=Engine)
    own: dict[Knob, float] = field(default_factory=lambda: dict(OWN))

    def __post_init__(self) -> None:
        self.flow = flow_controller("hybrid", lookahead=2, ageing_s=[100.0] * 3, lanes=LaneRule(50, 0.5, 0.5))
        setters = {**queue_setters(self.flow), **engine_setters(self.engine.set_knobs, lambda: self.own)}
        self.loop = ControlLoop(
            self.mode, "tiny", self.flow, [self.engine], alike_lengths(), setters,
            rests=lambda: self.own, signals=lambda now_s: Signals(may_lend=False),
        )  # fmt: skip
        self.count = 0

    def queue(self, requests: int, input_tokens: int = 5) -> None:
        for _ in range(requests):
            self.count += 1
            entry = QueueEntry(f"r{self.count}", "t", 0.0, input_tokens, 5, 1, 1.0)
            assert self.flow.enqueue(Ticket(entry, 1, input_tokens + 5), 0.0) is None

    def looks(self, *times_s: float) -> list[tuple[Knob, float, float]]:
        return [(each.knob, each.before, each.after) for now in times_s for each in self.loop.look(now)]


@pytest.mark.parametrize("mode", ControlMode)
def test_a_queue_moves_the_knobs_to_its_actions_and_its_end_moves_them_back(mode: ControlMode) -> None:
    pool = Pool(mode)
    pool.loop.learned.use(learned_table())
    pool.queue(3)
    moves = pool.looks(0.0, 2.0)
    assert set(moves) == {
        (Knob.SLOTS, 1.0, 0.5),
        (Knob.TOKEN_BUDGET, 1.0, 0.5),
        (Knob.LONG_SHARE, 0.5, 0.3),
        (Knob.AGEING, 1.0, 0.5),
        (Knob.RESERVE_PERMILLE, 500.0, 250.0),
    }
    assert pool.engine.told[-1] == EngineKnobs(token_share=0.5, slot_share=0.5, reserve_permille=250)
    assert (pool.flow.knobs.long_share, pool.flow.knobs.ageing) == (0.3, 0.5)
    shown = pool.loop.learned.as_json()
    assert shown is not None
    assert (shown["macro_state"], shown["words"], shown["problem"]) == (
        4,
        "a queue; KV cache free; arrivals steady",
        "",
    )
    pool.flow.drain(3.0)
    assert set(pool.looks(4.0, 6.0, 12.0, 14.0)) == {(knob, after, before) for knob, before, after in moves}
    assert pool.engine.told[-1] == EngineKnobs(), "by the policy's own options again"
    assert pool.flow.placement.lanes == LaneRule(50, 0.5, 0.5)


def test_each_look_looks_up_once_and_every_move_has_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    pool = Pool()
    pool.loop.learned.use(learned_table())
    pool.queue(3)
    with caplog.at_level(logging.INFO, "fairgate.gateway.control"):
        for turn in range(20):
            pool.loop.look(2.0 * turn)
    switch = pool.loop.learned.switch
    assert switch is not None
    assert switch.lookups == 20
    told = [record.getMessage() for record in caplog.records if "moves slots" in record.getMessage()]
    assert told == [
        "control of tiny: moves slots 1 -> 0.5, because: learned: a queue; KV cache free; arrivals steady"
    ]


def test_outside_of_what_was_fitted_the_settings_count_at_once() -> None:
    own = OWN | {Knob.RESERVE_PERMILLE: 400.0, Knob.LONG_SHARE: 0.7}
    pool = Pool(own=own)
    pool.loop.learned.use(learned_table(fitted=SeenRange(2.0, 0.9, 6.0)))
    pool.queue(3)
    pool.looks(0.0, 2.0)
    assert pool.engine.told[-1].reserve_permille == 250
    pool.queue(6)
    moves = pool.loop.look(4.0)
    assert (Knob.RESERVE_PERMILLE, 400.0) in [(each.knob, each.after) for each in moves]
    assert pool.engine.told[-1] == EngineKnobs()
    assert pool.flow.knobs.long_share == 0.7, "as the operator set it, and not as hybrid's default is"
    assert {each.reason for each in moves} == {
        "learned: outside of what the table was fitted on (queued_per_place 2.25, at most 2 was): hybrid"
    }
    shown = pool.loop.learned.as_json()
    assert shown is not None
    assert (shown["is_outside"], shown["macro_state"], shown["times_outside"]) == (True, None, 1)


def test_another_policy_puts_the_knobs_back() -> None:
    pool = Pool()
    pool.loop.learned.use(learned_table())
    pool.queue(3)
    pool.looks(0.0, 2.0)
    pool.own = OWN | {Knob.PARTIAL_PREFILLS: 1.0}
    pool.loop.learned.use(None, is_wanted=False)
    moves = pool.loop.look(4.0)
    assert {each.reason for each in moves} == {
        "the policy is not learned any more: the knobs rest where the settings put them"
    }
    assert pool.engine.told[-1] == EngineKnobs()
    assert pool.loop.learned.as_json() is None
    assert pool.loop.look(6.0) == []


@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        (learned_table(model="other"), "for the model 'other', and this is 'tiny'"),
        (learned_table(machine="8b on 2 x h100"), "for the machine '8b on 2 x h100', and 'tiny' runs on cpu"),
    ],
    ids=["model", "machine"],
)
def test_a_table_for_something_else_is_said_once_and_not_used(
    table: LearnedTable, complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    pool = Pool()
    pool.loop.learned.use(table)
    pool.queue(3)
    with caplog.at_level(logging.ERROR, "fairgate.gateway.control"):
        assert pool.looks(0.0, 2.0, 4.0) == []
    [said] = [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]
    assert complaint in said
    assert said.endswith("the actions of hybrid are in force")
    shown = pool.loop.learned.as_json()
    assert shown is not None
    assert complaint in shown["problem"]


def test_a_model_that_turns_out_to_be_another_ends_what_its_table_did() -> None:
    pool = Pool()
    known, pool.engine.ready = pool.engine.ready, None
    pool.loop.learned.use(learned_table(machine="8b on h100"))
    pool.queue(3)
    pool.looks(0.0, 2.0)
    assert pool.flow.knobs.ageing == STRICT_SLOTS.ageing, "nothing is known of the machine"
    pool.engine.ready = known
    pool.loop.look(4.0)
    assert pool.flow.knobs.ageing == 1.0
    pool.engine.ready = replace(known, model=replace(INFO, device="cuda:0"))
    pool.looks(6.0, 8.0)
    assert pool.flow.knobs.ageing == STRICT_SLOTS.ageing


def test_the_situation_is_what_waits_who_is_next_and_how_full_it_is() -> None:
    pool = Pool()
    assert pool.loop.learned.situation(0.0).queued_per_place == 0.0
    pool.queue(1)
    pool.queue(2, input_tokens=60)
    found = pool.loop.learned.situation(1.0)
    assert (found.queued_per_place, found.kv_share, found.trend) == (0.75, 0.1, 1.0)
    assert not found.long_at_head, "a short one has the next turn"
    pool.flow.cancel("r1", 1.0)
    assert pool.loop.learned.situation(2.0).long_at_head
    pool.engine.is_up = False
    assert pool.loop.learned.situation(3.0).queued_per_place == 2.0, "no place at all counts as one"


def test_knobs_without_a_setter_here_are_left_alone() -> None:
    pool = Pool()
    loop = ControlLoop(
        ControlMode.ADVICE,
        "tiny",
        pool.flow,
        [pool.engine],
        alike_lengths(),
        {},
        signals=lambda now_s: Signals(may_lend=False),
    )
    loop.learned.use(learned_table(dict.fromkeys(range(12), Actions(slots=0.5))))
    assert [loop.look(now_s) for now_s in (0.0, 2.0)] == [[], []]
    assert loop.control.in_force[Knob.SLOTS] == 1.0, "nothing is said that was not done"


def test_own_numbers_of_a_policy() -> None:
    assert own_numbers(StoredPolicy("fcfs", {})) == {Knob.PARTIAL_PREFILLS: 1.0, Knob.RESERVE_PERMILLE: 500.0}
    learned = StoredPolicy("learned", {"reserve_permille": 300, "learned_table": "x"})
    assert own_numbers(learned) == {Knob.PARTIAL_PREFILLS: 4.0, Knob.RESERVE_PERMILLE: 300.0}
