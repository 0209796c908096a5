"""Forecast of a request's first and last token.

A replay of the waiting queue (`replay.py`) with the fitted step-time model as the clock gives the median; the
90th percentile adds the spread of as many answers as go first. Memory pressure beyond the window's is not
seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, expm1, log, sqrt
from statistics import NormalDist

import msgspec

from engine.entry import QueueEntry
from engine.forecast.wait.arrivals import NOTHING_CAME, ArrivalPattern
from engine.forecast.wait.replay import DrawLength, LaneOf, QueueReplay, one_lane
from engine.forecast.wait.replayed_engine import EngineLoad, Flight, ReplayedEngine
from engine.messages import StepTime
from engine.scheduling.order.base import ServiceCountersLike
from engine.scheduling.tiers import TieredQueue
from engine.step_time.model import predict_step_s

__all__ = ["DrawLength", "EngineLoad", "Flight", "Forecast", "forecast", "lognormal_lengths"]

Seconds = tuple[float, float]
"""p50, p90."""

LENGTH_INFLATION = 2.0
"""Lengths of one tenant are alike, and what arrives later varies too: their sum varies
more than that of independent answers."""
REPLAY_ERROR = 0.2
"""Relative standard error of a replay even with many answers ahead: learned lengths are off a little."""
Z90 = 1.2816
_NORMAL = NormalDist()


class Figures(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A forecast's times, in seconds."""

    wait_s: Seconds
    ttft_s: Seconds
    tpot_s: Seconds
    e2e_s: Seconds


class Forecast(msgspec.Struct, frozen=True, gc=False):
    """What to expect of one request, from now on. Pairs are (p50, p90)."""

    wait_s: Seconds
    """Until it is dispatched to an engine."""
    ttft_s: Seconds
    tpot_s: Seconds
    e2e_s: Seconds
    output_tokens: tuple[int, int]
    tokens_ahead: dict[str, int]
    """Cost tokens served before it is dispatched: `own` (of its tenant), `others` (of its tier and
    those below), `higher_tier`. All 0 when it goes at once."""
    basis: str
    samples: int
    """Steps behind the step-time model: the scarcer the samples, the wider the truth."""
    saturated: bool
    """The replay did not reach the request's end: the times are lower bounds."""


def forecast(
    candidate: QueueEntry,
    *,
    queue: TieredQueue,
    counters: ServiceCountersLike,
    engines: Sequence[EngineLoad],
    output_tokens: tuple[int, int],
    now_s: float,
    draw_length: DrawLength | None = None,
    sequences: Mapping[str, int] | None = None,
    kv_tokens: Mapping[str, int] | None = None,
    arrivals: ArrivalPattern = NOTHING_CAME,
    spread: float = 0.7,
    overhead_s: float = 0.0,
    lane_of: LaneOf = one_lane,
) -> Forecast:
    """Replays `queue` with `candidate` added until the candidate's answer is complete.

    `queue` and `counters` are used up: pass clones, the queue's over these counters. A candidate that waits
    in the queue already is forecast from where it stands. `output_tokens` (p50, p90) are the candidate's,
    of its longest sequence. `sequences` names the entries that are more than one sequence, `kv_tokens` what
    entries count in the window where that is not their input + predicted output. `arrivals` go on
    during the replay. `spread` is the standard
    deviation of the logarithm of a length; `overhead_s` is added to the time to the first token; `lane_of`
    says where in its tier's band an entry waits. Without engines the forecast is saturated.
    """
    replay = QueueReplay(
        candidate=candidate,
        queue=queue,
        counters=counters,
        engines=[ReplayedEngine(load, now_s) for load in engines],
        output_tokens=output_tokens[0],
        start_s=now_s,
        draw_length=draw_length or lognormal_lengths(spread),
        sequences=sequences or {},
        kv_tokens=kv_tokens or {},
        future=arrivals.future(now_s),
        lane_of=lane_of,
    )
    replay.run()
    return _conclude(replay, output_tokens, spread, overhead_s)


def lognormal_lengths(spread: float = 0.7) -> DrawLength:
    """Lengths around each entry's own prediction (its median), for lack of anything better. `spread` is the
    standard deviation of the logarithm."""

    def draw(entry: QueueEntry, generated: int, u: float) -> int:
        median = max(1.0, float(entry.predicted_output_tokens))
        above = 1.0 if generated == 0 else 1.0 - _NORMAL.cdf(log(generated / median) / spread)
        quantile = min(max(1.0 - max(above, 1e-6) * (1.0 - u), 1e-9), 1.0 - 1e-9)
        return max(generated + 1, round(median * exp(spread * _NORMAL.inv_cdf(quantile))))

    return draw


def _conclude(
    replay: QueueReplay, output_tokens: tuple[int, int], spread: float, overhead_s: float
) -> Forecast:
    step_times = [engine.load.step_time for engine in replay.engines]
    samples = min((step_time.samples for step_time in step_times), default=0)
    error = min(1.0, max((step_time.relative_error for step_time in step_times), default=1.0))
    start_s = replay.start_s
    dispatched_s = replay.dispatched_s if replay.dispatched_s is not None else replay.now_s
    wait_s = dispatched_s - start_s
    first_s = replay.first_token_s
    if first_s is None:
        first_s = dispatched_s + _alone_s(step_times, replay.candidate.input_tokens, 1)
    if replay.ended_s is not None and output_tokens[0] > 1:
        tpot_s = (replay.ended_s - first_s) / (output_tokens[0] - 1)
    else:
        tpot_s = _busy_step_s(replay, step_times)
    # The sum of n answers of a lognormal length has 1/sqrt(n) of one answer's relative deviation.
    own = expm1(spread * spread) / max(1, replay.completed)
    variance = LENGTH_INFLATION * own + REPLAY_ERROR**2 + error * error
    wait_p90_s = wait_s * (1 + Z90 * sqrt(variance))
    slack = 1 + Z90 * max(0.1, error)
    start_up_s = first_s - dispatched_s + overhead_s
    ttft_s = (wait_s + start_up_s, wait_p90_s + start_up_s * slack)
    tpot = (tpot_s, tpot_s * slack)
    prior = "" if samples else ", step time not measured yet"
    return Forecast(
        wait_s=(wait_s, wait_p90_s),
        ttft_s=ttft_s,
        tpot_s=tpot,
        e2e_s=(
            ttft_s[0] + tpot[0] * (output_tokens[0] - 1),
            ttft_s[1] + tpot[1] * (output_tokens[1] - 1),
        ),
        output_tokens=output_tokens,
        tokens_ahead=replay.ahead if wait_s > 0 else dict.fromkeys(replay.ahead, 0),
        basis=("replay, extrapolated" if replay.is_extrapolated else "replay") + prior,
        samples=samples,
        saturated=replay.dispatched_s is None or (replay.ended_s is None and not replay.is_extrapolated),
    )


def _alone_s(step_times: list[StepTime], tokens: int, sequences: int) -> float:
    return max((predict_step_s(fit, tokens, 0, sequences) for fit in step_times), default=0.0)


def _busy_step_s(replay: QueueReplay, step_times: list[StepTime]) -> float:
    """A decode step with every place taken."""
    return max(
        (
            predict_step_s(
                engine.load.step_time,
                min(engine.load.max_sequences, len(engine.decodes) + 1),
                engine.decode_context,
                min(engine.load.max_sequences, len(engine.decodes) + 1),
            )
            for engine in replay.engines
        ),
        default=0.0,
    )
