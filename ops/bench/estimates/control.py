"""Benchmark of the control loop against the best fixed settings, and of its reversals, on virtual time.

In each segment attainment with the loop may be at most a point below that segment's best fixed setting.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from engine.messages import StepTime
from gateway.flow.control_rules import REVERSAL_S, ControlMode, Move
from gateway.flow.deadline_check import LENIENT, STRICT
from gateway.flow.knobs import Knob
from gateway.flow.window import WindowRule
from ops.reporting import table
from ops.simulate.control.steering import Steering
from ops.simulate.machines.machines import Machine, profile_machine
from ops.simulate.pool import KV_WINDOW, LOOKAHEAD_SEQUENCES, SimulatedPool
from ops.simulate.records import Records
from ops.simulate.slo import SloLimits
from ops.simulate.traffic.requests import SimulatedRequest, Source

POLICY = "vtc"
MOST_BELOW = 0.01
DIST_SHIFT = "dist_shift"
DIST_SHIFT_SEGMENT_S = 300.0
TRACE_SEGMENT_S = 600.0
SEED = 42
A10G_LLAMA_2_7B = profile_machine(
    "Llama-2-7B on an A10G, 10,000 tokens of KV cache",
    # 13.5 GB of weights at 600 GB/s are 22 ms, and 8 ms go by between steps; a token is 14 GFLOP at some
    # 70 TFLOP/s; the KV of about 400 tokens, 0.5 MB each, is 0.35 ms for a decoding sequence.
    StepTime(30e-3, 0.2e-3, 8e-9, 0.35e-3, samples=0, relative_error=0.0),
    kv_tokens=10_000,
    max_sequences=128,
    max_batched_tokens=1024,
    context_tokens=4096,
)

Report = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Setting:
    lookahead: int = LOOKAHEAD_SEQUENCES
    strictness: float = 0.0

    def __str__(self) -> str:
        return f"{self.lookahead} ahead, strictness {self.strictness:g}"


REST = Setting()
SETTINGS = (
    Setting(lookahead=0),
    REST,
    Setting(lookahead=8),
    Setting(strictness=LENIENT),
    Setting(strictness=1.0),
    Setting(strictness=STRICT),
)


@dataclass(frozen=True, slots=True)
class ControlCase:
    name: str
    source: Source
    machine: Machine
    replicas: int
    segment_s: float
    slo: SloLimits
    policy: str = POLICY


@dataclass(frozen=True, slots=True)
class Drawn:
    """Implements `Source` for requests drawn here."""

    name: str
    requests: tuple[SimulatedRequest, ...]
    has_prefixes: bool = False

    def __iter__(self) -> Iterator[SimulatedRequest]:
        return iter(self.requests)


def even_times(rng: random.Random, per_s: float, seconds: float) -> list[float]:
    first_s = rng.random() / per_s
    return [first_s + number / per_s for number in range(int((seconds - first_s) * per_s) + 1)]


def dist_shift(slo: SloLimits) -> ControlCase:
    """Setting of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024; repository
    Ying1123/VTC-artifact, Apache License 2.0): rates, lengths and KV room as published, with own arrivals."""
    rng = random.Random(SEED)
    rates_per_s = {"client-0": (0.5, 1.0, 0.5), "client-1": (2.0, 1.0, 1.5)}
    requests = [
        SimulatedRequest(number * DIST_SHIFT_SEGMENT_S + at_s, client, 256, 256)
        for client, rates in rates_per_s.items()
        for number, per_s in enumerate(rates)
        for at_s in even_times(rng, per_s, DIST_SHIFT_SEGMENT_S)
        if not (client == "client-0" and number == 0 and int(at_s / 60) % 2)
    ]
    drawn = Drawn(DIST_SHIFT, tuple(sorted(requests, key=lambda request: request.arrival_s)))
    return ControlCase(DIST_SHIFT, drawn, A10G_LLAMA_2_7B, 1, DIST_SHIFT_SEGMENT_S, slo)


def run(cases: Sequence[ControlCase], progress: Callable[[str], None] = lambda line: None) -> Report:
    """Raises `BadTrace`, ValueError."""
    rows = [_case(case, progress) for case in cases]
    return {"cases": rows, "ok": all(row["ok"] for row in rows)}


def _case(case: ControlCase, progress: Callable[[str], None]) -> Report:
    shares: dict[Setting | None, list[float]] = {}
    rest = Records()
    for setting in SETTINGS:
        progress(f"{case.name}, {setting}")
        pool, _ = served(case, ControlMode.OFF, setting)
        shares[setting] = attainment(case, pool.records)
        if setting == REST:
            rest = pool.records
    progress(f"{case.name}, advice")
    advised, advice = served(case, ControlMode.ADVICE)
    progress(f"{case.name}, acting")
    pool, moves = served(case, ControlMode.ACTING)
    shares[None] = attainment(case, pool.records)
    instants = ("dispatched_s", "first_s", "last_s")
    changes_nothing = all(getattr(advised.records, name) == getattr(rest, name) for name in instants)
    return {
        "case": case.name,
        "machine": case.machine.name,
        "replicas": case.replicas,
        "slo": str(case.slo),
        "requests": len(pool.records),
        "advised_moves": len(advice),
        **judge(shares, case, moves, changes_nothing=changes_nothing),
    }


def judge(
    shares: Mapping[Setting | None, Sequence[float]],
    case: ControlCase,
    moves: Sequence[Move],
    *,
    changes_nothing: bool,
) -> Report:
    """`shares`: attainment by segment, for each fixed setting and (None) with the loop acting."""
    segments: list[Report] = []
    for number, attained in enumerate(shares[None]):
        fixed = {str(setting): shares[setting][number] for setting in SETTINGS}
        best = max(fixed, key=lambda setting: fixed[setting])
        segments.append(
            {
                "from_s": number * case.segment_s,
                "fixed": fixed,
                "best_fixed": best,
                "acting": attained,
                "below_best": fixed[best] - attained,
            }
        )
    reversals = most_reversals(moves)
    return {
        "segments": segments,
        "moves": len(moves),
        "knobs": sorted({move.knob.value for move in moves}),
        "most_reversals_a_minute": reversals,
        "advice_changes_nothing": changes_nothing,
        "ok": changes_nothing
        and reversals <= 1
        and all(segment["below_best"] <= MOST_BELOW for segment in segments),
    }


def served(case: ControlCase, mode: ControlMode, setting: Setting = REST) -> tuple[SimulatedPool, list[Move]]:
    steering = Steering(mode, case.slo)
    steering.admission.strictness = setting.strictness
    # Forecasts are made only where something depends on them.
    foresees = mode is not ControlMode.OFF or setting.strictness > 0
    pool = SimulatedPool(
        case.policy,
        case.machine,
        replicas=case.replicas,
        prefix_caching=case.source.has_prefixes,
        watch=steering.watch if foresees else None,
        flow={"window": WindowRule(setting.lookahead, KV_WINDOW)},
    )
    pool.run(case.source)
    return pool, steering.moves


def attainment(case: ControlCase, records: Records) -> list[float]:
    count = 1 + int(max(records.arrival_s) // case.segment_s)
    came, met = [0] * count, [0] * count
    for row, arrival_s in enumerate(records.arrival_s):
        segment = int(arrival_s // case.segment_s)
        came[segment] += 1
        met[segment] += case.slo.met(records, row)
    return [good / max(1, all_) for good, all_ in zip(met, came, strict=True)]


def most_reversals(moves: Sequence[Move]) -> int:
    """The most times that any knob but admission turned back within a minute."""
    by_knob: dict[Knob, list[Move]] = {}
    for move in moves:
        if move.knob is not Knob.ADMISSION:
            by_knob.setdefault(move.knob, []).append(move)
    turned_s = sorted(
        later.at_s
        for its in by_knob.values()
        for earlier, later in pairwise(its)
        if (later.after > later.before) != (earlier.after > earlier.before)
    )
    return max((sum(at_s <= t < at_s + REVERSAL_S for t in turned_s) for at_s in turned_s), default=0)


def show(report: Report) -> None:
    for case in report["cases"]:
        table(
            f"{case['case']}: {case['requests']:,} requests, {case['machine']} x {case['replicas']}; share"
            f" that met {case['slo']}",
            ("from, s", *map(str, SETTINGS), "acting", "below the best"),
            [
                (
                    f"{segment['from_s']:g}",
                    *(f"{100 * share:.2f} %" for share in segment["fixed"].values()),
                    f"{100 * segment['acting']:.2f} %",
                    f"{100 * segment['below_best']:.2f} points",
                )
                for segment in case["segments"]
            ],
        )
        print(
            f"{'ok    ' if case['ok'] else 'NOT OK'} {case['moves']} moves of"
            f" {', '.join(case['knobs']) or 'nothing'}, at most {case['most_reversals_a_minute']} reversals a"
            f" minute; advice ({case['advised_moves']} moves) changed"
            f" {'nothing' if case['advice_changes_nothing'] else 'SOMETHING'}"
        )
