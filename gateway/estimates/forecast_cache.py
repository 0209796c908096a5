"""Cache of queue replays: one surface, off which all requests read their forecasts.

One replay (`engine/forecast/wait/picture.py`) builds the surface for all tenants and tiers. It is rebuilt
beside the requests, at most once in `every_s`, and so rarely that replays take at most 4 % of the process
(`REST`). While requests wait another process (`replay_process.py`) adds sampled futures. A request replays
itself only where there is no surface yet, or only one from before a pause, or where all that the surface saw
has left; a quote (`replay_for`) where that share allows it.

What has its estimate and is not queued yet (`on_the_way.py`) is in a replay like what waits, and estimates
count all that came since the last one (`engine/forecast/wait/since.py`). While a burst comes its requests
replay it, each time that it has grown by half.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

import msgspec

from engine.entry import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST, QueueEntry
from engine.forecast.length.features import Features
from engine.forecast.wait.arrivals import RecentArrivals
from engine.forecast.wait.forecast import Forecast
from engine.forecast.wait.picture import AnswerLength, Picture
from engine.forecast.wait.probing import KNOTS, MAX_EVENTS, MAX_LINES
from engine.forecast.wait.replayed_engine import EngineLoad
from engine.forecast.wait.since import NOTHING_SINCE, ComingSince, Since
from engine.forecast.wait.surface import Line, Surface
from engine.messages import TIER_RANKS
from gateway.estimates.on_the_way import OnTheWay
from gateway.flow.controller import FlowController, Ticket

REST = 24.0
"""Rest after a replay on the event loop, in times of what it took."""
CALM = 8.0
PAUSE_S = 0.5
"""An older surface is from before a pause: the next request rebuilds it."""
STALE_S = 5.0
"""An older one is not used, however busy the process is."""
DEBT_S = 0.25
"""The debt of replay time up to which a quote still gets a replay of its own, and a burst one."""
BURST = 8
"""Fewer requests more than at the last replay are none."""
GROWN = 0.5
"""By as much of what was there at the last replay a burst grows until it is replayed again."""
QUOTE_EVENTS = 50
"""Of the engines, in a replay for one quote."""
LONG_QUEUE = 200
"""Where more wait, to copy the queue takes longer than a quote may: it is read off the surface."""
FORGET_S = 30.0
"""Lines not read for this long lose their probes."""
NOTED_EVERY_S = 1.0
SIZES_SEEN = 256
RANKS = tuple(TIER_RANKS.values())
PROCESS_EVERY_S = 1.0
"""How often the other process is asked."""
KNOT_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Of the sizes seen lately, where probes stand."""
MAX_COMING = 256

log = logging.getLogger("fairgate.gateway.estimates")

LengthsOf = Callable[[Sequence[Ticket], Sequence[EngineLoad]], dict[str, AnswerLength]]
"""What is known of the answers to the requests that wait and to the dispatched ones, by entry id."""


class Answer(Protocol):
    """What another process has been asked for."""

    def done(self) -> bool: ...

    def result(self) -> Surface:
        """Raises what went wrong."""
        ...


Submit = Callable[[Picture], Answer]
Promised = Callable[[str | None], Sequence[QueueEntry]]
"""Outstanding quotes, as many as are redeemed on average; of the named tenant, all."""


def nothing_promised(tenant_id: str | None) -> Sequence[QueueEntry]:
    return ()


class Size(msgspec.Struct, frozen=True, gc=False):
    input_tokens: int
    sequences: int
    choices: int
    max_tokens: int
    is_exact: bool
    traits: Features | None = None


@dataclass(slots=True)
class _Moment:
    """When a queue was replayed: what there was, and what has come since."""

    ahead: Sequence[int] = ()
    """By tier: requests that were on their way, waited or ran."""
    queued: int = 0
    since: ComingSince = field(default_factory=ComingSince)


