"""Traces of a running server as a collector gets them: of gateway, engine and calls of another server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.support.faulty_servers import Peer, PeerRequest, in_thread
from tests.support.otlp_receiver import OtlpReceiver, ReceivedSpan, otlp_receiver
from tests.support.prometheus import OPEN_METRICS, lint, value
from tests.support.server_process import MODEL, Server, server_process, until
from tests.support.waiting_streams import SHORT, events

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
OTHER_TRACE = "f" * 32
STATE = "rojo=00f067aa0ba902b7"
FOREIGN = "foreign"
CANARY = "canary-5e1d"
GATEWAY, ENGINE = "fairgate", "fairgate-engine"


async def answered(request: PeerRequest) -> None:
    message = {"role": "assistant", "content": f"{CANARY} of the answer"}
    choice = {"index": 0, "message": message, "finish_reason": "length"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    await request.json({"object": "chat.completion", "choices": [choice], "usage": usage})


class House(NamedTuple):
    """A server that keeps no trace without a reason, another server behind it, and the collector."""

    server: Server
    peer: Peer
    collector: OtlpReceiver

    def spans(self, trace_id: str, *names: str) -> dict[str, ReceivedSpan]:
        """Of one trace by name, once these are there."""
        until(lambda: set(names) <= {each.name for each in self.collector.traces().get(trace_id, ())})
        found = self.collector.traces()[trace_id]
        return {each.name: each for each in found}

    def metric(self, name: str, **labels: str) -> float | None:
        with self.server.http() as client:
            return value(client.get("/metrics").text, name, **labels)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[House]:
    with otlp_receiver() as collector, in_thread(Peer(answered, (FOREIGN,), 4_096, "vllm")) as peer:
        upstream = {"name": "b", "url": f"{peer.url}/v1", "model": FOREIGN}
        flags = ["--engine-max-sequences", "1", "--gateway-long-tokens", "8192"]
        flags += ["--upstreams", json.dumps([upstream]), "--prices", f"{MODEL}=100/300/50,{FOREIGN}=1/1"]
        flags += ["--telemetry-otlp", collector.url, "--telemetry-trace-ratio", "0"]
        with server_process(tmp_path_factory.mktemp("traces"), chat_model, *flags) as running:
            yield House(running, peer, collector)


def traceparent(trace_id: str, sampled: bool = True) -> dict[str, str]:
    return {"traceparent": f"00-{trace_id}-{SPAN_ID}-{int(sampled):02x}", "tracestate": STATE}


def test_a_streamed_displaced_request_that_its_budget_ends(house: House) -> None:
    """One place: a batch stream has it, and an interactive request takes it for its four tokens."""
    every = ["interactive", "standard", "batch"]
    slow = house.server.tenant("slow", tiers=every)
    quick = house.server.tenant("quick", tier="interactive", tiers=every)
    house.server.limit(
        "slow", "output_tokens", 500, rate_per_s=1_000_000
    )  # held piece by piece, and never paused
    house.server.admin("POST", "/slos", {
        "tenant": "slow", "tier": "batch", "metric": "e2e", "target_s": 0.0001, "percentile": 95
    })  # fmt: skip
    body = {"model": MODEL, "messages": [{"role": "user", "content": CANARY}], "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}, "service_tier": "flex"}
    until(lambda: house.metric("fairgate_slo_allowed_misses_total", metric="e2e", tier="batch") is not None)
    with (
        house.server.http(quick) as other,
        house.server.http(slow) as client,
        client.stream(
            "POST", "/v1/chat/completions", json=body, headers=traceparent(TRACE_ID, sampled=False)
        ) as answer,
    ):
        heard = events(answer.iter_lines())
        # Past its first small lease, with which it may have stood still, its place free.
        for _ in range(100):
            next(heard)
        taker = other.post("/v1/completions", json=SHORT, headers=traceparent(OTHER_TRACE))
        # Only now, however slow the machine: the stream ran until here, and ends at its next piece.
        house.server.limit("slow", "output_tokens", 1, window="lifetime")
        account = [said for kind, said in heard if kind == "data"][-1]["fairgate"]
    assert (account["outcome"], account["stop_cause"], account["displaced"]["places_lost"]) == (
        "budget", "budget", 1
    )  # fmt: skip
    spans = house.spans(TRACE_ID, "engine", "settle")
    server, chat = spans["POST /v1/chat/completions"], spans[f"chat {MODEL}"]
    assert (server.kind, server.service, server.parent_id) == ("SERVER", GATEWAY, SPAN_ID)
    assert (chat.kind, chat.service, chat.parent_id) == ("INTERNAL", GATEWAY, server.span_id)
    stages = [spans[name] for name in ("store", "queue", "prefill", "decode", "settle")]
    assert {(each.kind, each.service, each.parent_id) for each in stages} == {
        ("INTERNAL", GATEWAY, chat.span_id)
    }
    engine = spans["engine"]
    assert (engine.service, engine.parent_id, engine.kind) == (ENGINE, chat.span_id, "INTERNAL")
    parts = [spans[name] for name in ("engine wait", "engine prefill", "engine decode", "engine pause")]
    assert {(each.service, each.parent_id) for each in parts} == {(ENGINE, engine.span_id)}
    assert {each.state for each in (server, chat, *stages)} == {STATE}

    assert chat.start_ns >= server.start_ns
    assert [each.start_ns for each in stages] == sorted(each.start_ns for each in stages)
    assert all(chat.start_ns <= each.start_ns <= each.end_ns <= chat.end_ns for each in stages)
    assert abs(spans["engine decode"].end_ns - spans["decode"].end_ns) < 2_000_000_000

    request_id = answer.headers["x-request-id"]
    told = chat.attributes
    assert told["fairgate.request_id"] == request_id
    assert (told["fairgate.outcome"], told["fairgate.stop_cause"]) == ("budget", "budget")
    assert (told["fairgate.tier.asked"], told["fairgate.tier.used"]) == ("batch", "batch")
    assert told["fairgate.trace.kept_for"] == "preempted"
    assert told["gen_ai.usage.output_tokens"] == account["actual"]["output_tokens"] > 0
    assert told["gen_ai.response.finish_reasons"] == ["budget"]
    assert told["fairgate.cost_nanousd"] == account["actual"]["cost_nanousd"]
    assert {"fairgate.tenant_id", "fairgate.project_id", "fairgate.key_id"} <= told.keys()
    assert {f"fairgate.ahead.{name}_tokens" for name in ("own", "others", "higher_tier")} <= told.keys()
    assert told["fairgate.quote.is_binding"] is False

    seen = [name for name, _ in chat.events]
    assert {"first_token", "paused", "resumed", "topped_up", "slo.missed"} <= set(seen)
    missed = dict(chat.events)["slo.missed"]
    assert (missed["fairgate.metric"], missed["fairgate.target_s"]) == ("e2e", 0.0001)
    assert {"fairgate.cause", "fairgate.alone_s"} <= missed.keys()

    taker_spans = house.spans(OTHER_TRACE, f"text_completion {MODEL}")
    took = taker_spans[f"text_completion {MODEL}"]
    assert took.attributes["fairgate.request_id"] == taker.headers["x-request-id"]
    assert took.attributes["fairgate.trace.kept_for"] == "parent_sampled"
    assert spans["engine pause"].links == [(OTHER_TRACE, took.span_id)]
    assert_no_secrets(house, slow)


def test_a_trace_names_the_route_that_a_request_came_by(house: House) -> None:
    trace_id, key = "2" * 32, house.server.tenant("routes")
    with house.server.http(key) as client:
        body = {"model": MODEL, "input": CANARY, "max_output_tokens": 1}
        assert client.post("/v1/responses", json=body, headers=traceparent(trace_id)).status_code == 200
    until(lambda: house.spans(trace_id, "POST /v1/responses"))


def test_a_request_at_another_server_which_saw_the_span_that_it_is_below(house: House) -> None:
    key = house.server.tenant("abroad")
    trace_id = "1" * 32
    body = {"model": FOREIGN, "messages": [{"role": "user", "content": CANARY}], "max_tokens": 1}
    with house.server.http(key) as client:
        assert (
            client.post("/v1/chat/completions", json=body, headers=traceparent(trace_id)).status_code == 200
        )
        assert client.post("/v1/chat/completions", json=body).status_code == 200
    until(lambda: house.spans(trace_id, "POST /v1/chat/completions"))
    found = house.collector.traces()[trace_id]
    (client_span,) = [each for each in found if each.kind == "CLIENT"]
    (chat,) = [each for each in found if each.name == f"chat {FOREIGN}" and each.kind == "INTERNAL"]
    asked = [each for each in house.peer.requests if CANARY in json.dumps(each.body)]
    with_trace, without = (each.headers for each in asked)
    assert with_trace["traceparent"] == f"00-{trace_id}-{client_span.span_id}-01"
    assert with_trace["tracestate"] == STATE
    assert (client_span.name, client_span.parent_id) == (f"chat {FOREIGN}", chat.span_id)
    peer = httpx.URL(house.peer.url)
    assert (client_span.attributes["server.address"], client_span.attributes["server.port"]) == (
        peer.host, peer.port
    )  # fmt: skip
    assert client_span.attributes["gen_ai.provider.name"] == "vllm"
    assert client_span.attributes["fairgate.replica_id"] == "b"
    assert ENGINE not in {each.service for each in found}
    _, own, _, flags = without["traceparent"].split("-")
    assert (own != trace_id, int(flags, 16) & 1) == (True, 0), "a trace of its own, which is not kept"
    assert own not in house.collector.traces()
    assert_no_secrets(house, key)


def test_a_refused_request_is_one_span_where_its_caller_sampled_it(house: House) -> None:
    key = house.server.tenant("refused-traces")
    sampled, unsampled, without_key = "4" * 32, "5" * 32, "6" * 32
    body = {"model": "no-such-model", "prompt": CANARY}
    for trace_id, is_sampled, secret, status in (
        (unsampled, False, key, 404),
        (sampled, True, key, 404),
        (without_key, True, "fg_live_0000000000000000_0000", 401),
    ):
        with house.server.http(secret) as client:
            refused = client.post("/v1/completions", json=body, headers=traceparent(trace_id, is_sampled))
        assert refused.status_code == status
    for trace_id, code in ((sampled, "model_not_found"), (without_key, "invalid_api_key")):
        [span] = house.spans(trace_id, "POST /v1/completions").values()
        assert (span.kind, span.parent_id, span.state) == ("SERVER", SPAN_ID, STATE)
        assert span.attributes["error.type"] == code
    assert unsampled not in house.collector.traces()
    assert_no_secrets(house, key)


def test_histograms_name_kept_traces_only(house: House) -> None:
    key = house.server.tenant("exemplary")
    body = {"model": MODEL, "prompt": "x", "max_tokens": 2, "ignore_eos": True}
    trace_id = "2" * 32
    with house.server.http(key) as client:
        client.post(
            "/v1/completions", json=body, headers=traceparent("3" * 32, sampled=False)
        ).raise_for_status()
        client.post("/v1/completions", json=body, headers=traceparent(trace_id)).raise_for_status()
        page = client.get("/metrics", headers={"accept": OPEN_METRICS}).text
    for name in ("request_duration", "time_to_first_token", "time_per_output_token"):
        assert f"gen_ai_server_{name}_seconds_bucket" in page
    exemplars = [line.partition(" # ")[2] for line in page.splitlines() if " # {" in line]
    assert f'{{trace_id="{trace_id}"}}' in {each.partition(" ")[0] for each in exemplars}
    assert "3" * 32 not in page
    assert lint(page, is_open_metrics=True) == ""
    with house.server.http() as client:
        assert "trace_id=" not in client.get("/metrics").text


def test_while_the_collector_is_away_nothing_is_lost_but_spans(house: House) -> None:
    key = house.server.tenant("undisturbed")
    body = {"model": MODEL, "prompt": "x", "max_tokens": 2, "ignore_eos": True}

    def lost(reason: str) -> float:
        return house.metric("fairgate_traces_lost_total", reason=reason) or 0

    def lost_by_engine() -> float:
        return house.metric("fairgate_engine_traces_lost_total", replica="engine-0") or 0

    before = lost("collector"), lost("line_full"), lost_by_engine()
    house.collector.status = 503
    try:
        with house.server.http(key) as client:
            for number in range(3):
                headers = traceparent(f"{number + 16:032x}")
                assert client.post("/v1/completions", json=body, headers=headers).status_code == 200
        until(lambda: lost("collector") >= before[0] + 3)
        until(lambda: lost_by_engine() >= before[2] + 3)
    finally:
        house.collector.status = 200
    until(house.server.is_idle)
    assert house.server.verify()["ok"]
    assert lost("line_full") == before[1]


def assert_no_secrets(house: House, key: str) -> None:
    """Neither what was asked and answered nor any key is in a span."""
    shown = [[each.name, each.attributes, each.events] for each in house.collector.spans]
    text = json.dumps(shown)
    for secret in (CANARY, key, house.server.owner_key):
        assert secret not in text
