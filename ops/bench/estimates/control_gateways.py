"""Benchmark of the control loop under overload, with one gateway and with several that share a queue.

On virtual time: the published setting dist_shift, sped up to `LOAD` times what its machine serves (all
requests, over the time that it takes for them with the loop off), with the loop off, with its advice, and
acting. Several gateways share the queue in a Redis of its own, by the scripts
that serve, and each tenant's requests come in by one of them; one gateway decides in the loop. A request that
is refused has missed its targets. Acting, `LEAST_IN_TIME` of all that came are to be served in time, and
advice is to change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gateway.flow.control_rules import ControlMode, Move
from ops.bench.estimates.control import POLICY, ControlCase, dist_shift, most_reversals
from ops.bench.estimates.shared_gateways import SharedPool
from ops.reporting import table
from ops.simulate.control.steering import Steering
from ops.simulate.pool import SimulatedPool
from ops.simulate.records import Records
from ops.simulate.slo import SloLimits
from ops.simulate.traffic.requests import Sped

LOAD = 1.25
LEAST_IN_TIME = 0.65
INSTANTS = ("dispatched_s", "first_s", "last_s")

Report = dict[str, Any]


def run(
    slo: SloLimits,
    gateways: int,
    client: Any = None,
    *,
    limit: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Report:
    """`client`: a synchronous one, of a Redis of its own; only several gateways need it. `limit`: the first
    requests alone."""
    case = overload(slo, limit)
    records: dict[ControlMode, Records] = {}
    moves: list[Move] = []
    deciding: list[str] = []
    for mode in ControlMode:
        progress(f"{gateways} gateways, {mode.value}")
        pool, loops = served(case, mode, gateways, client)
        records[mode] = pool.records
        if mode is ControlMode.ACTING:
            moves = loops[0].moves
            deciding = [line for each in loops for line in getattr(each, "lines", [])]
    off, advice = records[ControlMode.OFF], records[ControlMode.ADVICE]
    in_time = {mode.value: _in_time(case, each) for mode, each in records.items()}
    changes_nothing = all(getattr(off, name) == getattr(advice, name) for name in INSTANTS)
    return {
        "case": case.name,
        "machine": case.machine.name,
        "slo": str(case.slo),
        "gateways": gateways,
        "requests": len(off),
        "load": max(off.last_s) / max(off.arrival_s),
        "capacity_per_s": len(off) / max(off.last_s),
        "in_time": in_time,
        "refused": sum(records[ControlMode.ACTING].refused),
        "moves": len(moves),
        "knobs": sorted({move.knob.value for move in moves}),
        "most_reversals_a_minute": most_reversals(moves),
        "who_decides": deciding,
        "advice_changes_nothing": changes_nothing,
        "ok": changes_nothing and in_time["acting"] >= LEAST_IN_TIME and most_reversals(moves) <= 1,
    }


def overload(slo: SloLimits, limit: int | None = None) -> ControlCase:
    """`LOAD` times what the machine serves; `limit`: the first requests alone."""
    case = dist_shift(slo)
    if limit is not None:
        case = replace(case, source=Sped(case.source, limit=limit))
    records = served(case, ControlMode.OFF, 1, None)[0].records
    speed = LOAD * max(records.arrival_s) / max(records.last_s)
    return replace(case, source=Sped(case.source, speed=speed))


def served(
    case: ControlCase, mode: ControlMode, gateways: int, client: Any
) -> tuple[SimulatedPool, list[Steering]]:
    """One run, and the loops of its gateways."""
    foresees = mode is not ControlMode.OFF
    if gateways == 1:
        steering = Steering(mode, case.slo)
        watch = steering.watch if foresees else None
        pool = SimulatedPool(POLICY, case.machine, prefix_caching=False, watch=watch)
        pool.run(case.source)
        return pool, [steering]
    pool = SimulatedPool(POLICY, case.machine, prefix_caching=False)
    shared = SharedPool(POLICY, pool, client, mode, case.slo, gateways)
    pool.watched_by(shared.watch(foresees=foresees))
    pool.run(case.source)
    return pool, list(shared.loops.values())


def _in_time(case: ControlCase, records: Records) -> float:
    return sum(case.slo.met(records, row) for row in range(len(records))) / len(records)


def show(report: Report) -> None:
    """The tables for people."""
    table(
        f"{report['case']}, {report['requests']:,} requests, {report['load']:.2f} times what"
        f" {report['machine']} serves ({report['capacity_per_s']:.2f} a second); share of all that met"
        f" {report['slo']}",
        ("gateways", *(mode.value for mode in ControlMode), "refused, acting", "moves"),
        [
            (
                str(report["gateways"]),
                *(f"{100 * report['in_time'][mode.value]:.1f} %" for mode in ControlMode),
                str(report["refused"]),
                str(report["moves"]),
            )
        ],
    )
    for line in report["who_decides"]:
        print(line)
    advice = "nothing" if report["advice_changes_nothing"] else "SOMETHING"
    print(
        f"{'ok    ' if report['ok'] else 'NOT OK'} at least {100 * LEAST_IN_TIME:g} % in time, at most"
        f" {report['most_reversals_a_minute']} reversals a minute; advice changed {advice}"
    )
