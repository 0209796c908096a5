"""Admission of a simulated gateway, by the code that serves: refuses what would miss its targets."""

from __future__ import annotations

from collections.abc import Sequence

from engine.entry import QueueEntry
from engine.forecast.calibration import Bucket, Calibration, bucket_of
from engine.forecast.wait.forecast import Figures, Forecast
from engine.forecast.wait.picture import AnswerLength
from engine.forecast.wait.replayed_engine import EngineLoad
from gateway.dispatch.admission import TargetGate
from gateway.estimates.engine_load import flights_of
from gateway.estimates.forecast_cache import ForecastCache, Size
from gateway.flow.controller import InFlight, Ticket
from ops.simulate.pool import DECLARED_TOKENS, SimulatedPool
from ops.simulate.predictions import Learned
from ops.simulate.slo import SloLimits
from ops.simulate.traffic.requests import SimulatedRequest

REPLAY_EVERY_S = 1.0


class SimulatedAdmission(TargetGate):
    """For one run: `PoolObserver.admits`."""

    def __init__(self, slo: SloLimits) -> None:
        super().__init__()
        self._slo = slo
        self._targets_s = {"ttft": slo.ttft_s, "e2e": slo.e2e_s}
        self._calibration = Calibration()
        self._predictions = Learned()
        """Separate, because a forecast keeps state of its queries and advice must change nothing."""
        self._forecasts: dict[int, tuple[SimulatedRequest, Bucket, Forecast, Figures]] = {}
        """Of admitted requests, by row: the forecast before and after calibration."""
        self._pool: SimulatedPool | None = None
        self._cache: ForecastCache | None = None

    def admits(self, pool: SimulatedPool, request: SimulatedRequest) -> bool:
        if self._cache is None:
            self._pool = pool
            # Replays are free for a simulated gateway: their duration here is not that of its machine.
            self._cache = ForecastCache(
                pool.flow, self._loads, _lengths, every_s=REPLAY_EVERY_S, stopwatch=lambda: 0.0
            )
        cache, now_s = self._cache, pool.now_s
        median, high = self._predictions.predict(request)
        size = Size(request.input_tokens, 1, 1, DECLARED_TOKENS, is_exact=False)
        cache.refresh(now_s)
        raw = cache.read(request.tenant, request.weight, request.tier, size, (median, high), now_s)
        bucket = bucket_of(raw, request.tier, is_exact=False)
        corrected = self._calibration.correct(raw, bucket)
        if self.keeps_out(corrected, self._targets_s, now_s) is not None:
            return False
        self._forecasts[len(pool.records) - 1] = request, bucket, raw, corrected
        terms = median, request.tier, request.weight, high
        cache.arrived(QueueEntry("", request.tenant, now_s, request.input_tokens, *terms))
        return True

    def ended(self, pool: SimulatedPool, row: int) -> None:
        """`PoolObserver.on_ended`: compares the forecast with the outcome."""
        records = pool.records
        request, bucket, raw, corrected = self._forecasts.pop(row)
        self._predictions.ended(request)
        took_s = {"ttft": records.ttft_s(row), "e2e": records.e2e_s(row)}
        self.learn(self._targets_s, took_s, pool.now_s)
        arrived_s = records.arrival_s[row]
        wait_s = records.dispatched_s[row] - arrived_s
        self._calibration.observe(
            bucket, raw, corrected, {"wait": wait_s, "ttft": took_s["ttft"], "e2e": took_s["e2e"]}
        )

    def _loads(self) -> list[EngineLoad]:
        assert self._pool is not None
        pool = self._pool
        by_replica: dict[str, list[InFlight]] = {}
        for flight in pool.flow.in_flight:
            by_replica.setdefault(flight.replica_id, []).append(flight)
        window = pool.flow.placement.window
        return [
            EngineLoad(
                replica_id=member.replica_id,
                step_time=pool.machine.step_time,
                max_sequences=member.size.max_sequences,
                max_batched_tokens=member.engine.table.max_batched_tokens,
                window_sequences=window.places(member.size.max_sequences),
                window_kv_tokens=int(member.size.kv_tokens * window.kv_window),
                decode_slots=member.engine.table.most_decodes,
                flights=flights_of(
                    by_replica.get(member.replica_id, []), member.engine.core.snapshot(member.replica_id)
                ),
                pauses=member.size.pauses,
            )
            for member in pool.members
        ]


def _lengths(tickets: Sequence[Ticket], engines: Sequence[EngineLoad]) -> dict[str, AnswerLength]:
    waiting = (ticket.entry for ticket in tickets)
    running = (flight.entry for load in engines for flight in load.flights)
    return {
        entry.entry_id: AnswerLength(
            DECLARED_TOKENS, entry.predicted_output_tokens, entry.predicted_high_tokens
        )
        for entry in (*waiting, *running)
    }
