"""The published setting dist_shift in overload on virtual time, through one gateway or several.

Several gateways share the queue in a Redis of its own, by the scripts that serve; each tenant's requests come
in by one of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gateway.flow.control_rules import ControlMode
from ops.bench.estimates.control import POLICY, ControlCase, dist_shift
from ops.simulate.control.steering import Steering
from ops.simulate.pool import SimulatedPool
from ops.simulate.slo import SloLimits
from ops.simulate.traffic.requests import Sped
from tests.support.shared_gateways import SharedPool

LOAD = 1.25


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
    pool.watch = shared.watch(foresees=foresees)
    pool.run(case.source)
    return pool, list(shared.loops.values())
