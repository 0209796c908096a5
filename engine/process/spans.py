"""An engine's own spans of a sequence, from its own times, once the gateway says that the trace is kept.

    engine     arrival to end; below the gateway's span
    engine wait, engine prefill, engine decode, engine pause

A pause links to the spans of what took the place. Nothing is made of traces that are not kept, and spans are
made in the sender's thread: a step waits for none of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import partial

from engine.messages import Decision, SequenceOutcome
from engine.telemetry.sender import SpanSender
from engine.telemetry.spans import Attributes, SpanKind, SpanLink, SpanRecord, span_id_of

PREFIX = "fairgate."
PAUSES = frozenset({"pause", "suspend", "swap", "preempt"})
RETURNS = frozenset({"admit", "resume", "restore"})
MAX_KNOWN = 8_192
"""Sequences whose traces are known, for links."""


class EngineSpans:
    """The spans of one engine. Use from its loop."""

    def __init__(self, sender: SpanSender, max_known: int = MAX_KNOWN) -> None:
        self._sender = sender
        self._max_known = max_known
        self._known: OrderedDict[str, str] = OrderedDict()
        """The `traceparent` of each of the last sequences."""

    @property
    def lost(self) -> int:
        return sum(self._sender.lost.values())

    def came(self, sequence_id: str, traceparent: str | None) -> None:
        if traceparent is not None:
            self._known[sequence_id] = traceparent
            if len(self._known) > self._max_known:
                self._known.popitem(last=False)

    def settled(self, outcome: SequenceOutcome, ended_ns: int) -> None:
        """The trace of an outcome is kept. `ended_ns`: since 1970; 0: not known, an earlier engine's."""
        if outcome.trace_context is None or not ended_ns:
            return
        others = {other for decision in outcome.decisions for other in decision.others}
        known = {other: self._known[other] for other in others if other in self._known}
        self._sender.offer(partial(spans_of, outcome, ended_ns, known), is_sampled=not others)

    def close(self) -> None:
        """Sends what waits, for a few seconds at most."""
        self._sender.close()


def spans_of(outcome: SequenceOutcome, ended_ns: int, known: Mapping[str, str]) -> list[SpanRecord]:
    """All spans of a sequence, the outermost first. `known`: the `traceparent` of other sequences."""
    _, trace_id, parent_id, _ = (outcome.trace_context or "").split("-")
    began_ns = ended_ns - round(outcome.finished_s * 1e9)
    root = "engine"

    def span(
        name: str, since_s: float, until_s: float, attributes: Attributes, *links: SpanLink, number: int = 0
    ) -> SpanRecord:
        is_root = name == root
        return SpanRecord(
            name,
            SpanKind.INTERNAL,
            trace_id,
            span_id_of(outcome.sequence_id, f"{name}.{number}"),
            parent_id if is_root else span_id_of(outcome.sequence_id, f"{root}.0"),
            began_ns + round(since_s * 1e9),
            began_ns + round(until_s * 1e9),
            attributes,
            links=links,
            error=outcome.message or outcome.finish if is_root and outcome.finish == "failed" else "",
            is_parent_remote=is_root,
        )

    end_s, begun_s, first_s = outcome.finished_s, outcome.scheduled_s, outcome.first_token_s
    spans = [
        span(
            root,
            0.0,
            end_s,
            {
                PREFIX + "request_id": outcome.request_id,
                PREFIX + "sequence_id": outcome.sequence_id,
                PREFIX + "tenant_id": outcome.tenant_id,
                PREFIX + "finish": outcome.finish,
                PREFIX + "prompt_tokens": outcome.prompt_tokens,
                PREFIX + "cached_tokens": outcome.cached_tokens,
                PREFIX + "output_tokens": outcome.emitted_tokens,
                PREFIX + "preemptions": outcome.preemptions,
                PREFIX + "recomputed_tokens": outcome.recomputed_tokens,
                PREFIX + "device_us": outcome.gpu_us,
            },
        ),
        span("engine wait", 0.0, end_s if begun_s is None else begun_s, {}),
    ]
    if begun_s is not None:
        prefill = {
            PREFIX + "computed_tokens": outcome.computed_tokens,
            PREFIX + "chunks": len(outcome.chunks),
        }
        spans.append(span("engine prefill", begun_s, end_s if first_s is None else first_s, prefill))
    if first_s is not None:
        had = outcome.decode
        shares = {
            PREFIX + "sat_out.own_steps": had.sat_out_own,
            PREFIX + "sat_out.share_steps": had.sat_out_share,
            PREFIX + "sat_out.tier_steps": had.sat_out_tier,
        }
        spans.append(span("engine decode", first_s, end_s, shares))
    for number, (decision, until_s) in enumerate(_pauses(outcome)):
        attributes: Attributes = {
            PREFIX + "kind": decision.kind,
            PREFIX + "rule": decision.rule,
            PREFIX + "displaced_tokens": decision.displaced_tokens,
        }
        links = [_link(known[other], other) for other in decision.others if other in known]
        spans.append(span("engine pause", decision.at_s, until_s, attributes, *links, number=number))
    return spans


def _pauses(outcome: SequenceOutcome) -> Iterator[tuple[Decision, float]]:
    """Each time that it lost its place, and when it went on or ended."""
    paused: Decision | None = None
    for decision in outcome.decisions:
        if decision.kind in PAUSES and paused is None:
            paused = decision
        elif decision.kind in RETURNS and paused is not None:
            yield paused, decision.at_s
            paused = None
    if paused is not None:
        yield paused, outcome.finished_s


def _link(traceparent: str, sequence_id: str) -> SpanLink:
    """To the gateway's span of the request that took the place."""
    _, trace_id, span_id, _ = traceparent.split("-")
    return SpanLink(trace_id, span_id, {PREFIX + "took_the_place": True, PREFIX + "sequence_id": sequence_id})
