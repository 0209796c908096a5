"""Kept traces on their way to a collector, at a bounded rate; whatever it does, nothing waits for it."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.messages import Decision, SequenceOutcome
from engine.telemetry.sender import SpanSender, SpanTarget, open_sender
from engine.telemetry.spans import SpanKind, SpanRecord
from gateway.domain.timeline import Event, TimelineKind
from gateway.trace_context import SAMPLED, TraceContext
from gateway.tracing.build import KeptTrace
from gateway.tracing.decision import KeepCause, TraceRule
from gateway.tracing.tracer import Tracer
from ops.serving import doctor
from ops.settings.settings import Settings
from ops.settings.telemetry import PATH, TelemetrySettings
from tenants.outcomes import RequestOutcome
from tests.support.otlp_receiver import OtlpReceiver, otlp_receiver
from tests.support.server_process import until

SPANS_OF_ONE = 7
REQUESTS, BAD = 2_000, 40
EVENTS = (
    Event(TimelineKind.RECEIVED, 0, (10, 1, 1, 100, 0)),
    Event(TimelineKind.QUEUED, 1, (0, 0, 0, 0)),
    Event(TimelineKind.DISPATCHED, 2, (1, 0, 0)),
    Event(TimelineKind.FIRST_TOKEN, 3),
    Event(TimelineKind.ENDED, 5, (0,)),
    Event(TimelineKind.SETTLED, 5, (1, 1, 1)),
)


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as found:
        yield found


def sender_to(url: str, **limits: int) -> SpanSender:
    return open_sender(SpanTarget(url + PATH, **limits), {"service.name": "fairgate"})


def one_span(number: int) -> list[SpanRecord]:
    return [SpanRecord("x", SpanKind.INTERNAL, f"{number + 1:032x}", f"{number + 1:016x}", "", 1, 2)]


def ended(tracer: Tracer, number: int, outcome: RequestOutcome, **of: object) -> KeepCause | None:
    """One request of the pipeline: decided, and handed on where it is kept."""
    caller = of.get("caller")
    assert caller is None or isinstance(caller, TraceContext)
    trace = tracer.rule.trace_of(f"req_{number}", caller)
    displaced = [Decision(1, 0.0, "pause", "s", "r", [], ["other.0"])] if of.get("displaced") else []
    sequence = SequenceOutcome("s", "r", "t", "stop", 1, 0, 1, 1, decisions=displaced)
    cause = tracer.decide(
        trace,
        outcome,
        [sequence],
        is_quote_kept=False if of.get("broken") else None,
        has_missed=lambda: bool(of.get("missed")),
    )
    if cause is not None:
        kept = KeptTrace(
            trace, cause, "chat", "m", "m", "/v1/chat/completions", EVENTS, 10**18, 10**18 + 10**7, {}
        )
        tracer.keep(kept)
    return cause


def metric(tracer: Tracer, name: str, *values: str) -> float:
    return next(
        sample.value
        for family in tracer.collect()
        for sample in family.samples
        if sample.name == name and tuple(sample.labels.values()) == values
    )


def test_of_2000_requests_all_bad_ones_and_a_hundredth_of_the_rest_are_kept_and_no_span_of_others_is_made(
    receiver: OtlpReceiver,
) -> None:
    ratio = 0.01
    sender = sender_to(receiver.url, spans_per_s=100_000)
    tracer = Tracer(TraceRule(ratio), sender)
    bad = random.Random(7).sample(range(REQUESTS), BAD)
    kinds = ({"missed": True}, {"broken": True}, {"displaced": True}, {})
    causes: Counter[KeepCause | None] = Counter()
    for number in range(REQUESTS):
        if number in bad:
            how = kinds[bad.index(number) % 4]
            outcome = RequestOutcome.COMPLETED if how else RequestOutcome.ENGINE_LOST
            causes[ended(tracer, number, outcome, **how)] += 1
        else:
            causes[ended(tracer, number, RequestOutcome.COMPLETED)] += 1
    of_bad = (KeepCause.SLO_MISSED, KeepCause.QUOTE_BROKEN, KeepCause.PREEMPTED, KeepCause.ERROR)
    assert [causes[each] for each in of_bad] == [BAD // 4] * 4
    rest = REQUESTS - BAD
    assert abs(causes[KeepCause.RATIO] - ratio * rest) <= 4 * math.sqrt(rest * ratio * (1 - ratio))
    kept = sum(count for cause, count in causes.items() if cause is not None)
    tracer.close()
    assert metric(tracer, "fairgate_spans_built_total") == SPANS_OF_ONE * kept
    assert metric(tracer, "fairgate_spans_exported_total") == SPANS_OF_ONE * kept == len(receiver.spans)
    assert metric(tracer, "fairgate_traces_total", "not_kept") == REQUESTS - kept
    rule = TraceRule(ratio)
    expected = {
        rule.trace_of(f"req_{number}", None).trace_id
        for number in range(REQUESTS)
        if number in bad or rule.samples(rule.trace_of(f"req_{number}", None).trace_id)
    }
    assert set(receiver.traces()) == expected
    assert {len(each) for each in receiver.traces().values()} == {SPANS_OF_ONE}


def test_no_more_spans_a_second_than_allowed_and_what_is_wrong_has_room_when_callers_sample_all(
    receiver: OtlpReceiver,
) -> None:
    receiver.goes_on.clear()
    sender = sender_to(receiver.url, spans_per_s=50, max_waiting=20)
    tracer = Tracer(TraceRule(0.0), sender)
    ended(tracer, 0, RequestOutcome.FAILED)
    until(lambda: receiver.requests == 1)  # the thread hangs on this one
    caller = TraceContext("1" * 32, "2" * 16, SAMPLED)
    for number in range(1, 101):
        ended(tracer, number, RequestOutcome.COMPLETED, caller=caller)
    assert (sender.waiting, sender.lost["line_full"]) == (10, 90)
    for number in range(101, 106):
        ended(tracer, number, RequestOutcome.FAILED)
    assert (sender.waiting, sender.lost["line_full"]) == (15, 90)
    receiver.goes_on.set()
    began_s = time.monotonic()
    until(lambda: len(receiver.spans) == SPANS_OF_ONE * 16)
    # The last batch begins when those before it have had their time.
    assert time.monotonic() - began_s >= (SPANS_OF_ONE * 16 - 56) / 50
    tracer.close()
    assert sender.lost == {"line_full": 90, "collector": 0, "fault": 0}


@pytest.mark.parametrize(
    ("status", "said"),
    [(500, "it answers 500"), (307, "it answers 307, a redirection, which is not followed"), (404, "404")],
)
def test_a_collector_that_refuses_loses_spans_which_are_counted_and_named(
    receiver: OtlpReceiver, status: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.status = status
    sender = sender_to(receiver.url)
    assert sender.offer(lambda: one_span(1))
    until(lambda: sender.lost["collector"] == 1)
    assert said in sender.last_error
    assert set(receiver.paths) == {PATH}, "a redirection was followed"
    (warning,) = [each.getMessage() for each in caplog.records if each.name == "fairgate.telemetry"]
    assert said in warning
    receiver.status = 200
    assert sender.offer(lambda: one_span(2))
    until(lambda: sender.exported == 1 and not sender.last_error)
    assert (len(receiver.spans), sender.built) == (1, 2)
    sender.close()


def test_without_a_collector_memory_is_bounded_and_offers_return_at_once() -> None:
    sender = sender_to("http://127.0.0.1:9", max_waiting=30)
    began_s = time.process_time()
    taken = sum(sender.offer(lambda: one_span(1)) for _ in range(10_000))
    assert time.process_time() - began_s < 2
    assert sender.waiting <= 30
    assert sender.lost["line_full"] == 10_000 - taken
    sender.close(0.1)
    assert sender.built <= 40
    assert sum(sender.lost.values()) >= 10_000 - sender.built


def test_a_hanging_collector_holds_up_the_end_for_a_moment_only(receiver: OtlpReceiver) -> None:
    receiver.goes_on.clear()
    sender = sender_to(receiver.url)
    sender.offer(lambda: one_span(1))
    until(lambda: receiver.requests == 1)
    sender.offer(lambda: one_span(2))
    began_s = time.monotonic()
    sender.close(0.2)
    assert time.monotonic() - began_s < 5
    assert not sender.offer(lambda: one_span(3))
    assert sender.lost["line_full"] == 1
    assert sender.waiting == 0


def test_spans_that_cannot_be_made_are_counted_and_the_next_ones_go_on(receiver: OtlpReceiver) -> None:
    sender = sender_to(receiver.url)
    sender.offer(lambda: one_span(1 // 0))
    sender.offer(lambda: one_span(1))
    sender.close()
    assert (sender.lost["fault"], len(receiver.spans)) == (1, 1)


def test_headers_come_from_the_standard_variable(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-api-key=of-the-collector")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    sender = sender_to(receiver.url)
    sender.offer(lambda: one_span(1))
    sender.close()
    assert receiver.headers["x-api-key"] == "of-the-collector"
    assert len(receiver.spans) == 1


@pytest.mark.parametrize(
    ("status", "ok", "said"),
    [(200, True, "takes spans"), (500, False, "it answers 500"), (302, False, "a redirection")],
)
async def test_the_doctor_asks_the_collector(
    receiver: OtlpReceiver, tmp_path: Path, status: int, ok: bool, said: str
) -> None:
    receiver.status = status
    settings = Settings(data_dir=tmp_path, telemetry=TelemetrySettings(otlp=receiver.url))
    finding = await doctor._collector(settings)
    assert (finding.check, finding.ok) == ("collector", ok)
    assert said in finding.detail
    assert receiver.spans == []


async def test_the_doctor_finds_a_collector_that_is_away(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, telemetry=TelemetrySettings(otlp="http://127.0.0.1:9"))
    finding = await doctor._collector(settings)
    assert not finding.ok
    assert "cannot be reached" in finding.detail
    assert "telemetry.otlp" in finding.advice
    assert (await doctor._collector(Settings(data_dir=tmp_path))).ok, "there is none to be asked"
