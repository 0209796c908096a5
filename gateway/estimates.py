"""What will this request wait, take and cost?

Builds what the replay needs (the queue's clone, the engines' load, what is in flight) and prices its
answer. A replay costs milliseconds with a long queue, on the event loop, so answers are kept per tier and
tenant for a moment; and as all replays together may take only a fifth of the process, an older answer (of
the tenant, or of another one in its tier) does where that is used up. A kept answer is scaled to the queue
as it has become.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.forecast.arrivals import ArrivalRates
from engine.forecast.length import LengthForecast
from engine.forecast.quote import EngineLoad, Flight, Forecast, forecast
from engine.forecast.step_time import PRIOR, predict_step_s
from engine.messages import TIER_RANKS, RunningSequence, Snapshot, StepTime
from engine.scheduling.order import Entry
from gateway.account.estimate import Estimate
from gateway.flow.controller import FlowController, InFlight
from gateway.lease import predicted_gpu_ms
from gateway.pace import Pace
from gateway.understand import Call
from gateway.upstream.base import Upstream
from tenants.pricing import PriceBook
from tenants.types import Tier

MAX_CACHED = 4096
REST = 4.0
"""After a replay none is wanted for so many times what it took."""
STALE_S = 5.0
"""An older answer is of no use, however busy we are."""
QUOTE_DEBT_S = 0.25
"""A quote may go into debt by so much time before it, too, has to do with an older answer."""

log = logging.getLogger("fairgate.gateway.estimates")


@dataclass(frozen=True, slots=True)
class Size:
    """A request as the forecast sees it."""

    input_tokens: int
    """All prompts."""
    prompts: int
    choices: int
    max_tokens: int
    is_exact: bool

    @property
    def sequences(self) -> int:
        return self.prompts * self.choices


@dataclass(slots=True)
class _Kept:
    """A replay's answer and the circumstances under which it was true."""

    at_s: float
    queued: int
    size: Size
    forecast: Forecast


