"""Each knob is moved by a load that asks for it, and back when the load is gone; figures of a loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from engine.entry import QueueEntry
from engine.forecast.length.length import LengthForecast
from gateway.dispatch.admission import Admission
from gateway.flow.control_rules import RULES, ControlMode
from gateway.flow.controller import FlowController, Ticket
from gateway.flow.knobs import DEFAULT_BOUNDS, Knob
from gateway.metrics.control import ControlCollector
from gateway.pools.control_loop import EVERY_S, LEAST_LENGTHS, ControlLoop, Signals, setters_of
from tests.unit.gateway.pools.test_control_loop import Engine, Requests, queue, snapshot_of

CALM: dict[str, Any] = {"attainment": 1.0, "hits": 0.0, "late": 0.0, "good": 0.0, "blocks": 10, "p90": 20}


def _any(stands_in: object) -> Any:
    return stands_in


@dataclass
class Load:
    """What the gateway's figures say; `tells` sets them."""

    said: dict[str, Any] = field(default_factory=lambda: dict(CALM))
    budgets: list[float] = field(default_factory=list)
    feed: Any = None
    mode: ControlMode = ControlMode.ACTING

    def __post_init__(self) -> None:
        self.flow: FlowController = queue()
        self.requests = Requests()
        self.engine = _any(Engine(snapshot_of(10)))
        self.engine.set_knobs = lambda knobs: self.budgets.append(knobs.token_share)
        lifecycle = _any(self.requests)
        self.loop = ControlLoop(
            self.mode,
            "m",
            self.flow,
            [self.engine],
            _any(self),
            setters_of(self.flow, lifecycle, lambda: [self.engine], has_engines=True),
            signals=lambda now_s: Signals(
                0.0, self.said["attainment"], self.said["hits"], self.said["late"], self.said["good"]
            ),
            feed=self.feed,
        )
        assert self.flow.enqueue(Ticket(QueueEntry("r", "t", 0.0, 10, 10, 1), 1, 20), 0.0) is None
        self.now_s = 0.0

    def model_samples(self, model: str) -> int:
        """Answers that were seen."""
        return LEAST_LENGTHS

    def quantile(self, tenant_id: str, model: str, q: float) -> int:
        """Of lengths: as `LengthForecast`, whose sketches a few answers would not spread."""
        return 20 if q < 0.9 else int(self.said["p90"])

    def look(self, **said: Any) -> None:
        self.said = CALM | said
        self.engine.snapshot = snapshot_of(self.said["blocks"])
        self.loop.look(self.now_s)
        self.now_s += EVERY_S

    def stands(self) -> dict[Knob, float]:
        """Where each knob really is, at the object that it turns."""
        flow, admission = self.flow, self.requests.admission
        return {
            Knob.ADMISSION: admission.strictness,
            Knob.BATCH_CAP: flow.placement.window.batch_cap,
            Knob.TOKEN_BUDGET: self.budgets[-1] if self.budgets else 1.0,
            Knob.LOOKAHEAD: flow.placement.window.lookahead_sequences,
            Knob.AGEING: flow.knobs.ageing,
            Knob.EARLY_REFUSAL: admission.factor,
            Knob.BATCH_SHARE: flow.knobs.batch_share,
            Knob.RESERVE_QUANTILE: self.requests.reserve_quantile,
            Knob.PREFIX_WEIGHT: flow.knobs.prefix_weight,
        }


FULL, SPREAD, CACHED, MISSED = {"blocks": 99}, {"p90": 200}, {"hits": 0.9}, {"attainment": 0.5}
LATE = {"late": 0.5}
LOADS: list[tuple[Knob, dict[str, Any], bool]] = [
    (Knob.ADMISSION, LATE, True),
    (Knob.BATCH_CAP, FULL, False),
    (Knob.TOKEN_BUDGET, FULL, False),
    (Knob.LOOKAHEAD, FULL, False),
    (Knob.LOOKAHEAD, CACHED, True),
    (Knob.RESERVE_QUANTILE, FULL, True),
    (Knob.AGEING, SPREAD, False),
    (Knob.EARLY_REFUSAL, MISSED, True),
    (Knob.BATCH_SHARE, MISSED, False),
    (Knob.PREFIX_WEIGHT, CACHED, True),
]


@pytest.mark.parametrize(("knob", "load", "goes_up"), LOADS)
def test_a_load_that_asks_for_it_turns_a_knob_and_its_end_turns_it_back(
    knob: Knob, load: dict[str, Any], goes_up: bool
) -> None:
    at = Load()
    at.look()
    rest = at.stands()[knob]
    assert rest == DEFAULT_BOUNDS[knob].rest
    for _ in range(8):
        at.look(**load)
    turned = at.stands()[knob]
    assert turned != rest
    assert (turned > rest) == goes_up
    assert at.loop.control.in_force[knob] == turned
    # Overloads come again for five minutes, and one knob turns back in a minute.
    for _ in range(round(1500 / EVERY_S)):
        at.look()
    assert at.stands()[knob] == rest


def test_every_knob_that_a_rule_moves_has_its_load() -> None:
    moved = {knob for rule in RULES for knob, _ in rule.goals} - {Knob.QUOTA}
    assert {knob for knob, *_ in LOADS} == moved == set(Load().stands())


def test_what_prometheus_and_the_status_page_get() -> None:
    at = Load()
    at.look(**FULL)
    registry = CollectorRegistry()
    registry.register(ControlCollector(lambda: {"m": at.loop.figures()}))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"fairgate_control_{name}", {"model": "m", **labels})

    assert value("mode", mode="acting") == 1
    assert value("holder") == 1, "it decides for itself"
    assert value("knob", knob="lookahead") == 1
    assert value("moves_total", knob="lookahead", kind="made") == 1
    assert value("moves_total", knob="ageing", kind="made") is None
    shown = at.loop.describe()
    assert (shown["mode"], shown["is_shared"], shown["holder"], shown["term"]) == (
        "acting", False, None, None,
    )  # fmt: skip
    assert (shown["in_force"]["lookahead"], shown["rests"]["lookahead"]) == (1, 2)


def test_advice_decides_nothing_and_says_one_line_a_move(caplog: pytest.LogCaptureFixture) -> None:
    at = Load()
    advising = ControlLoop(
        ControlMode.ADVICE, "m", at.flow, [at.engine], LengthForecast(),  # type: ignore[arg-type]
        setters_of(at.flow, at.requests, list, has_engines=False),  # type: ignore[arg-type]
    )  # fmt: skip
    at.engine.snapshot = snapshot_of(99)
    with caplog.at_level("INFO", "fairgate.gateway.control"):
        for number in range(100):
            advising.look(number * EVERY_S)
    lines = [record for record in caplog.records if "advises to move" in record.getMessage()]
    assert len(lines) == advising.control.moves.__len__() == sum(advising.moved.values())
    assert len(lines) <= 6 + 6 + 2 + 8, "no more than the way to the bounds, though the load goes on"
    figures = advising.figures()
    assert (figures.decides, figures.in_force["lookahead"]) == (False, 2)
    assert advising.control.values[Knob.LOOKAHEAD] == 0
    assert Admission().strictness == at.requests.admission.strictness
