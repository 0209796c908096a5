"""Mock upstream, load client, figures and goals of the gateway benchmark."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ops.bench.common.errors import CannotBench
from ops.bench.gateway.client import HttpReply
from ops.bench.gateway.figures import added, beside, figures, invalid, one_run, promises
from ops.bench.gateway.mock_upstream import (
    MARK,
    MAX_TOKENS,
    asked_tokens,
    request_length,
    stream_pieces,
    whole_answer,
)
from ops.bench.gateway.peers import ONE_WORKER, OURS, SCRAPED, TRACED, WATCHED, WORKERS
from ops.bench.gateway.process import cpu_s, machine_cpu_s, peak_bytes, process_tree
from ops.bench.gateway.run import GatewayBenchOptions, chosen, run
from ops.bench.gateway.side_loads import collector

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="epoll and /proc")

# ---------------------------------------------------------------- the upstream's answers, read by the client


def fed(data: bytes, pieces_of: int) -> tuple[HttpReply, int]:
    """A reply that arrives in pieces, and after how many it was complete."""
    reply = HttpReply()
    for number, place in enumerate(range(0, len(data), pieces_of), 1):
        if reply.receive(data[place : place + pieces_of]):
            return reply, number
    raise AssertionError("the reply was never complete")


@pytest.mark.parametrize("pieces_of", [1, 2, 3, 7, 64, 100_000])
@pytest.mark.parametrize("tokens", [1, 2, 64])
def test_tokens_are_counted_however_a_reply_is_cut(pieces_of: int, tokens: int) -> None:
    whole = whole_answer(tokens)
    reply, pieces = fed(whole, pieces_of)
    assert (reply.status, reply.tokens, reply.events) == (200, tokens, 0)
    assert pieces == -(-len(whole) // pieces_of), "complete with its last piece, not before"
    stream = b"".join(stream_pieces(tokens))
    reply, pieces = fed(stream, pieces_of)
    # One event a token, one with the reason of the end, one with the usage; [DONE] is none.
    assert (reply.status, reply.tokens, reply.events) == (200, tokens, tokens + 2)
    assert pieces == -(-len(stream) // pieces_of)


def test_a_stream_is_one_chunk_a_token() -> None:
    pieces = stream_pieces(5)
    assert [piece.count(MARK.encode()) for piece in pieces] == [1, 1, 1, 1, 1, 0]
    assert b'"completion_tokens":5' in pieces[-1]
    assert pieces[-1].endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_a_refusal_is_kept_to_be_shown() -> None:
    reply = HttpReply()
    assert (
        reply.receive(b"HTTP/1.1 429 Too Many\r\nConnection: close\r\nContent-Length: 9\r\n\r\nnot ") is False
    )
    assert reply.receive(b"today") is True
    assert (reply.status, reply.shown, reply.closes) == (429, b"not today", True)


@pytest.mark.parametrize("data", [b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 200 OK\r\nserver: x\r\n\r\nuntil I close"])
def test_what_is_no_kept_response_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="response"):
        HttpReply().receive(data)


@pytest.mark.parametrize(
    ("data", "length"),
    [
        (b"POST / HTTP/1.1\r\ncontent-length: 4\r\n", None),
        (b"POST / HTTP/1.1\r\ncontent-length: 4\r\n\r\nabc", None),
        (b"POST / HTTP/1.1\r\nContent-Length: 4\r\n\r\nabcdPOST", 42),
        (b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n", 36),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n", None),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 59),
    ],
)
def test_the_upstream_sees_where_a_request_ends(data: bytes, length: int | None) -> None:
    assert request_length(data) == length


def test_the_upstream_gives_what_was_asked_for() -> None:
    assert asked_tokens(b'{"max_tokens": 3}') == 3
    assert asked_tokens(b'{"max_completion_tokens":12,"stream":true}') == 12
    assert asked_tokens(b"{}") == asked_tokens(b'{"max_tokens": 100000}') == MAX_TOKENS


@linux
@pytest.mark.parametrize("streams", [False, True])
def test_clients_and_upstream_together(streams: bool) -> None:
    with upstream() as port:
        body = json.dumps({"max_tokens": 64, "stream": streams})
        text = f"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: {len(body)}\r\n\r\n{body}"
        seen = load(
            {"port": port, "requests": [text], "connections": 5, "seconds": 0.1, "tokens": MAX_TOKENS}
        )
    assert seen["errors"] == 0, seen["first_error"]
    assert seen["requests"] >= 5, "each connection had an answer"
    assert 0 <= seen["requests"] - seen["requests_in_time"] <= 5, "one a connection may end after the time"
    assert seen["tokens"] == seen["requests"] * MAX_TOKENS
    assert seen["events"] == (seen["requests"] * (MAX_TOKENS + 2) if streams else 0)
    assert 0 < seen["first_token_s"]["p50"] <= seen["latency_s"]["p50"] <= seen["latency_s"]["p99"]


@linux
def test_an_answer_of_another_length_is_an_error() -> None:
    with upstream() as port:
        text = 'POST / HTTP/1.1\r\ncontent-length: 16\r\n\r\n{"max_tokens":3}'
        seen = load({"port": port, "requests": [text], "connections": 1, "seconds": 5.0, "tokens": 64})
    assert seen["requests"] == 0
    assert seen["errors"] == 20, "it gives up long before the time is over"
    assert seen["first_error"] == "an answer had 3 tokens instead of 64"


@linux
def test_a_response_as_long_as_the_last_one_is_looked_at_all_the_same() -> None:
    good = whole_answer(3)
    short = good.replace(MARK.encode(), b"????", 1)
    refusal = good.replace(b"200 OK", b"503 NO")
    with answering([good, good, short, good, refusal]) as port:
        text = "POST / HTTP/1.1\r\ncontent-length: 0\r\n\r\n"
        seen = load({"port": port, "requests": [text], "connections": 1, "seconds": 0.1, "tokens": 3})
    assert seen["errors"] >= 2
    assert seen["first_error"] == "an answer had 2 tokens instead of 3"
    assert seen["requests"] >= 3
    # Of five answers three are good.
    assert abs(seen["requests"] - seen["errors"] * 3 / 2) <= 3


@contextlib.contextmanager
def answering(answers: list[bytes]) -> Iterator[int]:
    """A server for one connection that gives these answers, again and again, whatever it is asked."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                for answer in itertools.cycle(answers):
                    if not connection.recv(65_536):
                        return
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            thread.join(10)


