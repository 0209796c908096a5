"""Replays recorded traffic with and without a move of the control loop, and says what it was worth.

Three simulations of the same requests, from a warm-up before the move to a window after it, on what-if's
simulator: with every move that was made meanwhile (its figures beside those that were recorded are the
simulator's own error), with all knobs held as before the move, and with the move alone. What the first falls
short of what was recorded is added to the two others, as what-if does (`figures/shortfall.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from engine.scheduling.policy import UnknownPolicy
from gateway.flow.control_rules import Knob
from ops.reporting import plain
from ops.simulate.budget import SimulatedBudget
from ops.simulate.control.admission import SimulatedAdmission
from ops.simulate.control.knobs import setters_of
from ops.simulate.figures.stated_error import Baseline
from ops.simulate.origin import ReplayedServer
from ops.simulate.pool import PoolObserver, PoolStuck, SimulatedPool
from ops.simulate.predictions import Learned
from ops.simulate.recorded import Recorded, records_of
from ops.simulate.records import Records
from ops.simulate.slo import SloLimits
from ops.simulate.traffic.requests import BadTrace
from ops.simulate.worth.knobs import not_simulated, put
from ops.simulate.worth.paths import KnobPath, paths_of
from ops.simulate.worth.verdict import MoveVerdict, ReplayError, WaitFigures, judged
from tenants.moves.move import StoredMove

WARM_UP_S = 300.0
"""Before the move: what waits and runs at its instant has come by then."""
LEAST_REQUESTS = 20
"""After the move; fewer say nothing of a share or of a p90."""
ADDED = "with or without a move"
"""Seed of what is added to simulated times: the same in both."""


class CannotReplay(Exception):
    """The message says why."""


@dataclass(frozen=True, slots=True)
class MoveWorth:
    """What one move was worth, or why that is not known."""

    move: StoredMove
    requests: int = 0
    """Recorded after the move, within the window."""
    recorded: WaitFigures | None = None
    as_it_was: WaitFigures | None = None
    without: WaitFigures | None = None
    with_it: WaitFigures | None = None
    error: ReplayError | None = None
    verdict: MoveVerdict | None = None
    """None: not known."""
    why: str = ""
    """The figure that decides, or why nothing is known."""
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """For `--json`, without the move."""
        figures = {
            name: None if (each := getattr(self, name)) is None else each.as_json()
            for name in ("recorded", "as_it_was", "without", "with_it")
        }
        error = None if self.error is None else plain(asdict(self.error))
        verdict = None if self.verdict is None else self.verdict.value
        return {"requests": self.requests, **figures, "error": error} | {
            "verdict": verdict,
            "why": self.why,
            "notes": self.notes,
        }


def worth_of(
    move: StoredMove,
    moves: Sequence[StoredMove],
    recorded: Recorded,
    server: ReplayedServer,
    slo: SloLimits,
    window_s: float,
) -> MoveWorth:
    """Of one move, by what was recorded from `WARM_UP_S` before it on; `moves`: all of that time and model.
    Raises `CannotReplay`."""
    since_us, until_us = span_us(move.at_us, window_s)
    kept = tuple(each for each in recorded.served if since_us <= each.arrived_us < until_us)
    # A request of several sequences counts as many times, as in every simulation.
    after = sum(min(each.sequences, each.output_tokens) for each in kept if each.arrived_us >= move.at_us)
    if after < LEAST_REQUESTS:
        raise CannotReplay(
            f"{after} requests were recorded in the {window_s / 60:g} minutes after it, and {LEAST_REQUESTS}"
            " are needed: take a longer --window, or see that timelines are kept (gateway.timeline_days)"
        )
    if move.knob not in {knob.value for knob in Knob}:
        raise CannotReplay(f"this version of Fairgate knows no knob {move.knob!r}")
    part = replace(recorded, served=kept)
    paths = paths_of(move, moves, since_us, until_us)
    if why := not_simulated(Knob(move.knob), _knobs_of(server)):
        raise CannotReplay(f"a replay does not show what {move.knob} does: {why}")
    ran: list[tuple[KnobPath, Records]] = []

    def run(path: KnobPath) -> Records:
        for each, records in ran:
            if each == path:
                return copy.deepcopy(records)
        ran.append((path, simulated(part, server, slo, path)))
        return copy.deepcopy(ran[-1][1])

    real = records_of(part)
    rows = [row for row in range(len(real)) if real.arrival_s[row] >= (move.at_us - kept[0].arrived_us) / 1e6]
    try:
        alone = run(paths.as_it_was)
        baseline = Baseline.of(real, alone)
        without, with_it = run(paths.without), run(paths.with_it)
    except (UnknownPolicy, BadTrace, PoolStuck, ValueError) as problem:
        raise CannotReplay(f"what served then cannot be simulated: {problem}") from None
    for each in (without, with_it):
        baseline.shortfall.add_to(each, ADDED)
    served, as_it_was, before, after_it = (
        WaitFigures.of(each, rows, slo)
        for each in (_from_line(part, real), baseline.records, without, with_it)
    )
    stated = next((each.error for each in baseline.figures if each.name == "ttft_p90"), None)
    error = ReplayError.of(served, as_it_was, stated)
    verdict, why = judged(before, after_it, error)
    return MoveWorth(
        move, len(rows), served, as_it_was, before, after_it, error, verdict, why, _notes(move, part)
    )


def span_us(at_us: int, window_s: float) -> tuple[int, int]:
    """From when until when requests arrive that a move at that instant is replayed with."""
    return at_us - round(WARM_UP_S * 1e6), at_us + round(window_s * 1e6)


def simulated(recorded: Recorded, server: ReplayedServer, slo: SloLimits, path: KnobPath) -> Records:
    """The recorded requests under the policy that served them, with the knobs along a path. Raises
    `UnknownPolicy`, `PoolStuck`, ValueError."""
    machine, admission = server.machine(), SimulatedAdmission(slo)
    watch = PoolObserver()
    if _refuses(path):  # forecasts take most of the time
        watch = PoolObserver(admits=admission.admits, on_ended=admission.ended)
    pool = SimulatedPool(
        server.policy,
        machine,
        replicas=server.replicas,
        options=server.options({}),
        predictions=Learned(),
        prefix_caching=recorded.has_prefixes,
        watch=watch,
        flow=server.flow(machine, server.replicas),
        budget=partial(SimulatedBudget, begins_s=recorded.begins_s),
    )
    setters = setters_of(pool, admission)
    put(setters, path.start)
    begins_us = recorded.served[0].arrived_us
    for change in path.changes:
        turn: Callable[[], None] = partial(put, setters, {change.knob: change.value})
        pool.at(max(0.0, (change.at_us - begins_us) / 1e6), turn)
    pool.run(recorded)
    return pool.records


def _refuses(path: KnobPath) -> bool:
    """Whether admission refuses what would be late, at any time."""
    values = [path.start.get(Knob.ADMISSION, 0.0)]
    values += [each.value for each in path.changes if each.knob is Knob.ADMISSION]
    return any(value > 0 for value in values)


def _knobs_of(server: ReplayedServer) -> frozenset[Knob]:
    """Those that a simulation of that server has."""
    try:
        pool = SimulatedPool(server.policy, server.machine(), options=server.options({}))
    except (UnknownPolicy, BadTrace, ValueError) as error:
        raise CannotReplay(f"what served then cannot be simulated: {error}") from None
    return frozenset(setters_of(pool, SimulatedAdmission(SloLimits())))


def _from_line(recorded: Recorded, real: Records) -> Records:
    """The recorded times, with waits from the instant on from which they are simulated."""
    found = copy.deepcopy(real)
    found.dispatched_s = records_of(recorded, from_line=True).dispatched_s
    return found


def _notes(move: StoredMove, recorded: Recorded) -> list[str]:
    """What is to be known of the verdict."""
    notes = []
    if not move.is_made:
        notes.append("it was only advised: replayed as if it had been made, the other knobs as they stood")
    refused = sum(each.is_refused for each in recorded.served)
    if refused:
        notes.append(
            f"{refused} requests that were refused as late are replayed, too, with lengths of others: theirs"
            " are not known"
        )
    return notes
