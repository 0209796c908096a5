"""Estimates of a request's wait, times, output length and cost.

Reads the forecast off the surface of `forecast_cache.py`, corrects it by earlier requests
(`engine/forecast/calibration.py`), and prices it.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence

from engine.entry import QueueEntry
from engine.forecast.calibration import REDEEMED_BURST_S, Bucket, Calibration, Kind, bucket_of
from engine.forecast.length.length import LengthForecast
from engine.forecast.wait.forecast import Forecast, not_before
from engine.forecast.wait.picture import QUANTILES, AnswerLength
from engine.forecast.wait.replayed_engine import EngineLoad
from engine.messages import TIER_RANKS, Snapshot, StepTime
from engine.step_time.model import PRIOR, predict_decodes_s
from gateway.budget.lease import predicted_gpu_ms
from gateway.domain.call import Call
from gateway.domain.estimate import Estimate, Promise, Times, calibrate
from gateway.estimates.displacement import Displacement, displacement
from gateway.estimates.engine_load import engine_loads
from gateway.estimates.forecast_cache import ForecastCache, Promised, Size, Submit, nothing_promised
from gateway.estimates.overdue import Overdue, WatchedWait
from gateway.estimates.service_rate import ServiceRate
from gateway.estimates.step_time_scale import StepTimeScale
from gateway.flow.controller import FlowController, Ticket
from gateway.statistics import LEARNED_PER_S, EvenSample
from gateway.upstream.base import Upstream, takes_turns
from tenants.pricing.pricing import PriceBook, check_counts
from tenants.types import Tier

JUDGED_PER_S = 20.0
SURE = 3.0
"""A forecast whose 90th percentile is at most so many times its median says more of a request than what its
tenant's answers are like."""

log = logging.getLogger("fairgate.gateway.estimates")