@contextlib.contextmanager
def upstream() -> Iterator[int]:
    command = [sys.executable, "-m", "ops.bench.gateway.mock_upstream", "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()
            try:
                assert process.wait(10) == 0, "it ends when its stdin does"
            finally:
                process.kill()


def load(order: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "ops.bench.gateway.client"]
    done = subprocess.run(command, input=json.dumps(order), capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# ---------------------------------------------------------------- figures


def phase(**changes: Any) -> dict[str, Any]:
    return {
        "seconds": 2.0,
        "wall_s": 2.5,
        "requests": 100,
        "requests_in_time": 80,
        "tokens": 6400,
        "tokens_in_time": 5000,
        "events": 3200,
        "latency_s": {"p50": 0.010, "p99": 0.020},
        "first_token_s": {"p50": 0.004, "p99": 0.008},
        "gateway_cpu_s": 1.0,
        "upstream_cpu_s": 0.5,
        "side_load_cpu_s": 0.0,
        "watched_events": 0,
        "cpu_share": 0.1,
        "others_cores": 0.0,
    } | changes


def test_one_run_says_what_its_phases_say() -> None:
    phases = {
        "single": phase(latency_s={"p50": 0.001, "p99": 0.002}),
        "throughput": phase(side_load_cpu_s=0.05, watched_events=3),
        "first_token": phase(first_token_s={"p50": 0.003, "p99": 0.009}, others_cores=0.3),
        "streams": phase(gateway_cpu_s=3.2),
    }
    found = one_run(phases, peak_bytes=7, quiet_cores=0.1)
    assert (found["latency_p50_s"], found["latency_p99_s"], found["first_token_p50_s"]) == (
        0.001,
        0.002,
        0.003,
    )
    assert (found["requests_per_s"], found["tokens_per_s"]) == (40.0, 2500.0), "of what ended in time"
    assert found["cpu_s_per_request"] == 0.01, "of all that it did: the time after the end is in both"
    assert found["cpu_s_per_token"] == 0.0005
    assert found["tokens_per_event"] == 2.0
    assert found["cores"]["throughput"] == {
        "gateway": 0.4, "upstream": 0.2, "side_load": 0.02, "clients": 0.1, "others": 0.0,
    }  # fmt: skip
    assert found["side_load"] == {"events_per_s": 1.2, "cores_throughput": 0.02, "cores_streams": 0.0}, (
        "while the clients sent, to their last answer"
    )
    assert (found["peak_bytes"], found["others_cores"], found["disturbed"]) == (7, 0.3, True)


def test_a_run_that_nothing_disturbed_is_not_marked() -> None:
    quiet = dict.fromkeys(("single", "throughput", "first_token", "streams"), phase(others_cores=0.1))
    assert one_run(quiet, peak_bytes=0, quiet_cores=0.1)["disturbed"] is False


def runs(**latency_ms: list[float]) -> dict[str, list[dict[str, Any]]]:
    """Targets whose throughput is one over their latency."""
    return {
        name: [
            {
                "latency_p50_s": value / 1000,
                "latency_p99_s": value / 500,
                "first_token_p50_s": value / 1000,
                "requests_per_s": 1000 / value,
                "tokens_per_s": 64_000 / value,
                "cpu_s_per_request": value / 1000,
                "cpu_s_per_token": value / 64_000,
                "peak_bytes": 1,
                "side_load": {"events_per_s": 1.0, "cores_streams": value / 100},
                "invalid": None,
            }
            for value in values
        ]
        for name, values in latency_ms.items()
    }


def test_what_is_added_is_added_to_the_same_round() -> None:
    measured = runs(direct=[1.0, 3.0, 2.0], fairgate=[2.0, 5.0, 5.0])
    assert added(measured, "fairgate", "latency_p50_s") == pytest.approx([0.001, 0.002, 0.003])
    found = figures(measured)["fairgate"]["added_latency_p50_s"]
    assert (found["least"], found["median"], found["most"]) == pytest.approx((0.001, 0.002, 0.003))


def test_promises_are_judged_by_their_medians() -> None:
    measured = runs(
        direct=[0.1, 0.1, 0.1], litellm=[10.0, 10.0, 10.0], portkey=[0.5] * 3, fairgate=[0.6, 0.7, 2.0]
    )
    found = {promise.what: promise.as_json() for promise in promises(measured)}
    assert found["requests/s over LiteLLM's"]["median"] == pytest.approx(10 / 0.7)
    assert found["requests/s over LiteLLM's"]["ok"] is True, "one bad round of three is not the median"
    assert found["added p50 latency over LiteLLM's"]["median"] == pytest.approx(0.6 / 9.9)
    assert found["added p50 latency over LiteLLM's"]["ok"] is True
    assert found["added p50 latency over LiteLLM's"]["at_most"] == 0.2
    assert found["streamed tokens/s over LiteLLM's"] | {"values": None} == {
        "what": "streamed tokens/s over LiteLLM's",
        "at_least": 10.0,
        "median": pytest.approx(10 / 0.7),
        "least": pytest.approx(5.0),
        "most": pytest.approx(10 / 0.6),
        "values": None,
        "ok": True,
    }
    assert len(found) == 3, "neither Portkey nor the first token is promised"
    slow = promises(measured | {"fairgate": runs(fairgate=[2.2] * 3)["fairgate"]})
    assert [promise.as_json()["ok"] for promise in slow] == [False, False, False]


def test_what_did_not_run_is_not_judged() -> None:
    assert promises(runs(direct=[0.1], fairgate=[0.6])) == []


@pytest.mark.parametrize(
    ("clients", "gateway", "is_invalid"), [(0.97, 0.6, True), (0.97, 0.99, False), (0.9, 0.6, False)]
)
def test_a_round_whose_clients_were_the_bottleneck_is_invalid(
    clients: float, gateway: float, is_invalid: bool
) -> None:
    phases = dict.fromkeys(("single", "first_token", "streams"), phase())
    phases["throughput"] = phase(cpu_share=clients, gateway_cpu_s=2.5 * gateway)
    found = one_run(phases, peak_bytes=0, quiet_cores=0.1)
    why = "throughput: the clients used 97 % of a core, the gateway 60 %" if is_invalid else None
    assert found["invalid"] == why
    assert invalid({"fairgate": [found]}) == (f"fairgate, round 1: {why}" if why else None)
    assert invalid({"fairgate": [], "nginx": [found]}) is None, "nothing is promised of nginx"


@pytest.mark.parametrize(("pairs", "ok"), [([0.7, 0.91, 0.97], True), ([0.89, 0.89, 1.2], False)])
def test_what_estimates_cost_is_the_median_of_pairs(pairs: list[float], ok: bool) -> None:
    found = promises(runs(direct=[0.1], fairgate=[0.6]), pairs)[-1].as_json()
    assert (found["what"], found["at_least"]) == ("requests/s over ours without estimates", 0.9)
    assert (found["median"], found["ok"]) == (pairs[1], ok)


@pytest.mark.parametrize(("several", "ok"), [([1.1, 1.2, 1.9], True), ([1.1, 1.3, 1.3], False)])
def test_several_workers_are_compared_with_one_of_the_same_round(several: list[float], ok: bool) -> None:
    measured = runs(direct=[0.1] * 3, fairgate=[0.5] * 3, one=[1.0] * 3, several=several)
    measured |= {ONE_WORKER: measured.pop("one"), WORKERS: measured.pop("several")}
    found = [promise.as_json() for promise in promises(measured)]
    assert [(each["median"], each["at_most"], each["ok"]) for each in found] == [
        (pytest.approx(several[1]), 1.2, ok)
    ] * 2, "of a request and of a streamed token"
    targets, _ = chosen(GatewayBenchOptions(peers=(), workers=2))
    assert [target.name for target in targets][-2:] == [ONE_WORKER, WORKERS]


@pytest.mark.parametrize(
    ("with_it", "ok"), [([0.6, 1.1, 9.0], True), ([1.0, 1.2, 1.2], True), ([1.0, 1.3, 1.3], False)]
)
def test_a_side_load_is_compared_with_the_worst_round_without(with_it: list[float], ok: bool) -> None:
    measured = runs(fairgate=[1.0, 1.2, 0.8], watched=with_it)
    found = beside({OURS: measured["fairgate"], WATCHED: measured["watched"]}, WATCHED)
    assert found is not None
    assert [row["figure"] for row in found["figures"]] == [
        "requests_per_s", "tokens_per_s", "latency_p50_s", "first_token_p50_s",
    ]  # fmt: skip
    assert [row["ok"] for row in found["figures"]] == [ok] * 4, "more or less is better, as it may be"
    assert found["figures"][2]["without"]["most"] == pytest.approx(0.0012)
    assert found["figures"][2]["with"]["median"] == pytest.approx(with_it[1] / 1000)
    assert found["events_per_s"]["median"] == 1.0
    assert found["cores_streams"]["median"] == with_it[1] / 100


@pytest.mark.parametrize(
    ("chosen_by", "name"),
    [({"watchers": 20}, WATCHED), ({"traces": True}, TRACED), ({"scraper": True}, SCRAPED)],
)
def test_a_side_load_is_a_target_of_its_own_and_needs_rounds(chosen_by: dict[str, Any], name: str) -> None:
    assert beside(runs(fairgate=[1.0]), name) is None
    with pytest.raises(CannotBench, match=r"at least 3 rounds \(--rounds\)"):
        run(GatewayBenchOptions(peers=(), rounds=2, **chosen_by))
    targets, _ = chosen(GatewayBenchOptions(peers=(), **chosen_by))
    assert [target.name for target in targets] == ["direct", OURS, name]


async def test_the_collector_takes_every_export_of_a_connection() -> None:
    async with collector() as url, httpx.AsyncClient(base_url=url) as client:
        for _ in range(2):
            assert (await client.post("/v1/traces", content=b"spans")).status_code == 200


# ---------------------------------------------------------------- processes and choices


@linux
def test_a_process_tree_has_the_children_and_their_time() -> None:
    work = "import time; end = time.process_time() + 0.2\nwhile time.process_time() < end: pass"
    parent = (
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {work!r}])\n"
        "print(flush=True)\ninput()"
    )
    command = [sys.executable, "-c", parent]
    before_s = machine_cpu_s()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        own = process_tree(os.getpid())
        found = process_tree(process.pid)
        used_s, peak = cpu_s(found), peak_bytes(found)
        process.communicate("\n")
    assert found == [process.pid], "the child has ended"
    assert process.pid in own
    assert used_s >= 0.2, "its time was not lost"
    assert machine_cpu_s() - before_s >= 0.2
    assert peak > 2**20
    assert process_tree(process.pid) == []
    assert cpu_s([process.pid]) == peak_bytes([process.pid]) == 0


@linux
def test_a_process_that_has_ended_is_in_no_tree() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        # Waited for, and left in the table of processes.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert process_tree(process.pid) == []
        assert process.pid not in process_tree(os.getpid())


def test_peers_that_are_not_installed_are_named_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name, path=None: None)
    targets, skipped = chosen(GatewayBenchOptions(peers_dir=tmp_path))
    assert [target.name for target in targets] == ["direct", "fairgate"]
    assert [line.split()[0] for line in skipped] == ["nginx", "litellm", "portkey"]
    assert all(line.endswith("make bench-peers") for line in skipped)


def test_an_unknown_peer_is_refused() -> None:
    with pytest.raises(CannotBench, match="no peer 'envoy'; there are nginx, litellm, portkey"):
        run(GatewayBenchOptions(peers=("envoy",)))