class Estimates:
    """Forecasts for requests. One writer of the length forecast. Use from one event loop."""

    def __init__(
        self,
        *,
        flow: FlowController,
        upstreams: Sequence[Upstream],
        lengths: LengthForecast,
        prices: Callable[[], PriceBook],
        model: str,
        cache_s: float,
        stopwatch: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`model`: the one that all upstreams serve; `stopwatch` tells what a replay takes."""
        self.lengths = lengths
        self.observed = 0
        """Answers learned from since the start."""
        self.replays = 0
        """Replays made since the start."""
        self._flow = flow
        self._upstreams = upstreams
        self._prices = prices
        self._model = model
        self._cache_s = cache_s
        self._rates = ArrivalRates()
        self._paces = {upstream.replica_id: Pace() for upstream in upstreams}
        self._kept: dict[tuple[int, str], _Kept] = {}
        self._rest_until_s = float("-inf")
        self._stopwatch = stopwatch

    # ------------------------------------------------------------ lengths

    def predicted_output_tokens(self, call: Call, quantile: float = 0.5, emitted_tokens: int = 0) -> int:
        """The length of one of the call's sequences, by default the median, given that it has emitted so
        much and goes on."""
        if call.sampling.ignore_eos:
            return call.max_tokens
        tenant_id = call.principal.tenant_id
        return self.lengths.quantile(tenant_id, call.model, quantile, emitted_tokens, call.max_tokens)

    def predicted_gpu_ms(self, call: Call, output_tokens: int) -> int:
        """Device time of the call with so many output tokens, all sequences, beside what runs now."""
        step_time, width = self._pace_now()
        each = -(-output_tokens // call.sequences)
        return sum(
            predicted_gpu_ms(step_time, width, len(call.prompt_of(index)), each)
            for index in range(call.sequences)
        )

    def stream_tokens_per_s(self) -> float:
        """How fast one sequence decodes beside what runs now."""
        step_time, width = self._pace_now()
        return 1 / predict_step_s(step_time, width, 0, width)

    def _pace_now(self) -> tuple[StepTime, int]:
        """The step-time model of an upstream that serves, and how many sequences it runs."""
        for upstream in self._upstreams:
            snapshot = upstream.snapshot
            if snapshot is not None:
                return self._step_time(upstream), max(1, len(snapshot.running))
        return PRIOR, 1

    def learn(self, call: Call, output_tokens: int) -> None:
        """One sequence ended by itself, or at its `max_tokens`."""
        if not call.sampling.ignore_eos:
            self.lengths.observe(call.principal.tenant_id, call.model, output_tokens)
            self.observed += 1

    def arrived(self, entry: Entry) -> None:
        """A request gets in line: more like it are to be expected."""
        self._rates.observe(entry, entry.arrived_s)

    def watch_pace(self) -> None:
        """Looks at the engines' latest snapshots; to be called several times a second."""
        for upstream in self._upstreams:
            self._paces[upstream.replica_id].see(upstream.snapshot)

    # ------------------------------------------------------------ estimates

    def of_call(self, call: Call, arrived_s: float) -> Estimate | None:
        """The estimate made on arrival. None where forecasting itself fails: a request never does for it."""
        size = Size(
            call.input_tokens, len(call.prompts), call.choices, call.max_tokens, call.sampling.ignore_eos
        )
        principal = call.principal
        try:
            return self.estimate(
                call.model, principal.tenant_id, principal.weight, call.tier, size, arrived_s
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
        *,
        fresh: bool = False,
    ) -> Estimate:
        """A forecast with its price. `fresh`: for a quote, a new replay if at all possible.

        Raises `UnknownPrice`.
        """
        output_tokens = self._output_tokens(model, tenant_id, size)
        rank = TIER_RANKS[tier]
        allowed_debt_s = QUOTE_DEBT_S if fresh else 0.0
        kept = self._kept_for(rank, tenant_id, now_s, fresh, allowed_debt_s)
        if kept is None:
            seen = self._replay(tenant_id, weight, rank, size, output_tokens, now_s)
        else:
            seen = self._adapted(kept, rank, size, output_tokens)

        def cost(output: int) -> int:
            return self._prices().cost_nanousd(model, tier, size.input_tokens, 0, output)

        total = (output_tokens[0] * size.sequences, output_tokens[1] * size.sequences)
        return Estimate(
            wait_s=seen.wait_s,
            ttft_s=seen.ttft_s,
            tpot_s=seen.tpot_s,
            e2e_s=seen.e2e_s,
            output_tokens=total,
            cost_nanousd=(cost(total[0]), cost(total[1])),
            max_cost_nanousd=cost(size.max_tokens * size.sequences),
            tokens_ahead=seen.tokens_ahead,
            basis=seen.basis,
            samples=self.lengths.samples(tenant_id, model),
            saturated=seen.saturated,
        )

    def _output_tokens(self, model: str, tenant_id: str, size: Size) -> tuple[int, int]:
        """p50 and p90 of the longest of its sequences."""
        if size.is_exact:
            return size.max_tokens, size.max_tokens
        exponent = 1 / size.sequences
        p50, p90 = (
            self.lengths.quantile(tenant_id, model, q**exponent, max_tokens=size.max_tokens)
            for q in (0.5, 0.9)
        )
        return p50, max(p50, p90)

    # ------------------------------------------------------------ replay

    def _replay(
        self,
        tenant_id: str,
        weight: float,
        rank: int,
        size: Size,
        output_tokens: tuple[int, int],
        now_s: float,
    ) -> Forecast:
        started_s = self._stopwatch()
        self.replays += 1
        candidate = Entry(
            entry_id="\0candidate",
            tenant_id=tenant_id,
            arrived_s=now_s,
            input_tokens=size.input_tokens * size.choices,
            predicted_output_tokens=output_tokens[0] * size.sequences,
            tier=rank,
            weight=weight,
        )
        sequences = {candidate.entry_id: size.sequences}
        kv_tokens: dict[str, int] = {}
        for ticket in self._flow.tickets():
            sequences[ticket.entry.entry_id] = ticket.sequences
            kv_tokens[ticket.entry.entry_id] = ticket.kv_tokens
        for flight in self._flow.in_flight():
            sequences[flight.ticket.entry.entry_id] = flight.ticket.sequences
        counters = self._flow.counters.clone()
        seen = forecast(
            candidate,
            queue=self._flow.queue_clone(counters),
            counters=counters,
            engines=self._engines(),
            output_tokens=output_tokens,
            now_s=now_s,
            draw_length=self._draw_length,
            sequences=sequences,
            kv_tokens=kv_tokens,
            arrivals=self._rates.streams(now_s),
        )
        took_s = self._stopwatch() - started_s
        self._rest_until_s = max(now_s, self._rest_until_s) + took_s * REST
        if len(self._kept) >= MAX_CACHED:
            self._kept.clear()
        self._kept[rank, tenant_id] = _Kept(now_s, self._flow.queued_up_to(rank), size, seen)
        return seen

    def _draw_length(self, entry: Entry, generated: int, u: float) -> int:
        ticket = self._flow.ticket(entry.entry_id)
        if ticket is None:
            return max(generated + 1, entry.predicted_output_tokens)
        if ticket.is_exact:
            return max(generated + 1, ticket.max_tokens)
        return self.lengths.quantile(entry.tenant_id, self._model, u, generated, ticket.max_tokens)

    def _engines(self) -> list[EngineLoad]:
        by_replica: dict[str, list[InFlight]] = {}
        for flight in self._flow.in_flight():
            by_replica.setdefault(flight.replica_id, []).append(flight)
        loads: list[EngineLoad] = []
        for upstream in self._upstreams:
            ready = upstream.ready
            if ready is None or not upstream.is_up:
                continue
            window = self._flow.window
            kv_tokens = ready.num_blocks * ready.block_tokens
            loads.append(
                EngineLoad(
                    replica_id=upstream.replica_id,
                    step_time=self._step_time(upstream),
                    max_sequences=ready.max_sequences,
                    max_batched_tokens=ready.max_batched_tokens,
                    window_sequences=ready.max_sequences + window.lookahead_sequences,
                    window_kv_tokens=int(kv_tokens * window.kv_window),
                    flights=flights_of(by_replica.get(upstream.replica_id, []), upstream.snapshot),
                )
            )
        return loads

    def _step_time(self, upstream: Upstream) -> StepTime:
        """The engine's step-time model, at the pace that it really has."""
        snapshot = upstream.snapshot
        return self._paces[upstream.replica_id].adjust(snapshot.step_time if snapshot is not None else PRIOR)

    # ------------------------------------------------------------ what is kept

    def _kept_for(
        self, rank: int, tenant_id: str, now_s: float, fresh: bool, allowed_debt_s: float
    ) -> _Kept | None:
        """An answer that does; None: replay."""
        kept = self._kept.get((rank, tenant_id))
        if kept is not None and not fresh and now_s - kept.at_s < self._cache_s:
            changed = abs(self._flow.queued_up_to(rank) - kept.queued)
            if changed * 20 <= kept.queued:
                return kept
        if now_s + allowed_debt_s >= self._rest_until_s:
            return None
        if kept is None:
            mates = [each for (tier, _), each in self._kept.items() if tier == rank]
            kept = max(mates, key=lambda each: each.at_s, default=None)
        return kept if kept is not None and now_s - kept.at_s < STALE_S else None

    def _adapted(self, kept: _Kept, rank: int, size: Size, output_tokens: tuple[int, int]) -> Forecast:
        """The kept answer for a queue of another length and a request of another size."""
        seen = kept.forecast
        growth = (self._flow.queued_up_to(rank) + 1) / (kept.queued + 1)
        step = next((self._step_time(upstream) for upstream in self._upstreams), PRIOR)
        more_prompt_s = _prefill_s(step, size) - _prefill_s(step, kept.size)
        wait = (seen.wait_s[0] * growth, seen.wait_s[1] * growth)
        ttft = tuple(
            max(new, new + old_ttft - old + more_prompt_s)
            for new, old, old_ttft in zip(wait, seen.wait_s, seen.ttft_s, strict=True)
        )
        return Forecast(
            wait_s=wait,
            ttft_s=(ttft[0], ttft[1]),
            tpot_s=seen.tpot_s,
            e2e_s=(
                ttft[0] + seen.tpot_s[0] * (output_tokens[0] - 1),
                ttft[1] + seen.tpot_s[1] * (output_tokens[1] - 1),
            ),
            output_tokens=output_tokens,
            tokens_ahead={cause: round(tokens * growth) for cause, tokens in seen.tokens_ahead.items()},
            basis=seen.basis,
            samples=seen.samples,
            saturated=seen.saturated,
        )


def flights_of(in_flight: Sequence[InFlight], snapshot: Snapshot | None) -> list[Flight]:
    """Every dispatched sequence as the engine last reported it; what it did not report has just left."""
    reported: dict[str, list[RunningSequence]] = {}
    strangers: list[RunningSequence] = []
    known = {flight.ticket.entry.entry_id for flight in in_flight}
    for running in [*snapshot.running, *snapshot.waiting] if snapshot is not None else []:
        if running.request_id in known:
            reported.setdefault(running.request_id, []).append(running)
        else:
            strangers.append(running)
    flights: list[Flight] = []
    for flight in in_flight:
        entry = flight.ticket.entry
        seen = reported.get(entry.entry_id, [])
        each_kv = flight.kv_tokens // max(1, flight.live_sequences)
        flights += [_flight(entry, running, each_kv) for running in seen[: flight.live_sequences]]
        prompt = max(1, entry.input_tokens // flight.ticket.sequences)
        unseen = flight.live_sequences - len(seen)
        if flight.output_tokens == 0:
            flights += [Flight(entry, prompt, 0, 0, each_kv) for _ in range(unseen)]
    return flights + [_stranger(running) for running in strangers]


def _flight(entry: Entry, running: RunningSequence, kv_tokens: int) -> Flight:
    left = running.prompt_tokens + running.emitted_tokens - running.computed_tokens
    decodes = running.emitted_tokens > 0 and left <= 1
    return Flight(
        entry, 0 if decodes else max(1, left), running.computed_tokens, running.emitted_tokens, kv_tokens
    )


def _stranger(running: RunningSequence) -> Flight:
    """A sequence of another gateway, or one that is just ending."""
    entry = Entry(
        entry_id=running.request_id,
        tenant_id=running.tenant_id,
        arrived_s=0.0,
        input_tokens=running.prompt_tokens,
        predicted_output_tokens=min(running.predicted_output_tokens, running.max_tokens),
        tier=running.tier,
    )
    return _flight(entry, running, running.prompt_tokens + entry.predicted_output_tokens)


def _prefill_s(step: StepTime, size: Size) -> float:
    tokens = size.input_tokens * size.choices
    return predict_step_s(step, tokens, tokens * (tokens + 1) // (2 * size.sequences), size.sequences)


LENGTHS_FILE = "lengths.json"


def load_lengths(data_dir: Path | None) -> LengthForecast:
    """What an earlier run learned, or a fresh forecast: a damaged file costs accuracy, never a start."""
    if data_dir is None:
        return LengthForecast()
    try:
        return LengthForecast.from_dict(json.loads((data_dir / LENGTHS_FILE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return LengthForecast()
    except (OSError, ValueError) as error:
        log.warning("the length forecast of the last run is not usable: %s", error)
        return LengthForecast()


def save_lengths(data_dir: Path, text: str) -> None:
    """Replaces the file in one piece."""
    temporary = data_dir / (LENGTHS_FILE + ".new")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, data_dir / LENGTHS_FILE)
