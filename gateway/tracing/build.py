"""The spans of a kept trace, from its request's timeline. Pure.

    SERVER    POST /v1/chat/completions     first byte to the durable settlement
    INTERNAL  chat MODEL                    the same from the arrival, with what happened as events
    INTERNAL  limits, store, queue, prefill, decode, gateway, settle
    CLIENT    chat MODEL                    each sequence that another server runs

Our engine adds its own spans (`engine/process/spans.py`). Names: `gateway/metrics/gen_ai.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.telemetry.spans import Attribute, Attributes, SpanEvent, SpanKind, SpanRecord
from gateway.domain.timeline import Event, TimelineKind, first, made_us, number
from gateway.metrics import gen_ai
from gateway.trace_context import RequestTrace
from gateway.tracing.decision import KeepCause

SERVER, CHAT = "server", "chat"
"""Names of a request's first two spans, for their ids."""
HTTP_METHOD, HTTP_ROUTE, HTTP_STATUS = "http.request.method", "http.route", "http.response.status_code"
URL_PATH, URL_SCHEME = "url.path", "url.scheme"
SERVER_ADDRESS, SERVER_PORT = "server.address", "server.port"
PREFIX = "fairgate."
"""Of our attributes."""
SLO_MISSED = "slo.missed"
AS_EVENTS = frozenset(
    {
        TimelineKind.FIRST_TOKEN,
        TimelineKind.MOVED,
        TimelineKind.PAUSED,
        TimelineKind.RESUMED,
        TimelineKind.SWAPPED,
        TimelineKind.RESTORED,
        TimelineKind.PREEMPTED,
        TimelineKind.TOPPED_UP,
        TimelineKind.STALLED,
        TimelineKind.RELOCATED,
        TimelineKind.LEFT_OUT,
    }
)
"""The rest of a timeline become spans and attributes."""
AHEAD = ("own_tokens", "others_tokens", "higher_tier_tokens", "running_tokens")
TOLD = ("wait_p50_us", "wait_p90_us", "ttft_p50_us", "ttft_p90_us", "e2e_p50_us", "e2e_p90_us")


def client_span(index: int) -> str:
    return f"client.{index}"


@dataclass(frozen=True, slots=True)
class ClientCall:
    index: int
    provider: str
    address: str
    port: int
    replica_id: str
    ended_us: int
    """Since the request's arrival."""
    error: str = ""


@dataclass(slots=True)
class KeptTrace:
    trace: RequestTrace
    cause: KeepCause
    operation: str
    asked_model: str
    model: str
    route: str
    events: Sequence[Event]
    arrived_ns: int
    """Since 1970."""
    settled_ns: int
    attributes: Attributes
    """Of its chat span, beside those from the timeline."""
    error: str = ""
    """The outcome, if it is an error."""
    status: int | None = None
    """None: unknown."""
    clients: Sequence[ClientCall] = ()
    missed: list[Attributes] = field(default_factory=list)
    """Missed targets, with cause and counterfactuals."""
    unjudged: int = 0
    """Missed targets whose causes are pending: the spans wait for them."""


@dataclass(frozen=True, slots=True)
class RefusedTrace:
    """A request refused before it held anything: it has no timeline."""

    trace: RequestTrace
    route: str
    arrived_ns: int
    """Since 1970."""
    ended_ns: int
    status: int
    code: str


def refused_span(refused: RefusedTrace) -> list[SpanRecord]:
    attributes = _http(refused.route, refused.code, refused.status)
    attributes[PREFIX + "request_id"] = refused.trace.request_id
    trace = refused.trace
    return [
        SpanRecord(
            f"POST {refused.route}",
            SpanKind.SERVER,
            trace.trace_id,
            trace.span_id(SERVER),
            trace.parent_id,
            refused.arrived_ns,
            refused.ended_ns,
            attributes,
            (),
            error=refused.code,
            is_parent_remote=True,
            state=trace.state,
        )
    ]


def spans_of(kept: KeptTrace) -> list[SpanRecord]:
    return [_server(kept), _chat(kept), *_stages(kept), *_clients(kept)]


def _span(
    kept: KeptTrace,
    name: str,
    identity: str,
    parent_id: str,
    between_ns: tuple[int, int],
    attributes: Attributes,
    kind: SpanKind = SpanKind.INTERNAL,
    *,
    events: Sequence[SpanEvent] = (),
    error: str = "",
    is_parent_remote: bool = False,
) -> SpanRecord:
    trace = kept.trace
    return SpanRecord(
        name,
        kind,
        trace.trace_id,
        trace.span_id(identity),
        parent_id,
        *between_ns,
        {name: value for name, value in attributes.items() if value not in ("", None)},
        events,
        error=error,
        is_parent_remote=is_parent_remote,
        state=trace.state,
    )


def _http(route: str, error: str, status: int | None) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {
        HTTP_METHOD: "POST",
        HTTP_ROUTE: route,
        URL_PATH: route,
        URL_SCHEME: "http",
        gen_ai.ERROR_TYPE: error,
    }
    return attributes if status is None else attributes | {HTTP_STATUS: status}