class ForecastCache:
    """One queue's surface. Use from one event loop."""

    def __init__(
        self,
        flow: FlowController,
        loads: Callable[[], list[EngineLoad]],
        lengths: LengthsOf,
        *,
        every_s: float,
        submit: Submit | None = None,
        promised: Promised = nothing_promised,
        stopwatch: Callable[[], float] = perf_counter,
    ) -> None:
        """`submit`: to the process that replays; None: all replays are on the event loop, and there are no
        sampled futures. `promised`: outstanding quotes; `stopwatch` times replays."""
        self.replays = 0
        self.promised = promised
        self._flow = flow
        self._loads = loads
        self._lengths = lengths
        self._submit = submit
        self._asked_for: tuple[Answer, _Moment] | None = None
        self._ask_again_s = float("-inf")
        self._futures: Surface | None = None
        """The latest from the process."""
        self._every_s = every_s
        self._stopwatch = stopwatch
        self._arrivals = RecentArrivals()
        self._sizes: deque[tuple[int, int]] = deque(maxlen=SIZES_SEEN)
        """Prompt and cost tokens of the latest arrivals."""
        self._coming: list[QueueEntry] = []
        """Arrivals that `_arrivals` has not seen yet: passed on in batches, off the path of each."""
        self._lines: OrderedDict[tuple[str, int], tuple[Line, float]] = OrderedDict()
        self._surface: Surface | None = None
        self.on_the_way = OnTheWay()
        self._then = _Moment()
        """Of the surface."""
        self._is_asked = False
        self._rest_until_s = float("-inf")

    def coming(self, ticket: Ticket) -> None:
        if self.on_the_way.add(ticket):
            self._note_coming(ticket.entry)

    def arrived(self, entry: QueueEntry) -> None:
        self._coming.append(entry)
        if len(self._coming) >= MAX_COMING:
            self._note_arrivals()
        if not self.on_the_way.queued(entry):
            self._note_coming(entry)

    def _note_coming(self, entry: QueueEntry) -> None:
        self._then.since.note(entry)
        if self._asked_for is not None:
            self._asked_for[1].since.note(entry)

    def arrivals_per_s(self, now_s: float) -> float:
        self._note_arrivals()
        return self._arrivals.pattern(now_s).requests_per_s

    def _note_arrivals(self) -> None:
        for entry in self._coming:
            self._arrivals.observe(entry)
            self._sizes.append((entry.input_tokens, entry.predicted_cost))
        self._coming.clear()

    def refresh(self, now_s: float) -> None:
        """Replays if a forecast was read since the last time, and the share of time allows it. While requests
        wait, the process does."""
        self._take_answer()
        if not self._is_asked:
            return
        surface = self._surface
        is_calm = self._is_calm()
        if surface is None or now_s - surface.at_s >= self._every_s * (CALM if is_calm else 1.0):
            if now_s >= self._rest_until_s:
                self._build(now_s)
            if self._submit and not is_calm and not self._asked_for and now_s >= self._ask_again_s:
                self._ask(self._submit, now_s)

    def _ask(self, submit: Submit, now_s: float) -> None:
        picture = self._picture(self._lines_now(now_s), self._knots(), now_s)
        self.replays += 1
        self._ask_again_s = now_s + PROCESS_EVERY_S
        self._asked_for = submit(picture), self._moment()

    def _take_answer(self) -> None:
        if self._asked_for is None or not self._asked_for[0].done():
            return
        (answer, then), self._asked_for = self._asked_for, None
        try:
            surface = answer.result()
        except Exception as error:
            log.warning("no forecast of the queue as it was: %s", error)
            return
        self._futures = surface
        if self._surface is None or surface.at_s >= self._surface.at_s:
            self._surface, self._then = surface, then
        else:
            self._surface.spread_as(surface)

    def read(
        self,
        tenant_id: str,
        weight: float,
        rank: int,
        size: Size,
        output_tokens: tuple[int, int],
        now_s: float,
        *,
        for_quote: bool = False,
    ) -> Forecast:
        """A request's own forecast, uncorrected. `output_tokens` (p50, p90) of its longest sequence;
        `for_quote`: with all of its tenant's outstanding quotes."""
        self._is_asked = True
        asked = self._lines.get((tenant_id, rank))
        if asked is None or now_s - asked[1] >= NOTED_EVERY_S or asked[0].weight != weight:
            self._note_line(Line(tenant_id, rank, weight), now_s)
        surface = self._surface
        if surface is None or self._is_too_old(surface, now_s) or self._is_outgrown(now_s):
            surface = self._build(now_s)
        own = self.own_quotes(tenant_id, now_s) if for_quote else ()
        quoted = [entry for entry in own if entry.arrived_s >= surface.at_s and entry.tier <= rank]
        told = surface.read(
            tenant_id,
            rank,
            size.input_tokens * size.choices,
            size.sequences,
            output_tokens,
            since=self._since_then(tenant_id, weight, rank, quoted),
            way_s=self.on_the_way.expected_s(among_others=bool(own)),
        )
        if told.tokens_ahead and self._then.ahead[-1] and not self._ahead(RANKS[-1]):
            # All that the surface saw has left, and its waits with it. To replay an empty queue costs little.
            self._build(now_s)
            return self.read(tenant_id, weight, rank, size, output_tokens, now_s, for_quote=for_quote)
        return told

    def renew(self, now_s: float) -> bool:
        """Replays where requests have left since the surface was built, and the share of time allows it.
        Returns whether it did: only then may what was read off the surface be too long by what has left."""
        if self._surface is None or self._ahead(RANKS[-1]) >= self._then.ahead[-1]:
            return False
        if now_s + DEBT_S < self._rest_until_s:
            return False
        self._build(now_s)
        return True

    def replay_for(
        self,
        tenant_id: str,
        weight: float,
        ranks: Sequence[int],
        size: Size,
        output_tokens: tuple[int, int],
        now_s: float,
    ) -> list[Forecast]:
        """As `read`, for several tiers, from one replay with probes of just this size where there is time for
        one."""
        if now_s + DEBT_S < self._rest_until_s or len(self._flow) > LONG_QUEUE:
            return [
                self.read(tenant_id, weight, rank, size, output_tokens, now_s, for_quote=True)
                for rank in ranks
            ]
        inputs = size.input_tokens * size.choices
        cost = inputs * INPUT_TOKEN_COST + output_tokens[0] * size.sequences * OUTPUT_TOKEN_COST
        lines = [Line(tenant_id, rank, weight) for rank in ranks]
        started_s = self._stopwatch()
        picture = self._picture(lines, [max(2, self._size(inputs, cost))], now_s, QUOTE_EVENTS, tenant_id)
        surface = self._replay(picture, started_s)
        way_s = self.on_the_way.expected_s(among_others=bool(self.own_quotes(tenant_id, now_s)))
        return [
            surface.read(tenant_id, rank, inputs, size.sequences, output_tokens, way_s=way_s)
            for rank in ranks
        ]

    def own_quotes(self, tenant_id: str, now_s: float) -> list[QueueEntry]:
        return [entry for entry in self.promised(tenant_id) if entry.tenant_id == tenant_id]

    def _is_calm(self) -> bool:
        """The queue is empty, and was when the surface was built."""
        return not self._then.queued and not len(self._flow)

    def _is_too_old(self, surface: Surface, now_s: float) -> bool:
        age_s = now_s - surface.at_s
        return age_s >= PAUSE_S and (age_s >= STALE_S or now_s >= self._rest_until_s)

    def _is_outgrown(self, now_s: float) -> bool:
        """A burst comes: there are half as many again as at the last replay, and time for another."""
        then = self._then.ahead[-1]
        grown = self._ahead(RANKS[-1]) - then
        return grown >= max(BURST, GROWN * then) and now_s + DEBT_S >= self._rest_until_s

    def _note_line(self, line: Line, now_s: float) -> None:
        key = (line.tenant_id, line.tier)
        self._lines[key] = (line, now_s)
        self._lines.move_to_end(key)
        if len(self._lines) > MAX_LINES:
            self._lines.popitem(last=False)

    def _build(self, now_s: float) -> Surface:
        started_s = self._stopwatch()
        picture = self._picture(self._lines_now(now_s), self._knots(), now_s)
        self._surface = surface = self._replay(picture, started_s)
        self._then = self._moment()
        self._is_asked = False
        return surface

    def _lines_now(self, now_s: float) -> list[Line]:
        while self._lines and next(iter(self._lines.values()))[1] < now_s - FORGET_S:
            self._lines.popitem(last=False)
        return [line for line, _ in self._lines.values()]

    def _knots(self) -> Sequence[int]:
        """The sizes that most of what came lately lies between."""
        if not self._sizes:
            return KNOTS
        sizes = sorted(self._size(prompt, cost) for prompt, cost in self._sizes)
        return sorted({max(2, sizes[int(part * len(sizes))]) for part in KNOT_QUANTILES})

    def _size(self, prompt_tokens: int, cost: int) -> int:
        """What the queue's order goes by."""
        return prompt_tokens if self._flow.queue.tiers.size_key == "prompt" else cost

    def _moment(self) -> _Moment:
        return _Moment([self._ahead(rank) for rank in RANKS], len(self._flow))

    def _ahead(self, rank: int) -> int:
        return self._flow.queued_up_to(rank) + len(self._flow.in_flight) + self.on_the_way.up_to(rank)

    def _since_then(
        self, tenant_id: str, weight: float, rank: int, quoted: Sequence[QueueEntry] = ()
    ) -> Since:
        """What has come and left since the surface was built, for a request of this line; `quoted`: what its
        tenant was quoted since."""
        more = self._ahead(rank) - self._then.ahead[rank] + len(quoted)
        since = self._then.since.with_quoted(quoted) if quoted else self._then.since
        if not since:
            return Since(more, more) if more else NOTHING_SINCE
        waiting = self._flow.tenants.queued(tenant_id)[rank] if self._flow.queue.tiers.is_by_tenant else None
        return since.ahead_of(tenant_id, weight, rank, more=more, own_waiting=waiting, quoted=len(quoted))

    def _replay(self, picture: Picture, started_s: float) -> Surface:
        """Now, on the event loop. `started_s`: by the stopwatch, when the picture was begun."""
        self.replays += 1
        now_s, surface = picture.now_s, picture.surface()
        if self._futures is not None and now_s - self._futures.at_s < STALE_S:
            surface.spread_as(self._futures)
        self._rest_until_s = max(now_s, self._rest_until_s) + (self._stopwatch() - started_s) * REST
        return surface

    def _picture(
        self,
        lines: Sequence[Line],
        knots: Sequence[int],
        now_s: float,
        most_events: int = MAX_EVENTS,
        for_tenant: str | None = None,
    ) -> Picture:
        self._note_arrivals()
        sequences: dict[str, int] = {}
        kv_tokens: dict[str, int] = {}
        tickets = [*self._flow.queue.tickets(), *self.on_the_way.tickets()]
        for ticket in tickets:
            kv_tokens[ticket.entry.entry_id] = ticket.kv_tokens
            if ticket.sequences > 1:
                sequences[ticket.entry.entry_id] = ticket.sequences
        for flight in self._flow.in_flight:
            sequences[flight.ticket.entry.entry_id] = flight.ticket.sequences
        engines = self._loads()
        counters = self._flow.counters.clone()
        return Picture(
            now_s=now_s,
            queue=self._flow.queue_clone(counters),
            counters=counters,
            engines=engines,
            lengths=self._lengths(tickets, engines),
            sequences=sequences,
            kv_tokens=kv_tokens,
            lane_of=self._flow.queue.lane_rule.lane,
            promised=[
                *(ticket.entry for ticket in self.on_the_way.tickets()),
                *self.promised(for_tenant),
            ],
            arrivals=self._arrivals.pattern(now_s),
            lines=lines,
            tiers=RANKS,
            knots=knots,
            most_events=most_events,
        )