class Estimator:
    """One writer of the length forecast. Use from one event loop."""

    def __init__(
        self,
        *,
        flow: FlowController,
        upstreams: Collection[Upstream],
        lengths: LengthForecast,
        prices: Callable[[], PriceBook],
        model: str,
        cache_s: float,
        note: str = "",
        submit: Submit | None = None,
        promised: Promised = nothing_promised,
        stopwatch: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`model`: the one that all upstreams serve; `note` is appended to every forecast's basis;
        `submit`: to the process that replays; `promised`: outstanding quotes; `stopwatch` times the replays
        on the event loop."""
        self.lengths = lengths
        self.observed = 0
        self.calibration = Calibration()
        self._upstreams = upstreams
        self.prices = prices
        """Those of now."""
        self._model = model
        self.is_enabled = True
        """Whether requests get estimates, and replays run. May change at any time."""
        self._note = note
        self._scales: defaultdict[str, StepTimeScale] = defaultdict(StepTimeScale)
        self.forecast_cache = ForecastCache(
            flow,
            lambda: engine_loads(flow, upstreams, self._step_time),
            self._lengths,
            every_s=cache_s,
            submit=submit,
            promised=promised,
            stopwatch=stopwatch,
        )
        self._flow = flow
        self._overdue = Overdue()
        self.service_rate = ServiceRate()
        self._judged = EvenSample(JUDGED_PER_S)
        self._counted = EvenSample(JUDGED_PER_S)
        self._learned = EvenSample(LEARNED_PER_S)
        self._latest: tuple[Snapshot, StepTime, int] | None = None

    # ------------------------------------------------------------ lengths

    def predicted_output_tokens(self, call: Call, quantile: float = 0.5, emitted_tokens: int = 0) -> int:
        """The length of one of the call's sequences, by default the median, given that it has emitted so
        much and goes on."""
        return self.predicted_lengths(call, (quantile,), emitted_tokens)[0]

    def predicted_lengths(self, call: Call, quantiles: Sequence[float], emitted_tokens: int = 0) -> list[int]:
        if call.sampling.ignore_eos or not call.max_tokens:
            # What emits nothing takes a step of an engine all the same.
            return [max(1, call.max_tokens)] * len(quantiles)
        tenant_id = call.principal.tenant_id
        return self.lengths.quantiles(
            tenant_id, self._model, quantiles, emitted_tokens, call.max_tokens, call.traits
        )

    def predicted_gpu_ms(self, call: Call, output_tokens: int) -> int:
        """With `output_tokens` over all sequences, beside what runs now."""
        step_time, width = self._step_time_now()
        tokens_each = -(-output_tokens // call.sequences)
        return sum(
            predicted_gpu_ms(step_time, width, len(call.prompt_of(index)), tokens_each)
            for index in range(call.sequences)
        )

    def stream_tokens_per_s(self) -> float:
        """Of one sequence beside what runs now."""
        step_time, width = self._step_time_now()
        return 1 / predict_decodes_s(step_time, width, 0)

    @property
    def step_time(self) -> StepTime:
        """At the engines' real pace."""
        return self._step_time_now()[0]

    def _step_time_now(self) -> tuple[StepTime, int]:
        """The step-time model of a serving upstream, and how many sequences it runs."""
        for upstream in self._upstreams:
            snapshot = upstream.snapshot
            if snapshot is None:
                continue
            if self._latest is None or self._latest[0] is not snapshot:
                self._latest = snapshot, self._adjusted(upstream, snapshot), max(1, len(snapshot.running))
            return self._latest[1:]
        return PRIOR, 1

    def learn(self, call: Call, output_tokens: int, now_s: float) -> None:
        """One sequence ended by itself, or at its `max_tokens`. All are counted; of many, some
        `LEARNED_PER_S` are learned from by what their requests said of themselves."""
        if not call.sampling.ignore_eos and call.max_tokens:
            self.lengths.observe(
                call.principal.tenant_id,
                self._model,
                output_tokens,
                call.traits,
                judge=self._learned.takes(now_s),
            )
            self.observed += 1

    def coming(self, call: Call, now_s: float, lengths: tuple[int, int]) -> None:
        """A request has its estimate and is about to be queued; `lengths`: p50 and p90 of one sequence. Until
        it is (`arrived`), or will not be (`gone`), later estimates count it."""
        if not self.is_enabled:
            return
        p50, p90 = lengths
        count = call.sequences
        entry = QueueEntry(
            entry_id=call.request_id,
            tenant_id=call.principal.tenant_id,
            arrived_s=now_s,
            input_tokens=call.input_tokens * call.choices,
            predicted_output_tokens=p50 * count,
            tier=TIER_RANKS[call.tier],
            weight=call.principal.weight,
            predicted_high_tokens=p90 * count,
        )
        kv_tokens = entry.input_tokens + entry.predicted_output_tokens
        is_exact = call.sampling.ignore_eos
        self.forecast_cache.coming(Ticket(entry, count, kv_tokens, call.max_tokens, is_exact))

    def gone(self, request_id: str) -> None:
        """The request will not be queued. Idempotent."""
        self.forecast_cache.on_the_way.remove(request_id)

    def arrived(self, entry: QueueEntry) -> None:
        if self.is_enabled:
            self.forecast_cache.arrived(entry)

    def watch(self, now_s: float) -> None:
        """Takes the engines' latest snapshots, and replays where that is due. Call about twenty times a
        second, beside the requests."""
        self._latest = None
        for upstream in self._upstreams:
            self._scales[upstream.replica_id].see(upstream.snapshot)
        self._overdue.look(now_s, self._waits, self.calibration)
        self.service_rate.see(now_s, self._flow.tenants.served_cost, waits=self._flow.wants_more)
        if self.is_enabled:
            self.forecast_cache.refresh(now_s)

    def _waits(self, waiting: WatchedWait) -> bool:
        """In the tier of which it was told."""
        ticket = self._flow.queue.ticket(waiting.request_id)
        return ticket is not None and ticket.entry.tier == waiting.promise.bucket.tier

    # ------------------------------------------------------------ estimates

    def of_call(
        self, call: Call, arrived_s: float, lengths: tuple[int, int] | None = None
    ) -> Estimate | None:
        """The estimate made on arrival; `lengths`: p50 and p90 of one sequence's output, where they are
        known. None where estimates are off, and where forecasting fails: that never fails a request."""
        if not self.is_enabled:
            return None
        principal = call.principal
        size = Size(
            call.input_tokens,
            call.sequences,
            call.choices,
            call.max_tokens,
            call.sampling.ignore_eos,
            call.traits,
        )
        try:
            return self.estimate(
                call.model,
                principal.tenant_id,
                principal.weight,
                call.tier,
                size,
                arrived_s,
                lengths if call.sequences == 1 else None,
            )
        except Exception:
            log.exception("no estimate for request %s", call.request_id)
            return None

    def estimate(
        self,
        model: str,
        tenant_id: str,
        weight: float,
        tier: Tier,
        size: Size,
        now_s: float,
        output_tokens: tuple[int, int] | None = None,
    ) -> Estimate:
        """A forecast with its price. `model` is the name that was asked for, which has the price;
        `output_tokens`: p50 and p90 of its longest sequence, where they are known.

        Raises `UnknownPrice`.
        """
        if output_tokens is None:
            output_tokens = self._output_tokens(tenant_id, size)
        raw = self.forecast_cache.read(tenant_id, weight, TIER_RANKS[tier], size, output_tokens, now_s)
        return self._priced(model, tenant_id, tier, size, raw, "plain", now_s)

    def offers(
        self, model: str, tenant_id: str, weight: float, tiers: Sequence[Tier], size: Size, now_s: float
    ) -> dict[Tier, Estimate]:
        """For a quote: as `estimate`, for several tiers, from a replay for this request alone where there is
        time for one. Raises `UnknownPrice`."""
        output_tokens = self._output_tokens(tenant_id, size)
        ranks = [TIER_RANKS[tier] for tier in tiers]
        found = self.forecast_cache.replay_for(tenant_id, weight, ranks, size, output_tokens, now_s)
        kind: Kind = "together" if self.forecast_cache.own_quotes(tenant_id, now_s) else "binding"
        return {
            tier: self._priced(model, tenant_id, tier, size, raw, kind, now_s)
            for tier, raw in zip(tiers, found, strict=True)
        }

    def binding_tiers(self) -> list[str]:
        """Those whose next quote binds, also where its request has to wait."""
        return [
            tier
            for tier, rank in TIER_RANKS.items()
            if self.calibration.has_learned(Bucket("binding", False, rank, 1))
        ]

    def displacement(self, tenant_id: str, tier: Tier, sequences: int, output_tokens: int) -> Displacement:
        return displacement(
            tenant_id,
            TIER_RANKS[tier],
            sequences,
            output_tokens,
            self._flow.queue.tickets(),
            self._flow.in_flight,
            sum(
                upstream.ready.max_sequences
                for upstream in self._upstreams
                if takes_turns(upstream) and upstream.ready
            ),
        )

    def waits(self, request_id: str, estimate: Estimate | None, arrived_s: float) -> WatchedWait | None:
        """A request is queued, and teaches when it has waited longer than it was told. None: it does not."""
        promise = None if estimate is None else estimate.promise
        if promise is None or not promise.is_tracked or promise.bucket.kind == "together":
            return None
        assert estimate is not None
        if promise.bucket.kind == "plain" and not self._judged.takes(arrived_s):
            return None
        return self._overdue.add(request_id, estimate, promise, arrived_s)

    def judge(
        self, estimate: Estimate, times: Times, output_tokens: int | None, waiting: WatchedWait | None = None
    ) -> None:
        """Learns from a request that is over; without `output_tokens` it was cut. At most `JUDGED_PER_S`
        plain requests are learned from, of those that may be, and as many counted, evenly chosen. `waiting`:
        what `waits` returned."""
        promise = estimate.promise
        if promise is None:
            return
        ended_s = times.ended_s if times.ended_s is not None else times.arrived_s
        is_plain = promise.bucket.kind == "plain"
        is_counted = not is_plain or self._counted.takes(ended_s)
        is_learned = waiting is not None or (
            promise.is_tracked and (not is_plain or self._judged.takes(ended_s))
        )
        if promise.bucket.kind == "together":
            is_learned = self.calibration.is_tracked(promise.bucket, ended_s, REDEEMED_BURST_S)
        if is_counted or is_learned:
            calibrate(
                self.calibration,
                estimate,
                times,
                output_tokens,
                is_counted=is_counted,
                is_learned=is_learned,
                taught=() if waiting is None else waiting.taught,
            )

    def _priced(
        self, model: str, tenant_id: str, tier: Tier, size: Size, raw: Forecast, kind: Kind, now_s: float
    ) -> Estimate:
        bucket = bucket_of(raw, TIER_RANKS[tier], is_exact=size.is_exact, kind=kind)
        told = self.calibration.correct(raw, bucket)
        if raw.must_serve and (rate := self.service_rate.cost_per_s):
            told = not_before(told, raw.must_serve / rate)
        price = self.prices().entry(model, tier).cost_nanousd
        count, tokens = size.sequences, size.input_tokens
        most = size.max_tokens * count
        check_counts(tokens, 0, most)
        total = (min(most, raw.output_tokens[0] * count), min(most, raw.output_tokens[1] * count))
        return Estimate(
            wait_s=told.wait_s,
            ttft_s=told.ttft_s,
            tpot_s=told.tpot_s,
            e2e_s=told.e2e_s,
            output_tokens=total,
            cost_nanousd=(price(tokens, 0, total[0]), price(tokens, 0, total[1])),
            max_cost_nanousd=price(tokens, 0, most),
            tokens_ahead=raw.tokens_ahead,
            basis=raw.basis + self._note,
            samples=self.lengths.samples(tenant_id, self._model),
            saturated=raw.saturated,
            is_measured=raw.samples > 0,
            promise=Promise(
                bucket,
                raw,
                is_tracked=kind != "plain" or self.calibration.is_tracked(bucket, now_s),
                is_learned=kind == "plain" or (raw.samples > 0 and self.calibration.has_learned(bucket)),
            ),
        )

    def _output_tokens(self, tenant_id: str, size: Size) -> tuple[int, int]:
        if size.is_exact or not size.max_tokens:
            return max(1, size.max_tokens), max(1, size.max_tokens)
        exponent = 1 / size.sequences
        p50, p90 = self.lengths.quantiles(
            tenant_id,
            self._model,
            (0.5**exponent, 0.9**exponent),
            max_tokens=size.max_tokens,
            features=size.traits,
        )
        return p50, max(p50, p90)

    def _lengths(self, tickets: Sequence[Ticket], engines: Sequence[EngineLoad]) -> dict[str, AnswerLength]:
        """Of one sequence of each request: by what its engine foresees, by its own forecast where that is a
        sure one, else by what its tenant's answers are like."""
        known: dict[str, AnswerLength] = {}
        unsure: dict[tuple[str, int, int], AnswerLength] = {}
        flights = {
            flight.entry.entry_id: flight.emitted_tokens for load in engines for flight in load.flights
        }
        dispatched = self._flow.in_flight
        in_flight = [flight for entry_id in flights if (flight := dispatched.get(entry_id)) is not None]
        for ticket, foreseen in [
            *((ticket, None) for ticket in tickets),
            *((flight.ticket, flight.foreseen_tokens) for flight in in_flight),
        ]:
            own = ticket.entry
            median, high = foreseen or (own.predicted_output_tokens, own.predicted_high_tokens)
            if ticket.is_exact:
                length = AnswerLength(ticket.max_tokens)
            elif foreseen is not None or 0 < high <= SURE * median:
                count = ticket.sequences
                length = AnswerLength(ticket.max_tokens, median / count, high / count)
            else:
                key = own.tenant_id, flights.get(own.entry_id, 0), ticket.max_tokens
                if (like := unsure.get(key)) is None:
                    quantiles = self.lengths.quantiles(key[0], self._model, QUANTILES, key[1])
                    like = unsure[key] = AnswerLength(ticket.max_tokens, quantiles=quantiles)
                length = like
            known[own.entry_id] = length
        return known

    def _step_time(self, upstream: Upstream) -> StepTime:
        """At the engine's real pace."""
        return self._adjusted(upstream, upstream.snapshot)

    def _adjusted(self, upstream: Upstream, snapshot: Snapshot | None) -> StepTime:
        return PRIOR if snapshot is None else self._scales[upstream.replica_id].adjust(snapshot)