def _server(kept: KeptTrace) -> SpanRecord:
    read_us = number(first(kept.events, TimelineKind.RECEIVED), "read_us")
    return _span(
        kept,
        f"POST {kept.route}",
        SERVER,
        kept.trace.parent_id,
        (kept.arrived_ns - read_us * 1000, kept.settled_ns),
        _http(kept.route, kept.error, kept.status),
        SpanKind.SERVER,
        error=kept.error,
        is_parent_remote=True,
    )


def _chat(kept: KeptTrace) -> SpanRecord:
    queued, quoted = (first(kept.events, kind) for kind in (TimelineKind.QUEUED, TimelineKind.QUOTED))
    attributes: dict[str, Attribute] = {
        gen_ai.OPERATION: kept.operation,
        gen_ai.PROVIDER: gen_ai.FAIRGATE,
        gen_ai.REQUEST_MODEL: kept.asked_model,
        gen_ai.RESPONSE_MODEL: kept.model,
        gen_ai.ERROR_TYPE: kept.error,
        PREFIX + "request_id": kept.trace.request_id,
        PREFIX + "trace.kept_for": kept.cause.value,
        **kept.attributes,
    }
    if queued is not None:
        attributes |= {f"{PREFIX}ahead.{name}": number(queued, name) for name in AHEAD}
    if quoted is not None:
        for name in TOLD:
            attributes[f"{PREFIX}quote.{name.removesuffix('_us')}_s"] = number(quoted, name) / 1e6
        attributes[PREFIX + "quote.is_binding"] = bool(number(quoted, "is_binding"))
    settled = first(kept.events, TimelineKind.SETTLED)
    attributes[PREFIX + "cost_nanousd"] = number(settled, "cost_nanousd")
    return _span(
        kept,
        f"{kept.operation} {kept.model}",
        CHAT,
        kept.trace.span_id(SERVER),
        (kept.arrived_ns, kept.settled_ns),
        attributes,
        events=list(_events(kept)),
        error=kept.error,
    )


def _events(kept: KeptTrace) -> Iterator[SpanEvent]:
    for event in kept.events:
        if event.kind in AS_EVENTS:
            shown = event.as_json()
            attributes = {
                PREFIX + name: value if isinstance(value, str | bool | int | float) else str(value)
                for name, value in shown.items()
                if name not in ("event", "at_s")
            }
            yield SpanEvent(str(shown["event"]), kept.arrived_ns + event.at_us * 1000, attributes)
    for missed in kept.missed:
        yield SpanEvent(SLO_MISSED, kept.settled_ns, {PREFIX + name: value for name, value in missed.items()})


def _stages(kept: KeptTrace) -> Iterator[SpanRecord]:
    """A stage without an end ends with the request."""
    events = kept.events
    at = {kind: made_us(found) for kind in TimelineKind if (found := first(events, kind)) is not None}
    ended = at.get(TimelineKind.ENDED, 0)
    reserved, last = first(events, TimelineKind.RESERVED), first(events, TimelineKind.LAST_TOKEN)
    limited = ended if reserved is None else number(reserved, "limited_us")
    settled_us = (kept.settled_ns - kept.arrived_ns) // 1000
    dispatched, first_token = at.get(TimelineKind.DISPATCHED), at.get(TimelineKind.FIRST_TOKEN)
    last_token = at.get(TimelineKind.LAST_TOKEN, ended)
    stages: tuple[tuple[str, int | None, int], ...] = (
        ("limits", 0 if limited else None, limited),
        ("store", None if reserved is None else limited, at.get(TimelineKind.RESERVED, 0)),
        ("queue", at.get(TimelineKind.QUEUED), ended if dispatched is None else dispatched),
        ("prefill", dispatched, ended if first_token is None else first_token),
        ("decode", first_token, last_token),
        ("gateway", last_token if number(last, "lag_us") else None, 0 if last is None else last.at_us),
        ("settle", ended, max(ended, settled_us)),
    )
    for name, since_us, until_us in stages:
        if since_us is not None:
            between_ns = (kept.arrived_ns + since_us * 1000, kept.arrived_ns + until_us * 1000)
            yield _span(kept, name, name, kept.trace.span_id(CHAT), between_ns, {})


def _clients(kept: KeptTrace) -> Iterator[SpanRecord]:
    dispatched = first(kept.events, TimelineKind.DISPATCHED)
    for call in kept.clients if dispatched is not None else ():
        assert dispatched is not None
        since_us = dispatched.at_us
        yield _span(
            kept,
            f"{kept.operation} {kept.model}",
            client_span(call.index),
            kept.trace.span_id(CHAT),
            (kept.arrived_ns + since_us * 1000, kept.arrived_ns + max(since_us, call.ended_us) * 1000),
            {
                gen_ai.OPERATION: kept.operation,
                gen_ai.PROVIDER: call.provider,
                gen_ai.REQUEST_MODEL: kept.model,
                gen_ai.ERROR_TYPE: call.error,
                SERVER_ADDRESS: call.address,
                SERVER_PORT: call.port,
                PREFIX + "replica_id": call.replica_id,
            },
            SpanKind.CLIENT,
            error=call.error,
        )
