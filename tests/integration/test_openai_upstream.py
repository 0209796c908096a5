"""The OpenAI upstream against servers that answer well, badly, late or not at all.

Over real sockets, against peers scripted by each test (`tests/support/faulty_servers.py`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from engine.messages import Delta, SamplingParams, Submit
from gateway.fair_threads import INLINE_BYTES
from gateway.upstream.base import (
    CountedOutcome,
    NotBegun,
    SequenceRefused,
    UpstreamFailed,
    UpstreamUnavailable,
    Wording,
    takes_turns,
)
from gateway.upstream.health.breaker import BreakerRule
from gateway.upstream.http import connection
from gateway.upstream.openai import server_sequences
from gateway.upstream.openai.config import OpenAIServer, PrefixCache
from gateway.upstream.openai.request import PriorityStyle, UsageWish
from gateway.upstream.openai.sequence import FULL_BYTES
from gateway.upstream.openai.upstream import OpenAIUpstream
from tests.support.engine_process import until
from tests.support.faulty_servers import MODEL, Handler, Peer, PeerRequest, piece, usage
from tests.support.freed import no_cycles_left

CHAT = Wording(messages=[{"role": "user", "content": "Hello"}])
WHOLE = Wording(messages=CHAT.messages, is_streamed=False)
FAST = {"connect_s": 2.0, "first_byte_s": 0.2, "between_s": 0.2, "probe_s": 2.0, "capabilities": ()}
PROMPT = [1, 2, 3, 4]


def sequence(number: int = 0, **fields: Any) -> Submit:
    settings: dict[str, Any] = {
        "sequence_id": f"s{number}",
        "request_id": f"r{number}",
        "tenant_id": "t",
        "prompt_token_ids": PROMPT,
        "max_tokens": 10,
        "lease_tokens": 10,
    }
    return Submit(**(settings | fields))


@asynccontextmanager
async def upstream_of(
    *peers: Peer, tokenize: Callable[[str], int] | None = None, **fields: Any
) -> AsyncIterator[OpenAIUpstream]:
    """The first peer's, with the others as further replicas."""
    made = [
        OpenAIUpstream(OpenAIServer(f"peer-{index}", peer.url, MODEL, **(FAST | fields)), tokenize=tokenize)
        for index, peer in enumerate(peers)
    ]
    for each in made:
        each.stand_ins = tuple(other for other in made if other is not each)
        await each.start()
    try:
        yield made[0]
    finally:
        for each in made:
            await each.close()


async def answer_of(deltas: AsyncIterator[Delta]) -> tuple[str, CountedOutcome]:
    """Text and outcome; the tokens of the deltas must be what the lease let through."""
    text, outcome = "", None
    async with asyncio.timeout(10):
        async for delta in deltas:
            text += delta.text
            outcome = delta.outcome or outcome
    assert isinstance(outcome, CountedOutcome)
    return text, outcome


async def text_of(deltas: AsyncIterator[Delta], tokens: int) -> str:
    """The delta of the next `tokens` tokens: those that arrive together are one delta."""
    text, came = "", 0
    async with asyncio.timeout(10):
        while came < tokens:
            delta = await anext(deltas)
            assert delta.outcome is None
            text += delta.text
            came += len(delta.token_ids)
    assert came == tokens
    return text


def well(*texts: str, finish: str = "stop", count: Any = None) -> Handler:
    """Answers properly."""

    async def answer(request: PeerRequest) -> None:
        await request.head()
        await request.events(*(piece(text) for text in texts), piece("", finish))
        if count is not None:
            await request.events(count)
        await request.events("[DONE]")
        await request.last()

    return answer


# ---------------------------------------------------------------- answers


async def test_an_answer_is_streamed_and_counted_as_the_server_counts_it() -> None:
    async with (
        Peer(well("Hel", "lo", count=usage(3, 3, 2))) as peer,
        upstream_of(peer, prefix_cache=PrefixCache.SHARED) as upstream,
    ):
        submit = sequence(sampling=SamplingParams(temperature=0.5, top_p=1.0, seed=7, stop=("x",)))
        said = msgspec.structs.replace(CHAT, sampling={"temperature": 0.5, "top_p": 1.0, "stop": "x"})
        text, outcome = await answer_of(upstream.run(submit, said))
        (request,) = peer.requests
    assert text == "Hello"
    assert (outcome.emitted_tokens, outcome.cached_tokens, outcome.computed_tokens) == (3, 2, 1)
    assert (outcome.finish, outcome.basis, outcome.replica_id) == ("stop", "upstream", "peer-0")
    assert request.path == "/v1/chat/completions"
    assert request.body == {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 10,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "top_p": 1.0,
        "seed": 7,
        "stop": "x",
    }


async def test_connections_are_used_again_and_bounded() -> None:
    async with Peer(well("a", count=usage(1, 1))) as peer, upstream_of(peer) as upstream:
        for number in range(5):
            await answer_of(upstream.run(sequence(number), CHAT))
        assert peer.connections == upstream.describe()["connections"] == 1


async def test_the_servers_key_and_a_path_before_v1_are_used() -> None:
    async with Peer(well("a", count=usage(1, 1))) as peer:
        peer.url += "/gateway/v1"
        async with upstream_of(peer, api_key="secret") as upstream:
            await answer_of(upstream.run(sequence(), Wording(prompt="Once")))
        (request,) = peer.requests
    assert request.path == "/gateway/v1/completions"
    assert request.headers["authorization"] == "Bearer secret"
    assert "secret" not in repr(upstream.server)


@pytest.mark.parametrize(
    ("priority", "field", "value"),
    [
        (PriorityStyle.VLLM, "priority", 2),
        (PriorityStyle.SGLANG, "priority", 0),
        (PriorityStyle.SERVICE_TIER, "service_tier", "batch"),
        (PriorityStyle.NONE, "priority", None),
    ],
)
async def test_a_tier_is_passed_on_where_the_server_takes_it(
    priority: PriorityStyle, field: str, value: object
) -> None:
    async with Peer(well("a", count=usage(1, 1))) as peer, upstream_of(peer, priority=priority) as upstream:
        await answer_of(upstream.run(sequence(tier=2), CHAT))
        assert peer.requests[0].body.get(field) == value


async def test_a_long_answer_is_counted_in_a_thread_while_the_loop_goes_on() -> None:
    counting, counted_in, may_end = threading.Event(), list[int](), threading.Event()

    def words(text: str) -> int:
        if len(text) > INLINE_BYTES:  # the whole text, and not a piece as it comes
            counted_in.append(threading.get_ident())
            counting.set()
            assert may_end.wait(30)
        return len(text.split())

    long = "word " * (INLINE_BYTES // 4)
    async with Peer(well(long, "end")) as peer, upstream_of(peer, tokenize=words) as upstream:
        most = len(long.split()) + 1
        deltas = upstream.run(sequence(max_tokens=most, lease_tokens=most), CHAT)
        text = ""
        async with asyncio.timeout(10):
            while not text.endswith("end"):
                delta = await anext(deltas)
                assert delta.outcome is None
                text += delta.text
        assert await asyncio.to_thread(counting.wait, 30)
        may_end.set()
        rest, outcome = await answer_of(deltas)
        assert (rest, outcome.emitted_tokens, outcome.basis) == ("", most, "tokenizer")
        assert counted_in != [threading.get_ident()]


async def test_a_long_answer_that_is_cancelled_while_it_is_counted_is_charged_as_it_was_passed_on() -> None:
    counting, may_end = threading.Event(), threading.Event()

    def words(text: str) -> int:
        if len(text) > INLINE_BYTES:  # the whole text, and not a piece as it comes
            counting.set()
            assert may_end.wait(30)
        return len(text.split())

    long = "word " * (INLINE_BYTES // 4)
    async with Peer(well(long, "end")) as peer, upstream_of(peer, tokenize=words) as upstream:
        submit = sequence(max_tokens=2_000, lease_tokens=2_000)
        deltas = upstream.run(submit, CHAT)
        passed = len((await anext(deltas)).token_ids)
        assert await asyncio.to_thread(counting.wait, 30)
        upstream.cancel(submit.sequence_id, "cancelled")
        _, outcome = await answer_of(deltas)
        assert outcome.finish == "cancelled"
        assert passed <= outcome.emitted_tokens < len(long.split())
        may_end.set()
        await asyncio.to_thread(lambda: None)
        assert upstream.snapshot is None or not upstream.snapshot.running


async def test_without_usage_the_text_is_counted_by_the_tokenizer_or_estimated() -> None:
    def words(text: str) -> int:
        return len(text.split())

    async with Peer(well("one two ", "three")) as peer:
        async with upstream_of(peer, tokenize=words) as upstream:
            _, counted = await answer_of(upstream.run(sequence(), CHAT))
        async with upstream_of(peer) as upstream:
            _, estimated = await answer_of(upstream.run(sequence(), CHAT))
    assert (counted.emitted_tokens, counted.basis) == (3, "tokenizer")
    assert (estimated.emitted_tokens, estimated.basis) == (-(-len("one two three") // 3), "estimate")


async def test_a_chunk_of_many_tokens_counts_as_the_server_says() -> None:
    async def answer(request: PeerRequest) -> None:
        await request.head()
        await request.events(
            piece("abc", usage={"prompt_tokens": 4, "completion_tokens": 3}),
            piece("def", "stop", usage={"prompt_tokens": 4, "completion_tokens": 6}),
            "[DONE]",
        )
        await request.last()

    async with Peer(answer) as peer, upstream_of(peer, usage=UsageWish.EACH) as upstream:
        deltas = [delta async for delta in upstream.run(sequence(), CHAT)]
        assert peer.requests[0].body["stream_options"]["continuous_usage_stats"] is True
    assert sum(len(delta.token_ids) for delta in deltas) == 6
    assert [delta.first_index for delta in deltas] in ([0], [0, 3], [0, 3, 6])


@pytest.mark.parametrize("tokenize", [None, len])
async def test_a_prompt_costs_no_more_than_was_held_and_no_less_than_was_counted(
    tokenize: Callable[[str], int] | None,
) -> None:
    for said, computed in ((1, 1 if tokenize is None else 4), (2**31 - 1, 4)):
        async with (
            Peer(well("a", count=usage(said, 1))) as peer,
            upstream_of(peer, tokenize=tokenize) as upstream,
        ):
            _, outcome = await answer_of(upstream.run(sequence(), CHAT))
            assert (outcome.prompt_tokens, outcome.computed_tokens) == (computed, computed)


# ---------------------------------------------------------------- leases


async def test_nothing_beyond_the_lease_is_passed_on_before_it_is_covered() -> None:
    async with Peer(well("a", "b", "c", "d", count=usage(4, 4))) as peer, upstream_of(peer) as upstream:
        deltas = upstream.run(sequence(lease_tokens=2), CHAT)
        assert await text_of(deltas, 2) == "ab"
        waiting = asyncio.ensure_future(anext(deltas))
        await until(lambda: upstream.describe()["running"] == 1)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done()
        upstream.top_up("s0", 4, None)
        delta = await waiting
        assert delta.text == "cd"
        assert delta.outcome is not None
        assert delta.outcome.emitted_tokens == 4


async def test_a_spent_budget_ends_the_answer_at_the_last_covered_token() -> None:
    async def answer(request: PeerRequest) -> None:
        await request.head()
        await request.events(*(piece(letter) for letter in "abcdef"))
        await request.until_gone()
        raise ConnectionResetError

    async with Peer(answer) as peer, upstream_of(peer) as upstream:
        deltas = upstream.run(sequence(lease_tokens=3), CHAT)
        passed = await text_of(deltas, 3)
        upstream.cancel("s0", "budget")
        text, outcome = await answer_of(deltas)
        assert passed == "abc"
        assert (text, outcome.finish, outcome.emitted_tokens) == ("", "budget", 3)
        await until(lambda: peer.gone == 1)


async def test_what_the_server_counts_beyond_its_chunks_is_covered_before_the_end() -> None:
    async with Peer(well("a", "b", count=usage(4, 7))) as peer, upstream_of(peer) as upstream:
        deltas = upstream.run(sequence(lease_tokens=4), CHAT)
        seen: list[Delta] = []
        while sum(len(delta.token_ids) for delta in seen) < 4:
            seen.append(await anext(deltas))
        assert all(delta.outcome is None for delta in seen)
        upstream.top_up("s0", 10, None)
        _, outcome = await answer_of(deltas)
        assert outcome.emitted_tokens == 7


async def test_a_server_is_asked_for_no_more_than_could_be_held() -> None:
    async with (
        Peer(well("a", "b", finish="length", count=usage(4, 2))) as peer,
        upstream_of(peer) as upstream,
    ):
        wording = Wording(messages=CHAT.messages, most_tokens=lambda: 2)
        _, outcome = await answer_of(upstream.run(sequence(lease_tokens=2), wording))
        assert peer.requests[0].body["max_tokens"] == 2
    assert outcome.finish == "budget", "it ended where the budget does, not where the client wanted"


async def test_a_server_that_does_not_stop_is_stopped() -> None:
    async def answer(request: PeerRequest) -> None:
        await request.head()
        for _ in range(100_000):
            await request.events(piece("x"))

    async with Peer(answer) as peer, upstream_of(peer) as upstream:
        text, outcome = await answer_of(upstream.run(sequence(), CHAT))
        await until(lambda: peer.gone == 1)
    assert outcome.finish == "length"
    assert outcome.emitted_tokens == 10
    assert len(text) <= 40


async def test_a_reader_that_falls_behind_holds_the_server_up() -> None:
    sent = 0

    async def answer(request: PeerRequest) -> None:
        nonlocal sent
        await request.head()
        for _ in range(20_000):
            await request.events(piece("x" * 1000))
            sent += 1
        await request.events(piece("", "length"), usage(4, 20_000), "[DONE]")
        await request.last()

    async with Peer(answer) as peer, upstream_of(peer) as upstream:
        submit = sequence(max_tokens=2_000_000, lease_tokens=2_000_000)
        deltas = upstream.run(submit, CHAT)
        first = (await anext(deltas)).text
        await until(lambda: upstream.describe()["held_up"] == 1)
        assert FULL_BYTES // 1100 <= sent < 20_000
        text, outcome = await answer_of(deltas)
        assert len(first + text) == 20_000_000
        assert outcome.finish == "length"


async def test_the_first_words_are_taken_before_more_is_read() -> None:
    more, has_more = asyncio.Event(), asyncio.Event()

    async def answer(request: PeerRequest) -> None:
        await request.head()
        await request.events(piece("first "))
        await more.wait()
        await request.events(piece("and more"), piece("", "stop"), "[DONE]")
        await request.last()
        has_more.set()

    async with Peer(answer) as peer, upstream_of(peer, between_s=0.05) as upstream:
        deltas = upstream.run(sequence(), CHAT)
        [running] = upstream._running.values()
        await until(lambda: running._deltas)
        more.set()
        await has_more.wait()
        # However long they are not taken: that is not the server's fault.
        before = running._idle_timeout
        await until(lambda: running._idle_timeout is not before)
        assert len(running._deltas) == 1
        assert running.answer.finish is None
        assert upstream.describe()["held_up"] == 0
        assert (await anext(deltas)).text == "first "
        text, outcome = await answer_of(deltas)
        assert (text, outcome.finish) == ("and more", "stop")
        await until(lambda: len(upstream._client._idle) == 1)


# ---------------------------------------------------------------- cancels and failures


async def test_a_cancel_closes_the_connection_and_keeps_what_came() -> None:
    async def answer(request: PeerRequest) -> None:
        await request.head()
        await request.events(piece("a"), piece("b"))
        await request.until_gone()
        raise ConnectionResetError

    async with Peer(answer) as peer, upstream_of(peer) as upstream:
        deltas = upstream.run(sequence(), CHAT)
        await text_of(deltas, 2)
        upstream.cancel("s0", "cancelled")
        text, outcome = await answer_of(deltas)
        assert (text, outcome.finish, outcome.emitted_tokens) == ("", "cancelled", 2)
        assert outcome.uncertain_tokens == 0
        assert outcome.computed_tokens == len(PROMPT)
        await until(lambda: peer.gone == 1)
        assert upstream.describe()["running"] == 0
        assert upstream.is_up, "a client that leaves is no fault of the server"


async def bad_json(request: PeerRequest) -> None:
    await request.head()
    await request.events(piece("a"), "{broken")


async def error_event(request: PeerRequest) -> None:
    await request.head()
    await request.events(piece("a"), {"error": {"message": "CUDA error"}})


async def closes(request: PeerRequest) -> None:
    await request.head()
    await request.events(piece("a"))
    request.writer.transport.abort()


async def ends_early(request: PeerRequest) -> None:
    await request.head()
    await request.events(piece("a"))
    await request.last()


async def stalls(request: PeerRequest) -> None:
    await request.head()
    await request.events(piece("a"))
    await request.until_gone()


@pytest.mark.parametrize("answer", [bad_json, error_event, closes, ends_early, stalls])
async def test_an_answer_that_breaks_off_fails_after_what_came(answer: Handler) -> None:
    async with Peer(answer) as first, Peer(well("other")) as second, upstream_of(first, second) as upstream:
        deltas = upstream.run(sequence(), CHAT)
        assert (await anext(deltas)).text == "a"
        with pytest.raises(UpstreamFailed) as failed:
            await answer_of(deltas)
        assert not isinstance(failed.value, NotBegun)
        assert second.requests == [], "what a client has seen is not repeated"
        assert upstream.monitor.failures == 1


async def test_a_pause_ends_an_answer_however_long_its_beginning_may_take() -> None:
    patient = {"connect_s": 60.0, "first_byte_s": 60.0, "between_s": 0.1}
    async with Peer(stalls) as peer, upstream_of(peer, **patient) as upstream:
        with pytest.raises(UpstreamFailed, match=r"stood still for 0.1 s"):
            await answer_of(upstream.run(sequence(), CHAT))


async def not_http(request: PeerRequest) -> None:
    await request.send(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")


async def not_a_stream(request: PeerRequest) -> None:
    await request.json({"choices": [{"message": {"content": "whole"}}]})


async def closes_at_once(request: PeerRequest) -> None:
    request.writer.transport.abort()


async def says_nothing(request: PeerRequest) -> None:
    await request.until_gone()


async def fails(request: PeerRequest) -> None:
    await request.json({"error": {"message": "out of memory"}}, 500)


async def is_full(request: PeerRequest) -> None:
    await request.json({"error": {"message": "too many requests"}}, 429)


async def knows_us_not(request: PeerRequest) -> None:
    await request.json({"error": {"message": "who are you"}}, 401)


async def done_without_an_end(request: PeerRequest) -> None:
    await request.head()
    await request.events("[DONE]")


BAD_BEGINNINGS = [
    not_http, not_a_stream, closes_at_once, says_nothing, fails, is_full, knows_us_not, done_without_an_end,
]  # fmt: skip


@pytest.mark.parametrize("answer", BAD_BEGINNINGS)
async def test_what_did_not_begin_is_sent_to_another_replica(answer: Handler) -> None:
    async with (
        Peer(answer) as first,
        Peer(well("other", count=usage(1, 1))) as second,
        upstream_of(first, second) as upstream,
    ):
        text, outcome = await answer_of(upstream.run(sequence(), CHAT))
        assert (text, outcome.replica_id) == ("other", "peer-1")
        assert (len(first.requests), len(second.requests)) == (1, 1)


@pytest.mark.parametrize("answer", BAD_BEGINNINGS)
async def test_without_another_replica_it_fails_after_a_few_attempts(answer: Handler) -> None:
    async with Peer(answer) as peer, upstream_of(peer) as upstream:
        with pytest.raises((NotBegun, UpstreamUnavailable)):
            await answer_of(upstream.run(sequence(), CHAT))
        assert 1 <= len(peer.requests) <= 3
        assert upstream.describe()["running"] == 0


async def test_what_did_not_begin_is_not_sent_to_a_drained_replica() -> None:
    async with (
        Peer(fails) as first,
        Peer(well("drained")) as second,
        Peer(well("other", count=usage(1, 1))) as third,
        upstream_of(first, second, third) as upstream,
    ):
        upstream.stand_ins[0].set_drained(True)
        text, outcome = await answer_of(upstream.run(sequence(), CHAT))
        assert (text, outcome.replica_id, second.requests) == ("other", "peer-2", [])


async def test_what_runs_on_a_replica_when_it_is_drained_goes_on_and_is_counted_there() -> None:
    is_drained = asyncio.Event()

    async def answer(request: PeerRequest) -> None:
        await request.head()
        await request.events(piece("a"))
        await is_drained.wait()
        await request.events(piece("b"), piece("", "stop"), usage(1, 2))
        await request.last()

    async with (
        Peer(fails, is_sound=True) as first,
        Peer(answer) as second,
        upstream_of(first, second) as upstream,
    ):
        [other], changes = upstream.stand_ins, 0

        def changed() -> None:
            nonlocal changes
            changes += 1

        other.watch(changed)
        deltas = upstream.run(sequence(), CHAT)
        assert await text_of(deltas, 1) == "a"
        other.set_drained(True)
        other.set_drained(True)
        assert (changes, takes_turns(other), takes_turns(upstream)) == (1, False, True)
        assert (upstream.running_requests, other.running_requests) == (0, 1), "it was sent to the first one"
        is_drained.set()
        text, outcome = await answer_of(deltas)
        assert (text, outcome.replica_id, other.running_requests) == ("b", "peer-1", 0)
        other.set_drained(False)
        assert takes_turns(other)


async def test_an_answer_that_only_lacks_its_goodbye_is_complete() -> None:
    async def answer(request: PeerRequest) -> None:
        await request.head()
        await request.events(piece("a"), piece("", "stop"))
        request.writer.transport.abort()

    async with Peer(answer) as peer, upstream_of(peer) as upstream:
        text, outcome = await answer_of(upstream.run(sequence(), CHAT))
    assert (text, outcome.finish, outcome.basis) == ("a", "stop", "estimate")


async def test_what_was_covered_before_a_move_is_covered_after_it() -> None:
    is_told = asyncio.Event()

    async def answer(request: PeerRequest) -> None:
        await is_told.wait()
        await fails(request)

    second = Peer(well("a", "b", "c", count=usage(4, 3)))
    async with Peer(answer) as first, second, upstream_of(first, second) as upstream:
        deltas = upstream.run(sequence(lease_tokens=1), CHAT)
        upstream.top_up("s0", 3, None)
        is_told.set()
        text, outcome = await answer_of(deltas)
        assert (text, outcome.replica_id) == ("abc", "peer-1")


async def test_a_moved_sequence_is_topped_up_and_cancelled_where_it_is() -> None:
    async def answer(request: PeerRequest) -> None:
        await request.head()
        await request.events(*(piece(letter) for letter in "abcdef"))
        await request.until_gone()
        raise ConnectionResetError

    async with Peer(fails) as first, Peer(answer) as second, upstream_of(first, second) as upstream:
        deltas = upstream.run(sequence(lease_tokens=1), CHAT)
        assert (await anext(deltas)).text == "a"
        upstream.top_up("s0", 2, None)
        assert (await anext(deltas)).text == "b"
        upstream.cancel("s0", "cancelled")
        _, outcome = await answer_of(deltas)
        assert (outcome.emitted_tokens, outcome.replica_id) == (2, "peer-1")
        await until(lambda: second.gone == 1)


async def test_a_request_that_the_server_refuses_is_the_clients_affair() -> None:
    async def answer(request: PeerRequest) -> None:
        message = "This model's maximum context length is 1024 tokens."
        await request.json({"error": {"message": message, "code": None}}, 400)

    async with Peer(answer) as first, Peer(well("b")) as second, upstream_of(first, second) as upstream:
        with pytest.raises(SequenceRefused) as refused:
            await answer_of(upstream.run(sequence(), CHAT))
        assert refused.value.code == "context_length_exceeded"
        assert second.requests == []
        assert upstream.monitor.failures == 0


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (400, "the server that runs this model refuses the request: [31mno room for (its key) of acme"),
        (413, "the server that runs this model refuses the request: [31mno room for (its key) of acme"),
        (500, "it answered with status 500"),
    ],
)
async def test_a_refusals_own_words_reach_the_client_a_failures_only_the_log_and_the_key_neither(
    caplog: pytest.LogCaptureFixture, status: int, told: str
) -> None:
    async def answer(request: PeerRequest) -> None:
        await request.json({"error": {"message": "\x1b[31mno room for s3cret-key of acme"}}, status)

    caplog.set_level("DEBUG")
    async with Peer(answer) as peer, upstream_of(peer, api_key="s3cret-key") as upstream:
        with pytest.raises((SequenceRefused, NotBegun)) as failed:
            await answer_of(upstream.run(sequence(), CHAT))
    assert str(failed.value) == told
    assert "it says: [31mno room for (its key) of acme" in caplog.text
    assert "s3cret" not in caplog.text


async def test_a_refusal_repeats_the_request_and_its_salt_to_its_client_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wording = Wording([{"role": "user", "content": "a long and private question"}])

    async def answer(request: PeerRequest) -> None:
        said = f"salt {request.body['cache_salt']}: {request.body['messages'][0]['content']}"
        await request.json({"error": {"message": said}}, 400)

    caplog.set_level("DEBUG")
    async with Peer(answer, owned_by="vllm") as peer, upstream_of(peer) as upstream:
        with pytest.raises(SequenceRefused) as refused:
            await answer_of(upstream.run(sequence(), wording))
        salt = peer.requests[0].body["cache_salt"]
    assert refused.value.message.endswith("the request: salt (its key): a long and private question")
    assert "private" not in caplog.text
    assert salt not in caplog.text


# ---------------------------------------------------------------- what never ends, or lies


@pytest.mark.parametrize("wording", [CHAT, WHOLE])
@pytest.mark.parametrize("tokenize", [None, len])
async def test_text_beyond_what_was_asked_for_is_passed_on_only_where_the_server_stopped(
    tokenize: Callable[[str], int] | None, wording: Wording
) -> None:
    fits = 10 if tokenize is not None else 160
    for length, kept, finish in ((fits, fits, "stop"), (fits + 5, fits + 5, "stop"), (9_000, fits, "length")):
        handler = either_way("x" * length, "stop", usage(4, 10), step=35)
        async with Peer(handler) as peer, upstream_of(peer, tokenize=tokenize) as upstream:
            text, outcome = await answer_of(upstream.run(sequence(), wording))
            assert (len(text), outcome.finish, outcome.emitted_tokens) == (kept, finish, 10)
            assert upstream.monitor.contradictions["overrun"] == (finish == "length")


async def test_a_usage_that_contradicts_the_text_or_the_request_is_marked() -> None:
    for said, tokens, basis, kind in (
        (200, 200, "upstream", None),
        (185, 185, "upstream", None),
        (20, 200, "tokenizer", "usage_low"),
        (999, 300, "upstream", "usage_high"),
    ):
        handler = well("x" * 200, count=usage(4, said))
        async with Peer(handler) as peer, upstream_of(peer, tokenize=len) as upstream:
            submit = sequence(max_tokens=300, lease_tokens=300)
            _, outcome = await answer_of(upstream.run(submit, CHAT))
            assert (outcome.emitted_tokens, outcome.basis) == (tokens, basis)
            assert [each for each, number in upstream.monitor.contradictions.items() if number] == (
                [kind] if kind else []
            )


async def test_a_head_that_comes_too_slowly_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.1)

    async def answer(request: PeerRequest) -> None:
        await request.send(b"HTTP/1.1 200 x\r\n")
        while True:
            await request.send(b"x: y\r\n")
            await asyncio.sleep(0.02)

    async with Peer(answer) as peer, upstream_of(peer, first_byte_s=60.0, between_s=60.0) as upstream:
        with pytest.raises(NotBegun, match=r"head was not complete after 0.1 s"):
            await answer_of(upstream.run(sequence(), CHAT))


async def test_a_head_may_come_in_pieces_and_more_than_once() -> None:
    async def answer(request: PeerRequest) -> None:
        await request.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        for byte in b"HTTP/1.1 200 x\r\ncontent-type: text/event-stream\r\ncontent-length: 76\r\n\r\n":
            await request.send(bytes([byte]))
        await request.send(b'data: {"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]}\n\n')

    async with Peer(answer) as peer, upstream_of(peer) as upstream:
        assert (await answer_of(upstream.run(sequence(), CHAT)))[0] == "a"


@pytest.mark.parametrize(
    ("first", "says"), [("", "no answer began within 0.2 s"), ("a", "stood still for 0.2 s")]
)
async def test_comments_and_empty_events_are_no_progress(first: str, says: str) -> None:
    async def answer(request: PeerRequest) -> None:
        await request.head()
        await request.events(piece(first))
        while True:
            await request.send(b"8\r\n: ping\n\n\r\n")
            await request.events(piece(""))
            await asyncio.sleep(0.02)

    async with Peer(answer) as peer, upstream_of(peer) as upstream:
        with pytest.raises(UpstreamFailed, match=says):
            await answer_of(upstream.run(sequence(), CHAT))


async def test_an_answer_that_hangs_after_its_finish_is_complete() -> None:
    async def answer(request: PeerRequest) -> None:
        await request.head()
        await request.events(piece("a", "stop"))
        await request.until_gone()

    async with Peer(answer) as peer, upstream_of(peer) as upstream:
        assert (await answer_of(upstream.run(sequence(), CHAT)))[0] == "a"


async def test_a_tenants_salt_goes_to_servers_that_take_it() -> None:
    handler = well("a", count=usage(4, 1, 3))
    for owned_by, wish, is_sent, is_told in (
        ("vllm", PrefixCache.AUTO, True, True),
        ("sglang", PrefixCache.AUTO, True, True),
        ("someone", PrefixCache.AUTO, False, False),
        ("someone", PrefixCache.SALTED, True, True),
        ("vllm", PrefixCache.HIDDEN, False, False),
        ("vllm", PrefixCache.SHARED, False, True),
    ):
        async with Peer(handler, owned_by=owned_by) as peer, upstream_of(peer, prefix_cache=wish) as upstream:
            cached = [
                (await answer_of(upstream.run(sequence(tenant_id=tenant), CHAT)))[1].cached_tokens
                for tenant in ("ten-1", "ten-1", "ten-2")
            ]
            salts = [request.body.get("cache_salt") for request in peer.requests]
        assert cached == [3 if is_told else 0] * 3
        if is_sent:
            assert salts[0] == salts[1] != salts[2]
            assert all(len(salt) == 43 and "ten" not in salt for salt in salts)
        else:
            assert salts == [None] * 3


# ---------------------------------------------------------------- whole answers


def whole(text: str, finish: str | None = "stop", count: Any = None, **message: Any) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text} | message}
    value = {"object": "chat.completion", "choices": [choice | {"finish_reason": finish}]}
    return value | ({} if count is None else {"usage": count["usage"]})


def either_way(text: str, finish: str = "stop", count: Any = None, step: int = 3) -> Handler:
    """Answers as asked: as a stream, by `step` characters, or whole."""

    async def answer(request: PeerRequest) -> None:
        if request.body.get("stream"):
            words = [text[index : index + step] for index in range(0, len(text), step)]
            await well(*words, finish=finish, count=count)(request)
        else:
            await request.json(whole(text, finish, count))

    return answer


@pytest.mark.parametrize("finish", ["stop", "length", "tool_calls"])
@pytest.mark.parametrize("count", [None, usage(7, 5, 2), usage(7, 0), usage(3, 1_000)])
@pytest.mark.parametrize("tokenize", [None, lambda text: len(text.split())])
@pytest.mark.parametrize("text", ["", "a few words of it", "Übergrößenträger"])
async def test_an_answer_is_the_same_whether_it_comes_whole_or_as_a_stream(
    text: str, finish: str, count: Any, tokenize: Callable[[str], int] | None
) -> None:
    async with (
        Peer(either_way(text, finish, count)) as peer,
        upstream_of(peer, tokenize=tokenize) as upstream,
    ):
        streamed = await answer_of(upstream.run(sequence(0), CHAT))
        came_whole = await answer_of(upstream.run(sequence(0), WHOLE))
        assert [request.body.get("stream") for request in peer.requests] == [True, None]
        assert "stream_options" not in peer.requests[1].body
    assert came_whole[0] == streamed[0] == text
    for field in ("finish", "emitted_tokens", "computed_tokens", "cached_tokens", "prompt_tokens", "basis"):
        assert getattr(came_whole[1], field) == getattr(streamed[1], field), field
    assert came_whole[1].uncertain_tokens == 0


async def test_log_probabilities_of_a_whole_answer_are_those_of_its_tokens() -> None:
    top = [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.5}]
    content = [{"token": "a", "logprob": -0.5, "top_logprobs": top}] * 3

    async def answer(request: PeerRequest) -> None:
        body = whole("aaa", count=usage(4, 3))
        body["choices"][0]["logprobs"] = {"content": content}
        await request.json(body)

    async with Peer(answer) as peer, upstream_of(peer) as upstream:
        (delta,) = [delta async for delta in upstream.run(sequence(), WHOLE)]
    assert [each.logprob for each in delta.logprobs] == [-0.5] * 3
    assert delta.logprobs[0].top == [(0, "a", -0.5), (0, "b", -1.5)]


@pytest.mark.parametrize(
    ("lease_tokens", "whole_tokens", "could_be_held", "is_whole"),
    [
        (10, 10, None, True),
        (9, 10, None, False),
        (10, 9, None, False),
        (10, 0, None, False),
        (4, 10, 4, True),
        (3, 10, 4, False),
    ],
)
async def test_only_what_is_covered_to_its_end_is_asked_for_whole(
    lease_tokens: int, whole_tokens: int, could_be_held: int | None, is_whole: bool
) -> None:
    wording = Wording(
        messages=CHAT.messages,
        is_streamed=False,
        most_tokens=None if could_be_held is None else lambda: could_be_held,
    )
    handler = either_way("abc", "length", usage(4, 3))
    async with Peer(handler) as peer, upstream_of(peer, whole_tokens=whole_tokens) as upstream:
        _, outcome = await answer_of(upstream.run(sequence(lease_tokens=lease_tokens), wording))
        (request,) = peer.requests
        assert request.body.get("stream", False) is not is_whole
        assert request.body["max_tokens"] == (could_be_held or 10)
    assert outcome.finish == ("length" if could_be_held is None else "budget")


async def test_a_whole_answer_that_is_cancelled_costs_the_prompt_and_says_what_is_uncertain() -> None:
    async def answer(request: PeerRequest) -> None:
        await request.until_gone()
        raise ConnectionResetError

    async with Peer(answer) as peer, upstream_of(peer) as upstream:
        deltas = upstream.run(sequence(), WHOLE)
        await until(lambda: len(peer.requests) == 1)
        upstream.cancel("s0", "cancelled")
        text, outcome = await answer_of(deltas)
        await until(lambda: peer.gone == 1)
        assert upstream.describe()["running"] == 0
        assert upstream.is_up, "a client that leaves is no fault of the server"
    assert (text, outcome.finish, outcome.emitted_tokens) == ("", "cancelled", 0)
    assert (outcome.computed_tokens, outcome.uncertain_tokens) == (len(PROMPT), 10)


async def test_what_is_cancelled_before_it_was_sent_costs_nothing() -> None:
    async with Peer(either_way("abc")) as peer, upstream_of(peer) as upstream:
        await peer.stop()
        upstream._client.close()
        deltas = upstream.run(sequence(), WHOLE)
        upstream.cancel("s0", "cancelled")
        _, outcome = await answer_of(deltas)
    assert (outcome.computed_tokens, outcome.emitted_tokens, outcome.uncertain_tokens) == (0, 0, 0)


async def a_stream_all_the_same(request: PeerRequest) -> None:
    await request.head()
    await request.events(piece("a"), piece("", "stop"), "[DONE]")
    await request.last()


async def no_end(request: PeerRequest) -> None:
    await request.json(whole("", finish=None))


async def no_json(request: PeerRequest) -> None:
    await request.json(["garbage"])


BAD_WHOLES = [
    a_stream_all_the_same, no_end, no_json, not_http, closes_at_once, says_nothing, fails, is_full,
    knows_us_not,
]  # fmt: skip


@pytest.mark.parametrize("answer", BAD_WHOLES)
async def test_a_whole_answer_of_which_nothing_came_is_asked_for_elsewhere(answer: Handler) -> None:
    other = either_way("other", count=usage(1, 1))
    async with Peer(answer) as first, Peer(other) as second, upstream_of(first, second) as upstream:
        text, outcome = await answer_of(upstream.run(sequence(), WHOLE))
        assert (text, outcome.replica_id) == ("other", "peer-1")
        assert (len(first.requests), len(second.requests)) == (1, 1)


async def breaks_off(request: PeerRequest) -> None:
    await request.send(
        b"HTTP/1.1 200 x\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n", b'{"choices'
    )
    request.writer.transport.abort()


async def stands_still(request: PeerRequest) -> None:
    await request.send(
        b"HTTP/1.1 200 x\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n", b'{"choices'
    )
    await request.until_gone()


@pytest.mark.parametrize("answer", [breaks_off, stands_still])
async def test_a_whole_answer_of_which_something_came_is_not_repeated(answer: Handler) -> None:
    other = either_way("other")
    async with Peer(answer) as first, Peer(other) as second, upstream_of(first, second) as upstream:
        with pytest.raises(UpstreamFailed) as failed:
            await answer_of(upstream.run(sequence(), WHOLE))
        assert not isinstance(failed.value, NotBegun)
        assert second.requests == []
        assert upstream.monitor.failures == 1


def test_a_whole_answer_may_take_as_long_as_a_slow_stream_of_it() -> None:
    server = OpenAIServer("a", "http://a", MODEL, first_byte_s=120.0, between_s=60.0)
    assert [server.whole_s(tokens) for tokens in (1, 64, 65, 512)] == [180.0, 180.0, 240.0, 600.0]


# ---------------------------------------------------------------- health


async def test_a_server_that_gives_no_token_is_left_alone_until_it_gives_one() -> None:
    is_broken, rule = True, BreakerRule(ask_every_s=0.05, first_open_s=0.2)
    may_fail_again = asyncio.Event()

    async def answer(request: PeerRequest) -> None:
        if peer.asked > 1:
            await may_fail_again.wait()
        await (fails if is_broken else either_way("ok", count=usage(1, 1)))(request)

    async with Peer(answer) as peer, upstream_of(peer, breaker=rule) as upstream:
        with pytest.raises(NotBegun) as failed:
            await answer_of(upstream.run(sequence(), CHAT))
        assert not failed.value.is_requests
        assert (upstream.is_up, peer.asked) == (False, 1)
        assert "does not give a token that the gateway asks for: 500" in upstream.describe()["refusal"]
        await until(lambda: upstream.describe()["breaker"] == "half_open")
        with pytest.raises(UpstreamUnavailable):
            upstream.run(sequence(1), CHAT)
        await until(lambda: peer.asked >= 2)
        assert upstream.describe()["breaker"] == "half_open", "as long as the answer is out"
        may_fail_again.set()
        await until(lambda: peer.asked >= 3)
        assert len(peer.requests) == 1, "no client's request is sent to find out"
        is_broken = False
        await until(lambda: upstream.is_up)
        assert (upstream.describe()["breaker"], upstream.describe()["refusal"]) == ("closed", "")
        await answer_of(upstream.run(sequence(2), CHAT))


@pytest.mark.parametrize("answer", [not_http, closes_at_once, says_nothing, fails, stalls, ends_early])
async def test_a_request_that_fails_where_the_server_answers_others_is_to_blame_itself(
    answer: Handler,
) -> None:
    async with Peer(answer, is_sound=True) as peer, upstream_of(peer) as upstream:
        failed = await asyncio.gather(
            *(answer_of(upstream.run(sequence(number), CHAT)) for number in range(8)), return_exceptions=True
        )
        assert all(isinstance(each, UpstreamFailed) and each.is_requests for each in failed)
        assert upstream.is_up
        assert 1 <= peer.asked <= 2, "however many fail it is asked once a second"


@pytest.mark.parametrize("status", [403, 404, 405])
@pytest.mark.parametrize("is_sound", [True, False])
async def test_a_forbidden_request_is_refused_where_the_server_answers_others(
    status: int, is_sound: bool
) -> None:
    async def answer(request: PeerRequest) -> None:
        await request.json({"error": {"message": "no"}}, status)

    async with Peer(answer, is_sound=is_sound) as peer, upstream_of(peer) as upstream:
        with pytest.raises(SequenceRefused if is_sound else NotBegun, match=f"status {status}"):
            await answer_of(upstream.run(sequence(), CHAT))
        assert upstream.is_up == is_sound


async def test_a_failed_request_is_tried_on_one_other_replica_and_an_absent_servers_on_all() -> None:
    async def is_away(request: PeerRequest) -> None:
        await request.json({}, 503)

    for answer, attempts in ((fails, 2), (is_away, 3)):
        async with (
            Peer(answer, is_sound=True) as first,
            Peer(answer, is_sound=True) as second,
            Peer(answer, is_sound=True) as third,
            upstream_of(first, second, third) as upstream,
        ):
            with pytest.raises(NotBegun):
                await answer_of(upstream.run(sequence(), CHAT))
            assert sum(len(each.requests) for each in (first, second, third)) == attempts


async def test_a_wrong_key_closes_a_server_only_where_another_one_serves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Peer(knows_us_not) as first, Peer(well("b", count=usage(1, 1)), is_sound=True) as second:
        async with upstream_of(first) as alone:
            for number in range(3):
                with pytest.raises(NotBegun) as failed:
                    await answer_of(alone.run(sequence(number), CHAT))
                assert failed.value.code == "key"
            await until(lambda: first.asked >= 1)
            assert alone.is_up
        async with upstream_of(first, second) as upstream:
            assert (await answer_of(upstream.run(sequence(), CHAT)))[0] == "b"
            await until(lambda: not upstream.is_up)
    assert "it does not take the gateway's key (401)" in caplog.text


async def test_the_server_is_asked_as_it_was_found_to_answer() -> None:
    async def only_texts(request: PeerRequest) -> None:
        is_text = request.path == "/v1/completions" and request.body["prompt"] == "Hi"
        await request.json({"choices": []} if is_text else {}, 200 if is_text else 404)

    async with Peer(only_texts) as peer, upstream_of(peer, breaker=BreakerRule(ask_every_s=0.01)) as upstream:
        for number, asked in enumerate((2, 3)):
            with pytest.raises(SequenceRefused):
                await answer_of(upstream.run(sequence(number), CHAT))
            assert (peer.asked, upstream.is_up) == (asked, True)


@pytest.mark.parametrize("asks", [CHAT, WHOLE])
async def test_a_finish_reason_that_nobody_knows_is_a_stop_that_is_told(asks: Wording) -> None:
    finish = "eos\x1b" + "s" * 100
    async with Peer(either_way("a", finish=finish, count=usage(1, 1))) as peer, upstream_of(peer) as upstream:
        text, outcome = await answer_of(upstream.run(sequence(), asks))
        assert (text, outcome.finish, outcome.finish_word, upstream.monitor.failures) == ("a", "stop", "", 0)
        assert outcome.unknown_finish == "eos " + "s" * 36


async def test_a_replica_with_another_model_does_not_join(caplog: pytest.LogCaptureFixture) -> None:
    async with Peer(well("a"), models=("other",)) as peer, upstream_of(peer) as upstream:
        assert not upstream.is_up
        assert "does not have the model 'peer-model', but other" in upstream.describe()["refusal"]
        assert "does not have the model" in caplog.text
        peer.models = (MODEL,)
        await upstream.probe()
        assert upstream.is_up
        assert upstream.ready is not None
        assert upstream.ready.model.context_tokens == 1024


async def test_a_server_whose_context_is_not_known_does_not_join() -> None:
    async with Peer(well("a"), context_tokens=None) as peer:
        async with upstream_of(peer) as upstream:
            assert "set context_tokens" in upstream.describe()["refusal"]
        async with upstream_of(peer, context_tokens=2048) as upstream:
            assert upstream.is_up


async def test_a_server_that_does_not_list_what_it_serves_is_asked_for_its_health() -> None:
    async with Peer(well("a", count=usage(1, 1)), models=()) as peer:
        async with upstream_of(peer, health_path="/metrics", context_tokens=64) as upstream:
            assert upstream.is_up
        async with upstream_of(peer, health_path="/metrics") as upstream:
            assert "set context_tokens" in upstream.describe()["refusal"]


async def test_a_server_that_is_gone_is_missed_and_found_again() -> None:
    async with Peer(well("a")) as peer, upstream_of(peer) as upstream:
        changes: list[bool] = []
        upstream.watch(lambda: changes.append(upstream.is_up))
        await peer.stop()
        await upstream.probe()
        assert not upstream.is_up
        assert changes == [False]
        assert "does not answer" in upstream.describe()["refusal"]


async def test_what_others_run_there_shrinks_the_window() -> None:
    full = Peer(well("a"), page="vllm:num_requests_running 30\n")
    async with full as peer, upstream_of(peer, metrics_path="/metrics") as upstream:
        await until(lambda: upstream.ready is not None and upstream.ready.max_sequences == 2)
        assert upstream.describe()["saturation"]["running"] == 30


async def test_deltas_can_be_encoded_like_those_of_our_own_engine() -> None:
    async with Peer(well("a", count=usage(1, 1))) as peer, upstream_of(peer) as upstream:
        async for delta in upstream.run(sequence(), CHAT):
            assert msgspec.msgpack.encode(delta)


async def test_an_answer_that_was_read_is_freed_at_once() -> None:
    async with Peer(well("a", "b", count=usage(4, 2))) as peer, upstream_of(peer) as upstream:
        with no_cycles_left():
            assert (await answer_of(upstream.run(sequence(), CHAT)))[0] == "ab"


async def test_an_answer_without_usage_takes_away_what_only_the_server_counts() -> None:
    """Until an answer has a usage again; streams and whole answers are known apart."""
    is_counted = True

    async def answer(request: PeerRequest) -> None:
        counted = usage(4, 1) if is_counted else None
        if not request.body.get("stream"):
            choice = {"index": 0, "message": {"content": "a"}, "finish_reason": "stop"}
            await request.json({"choices": [choice], "usage": counted and counted["usage"]})
            return
        await request.head()
        await request.events(piece("a", "stop"), *([counted] if counted else []), "[DONE]")
        await request.last()

    peer = Peer(answer)
    async with peer, upstream_of(peer, capabilities=("tools", "json_object")) as upstream:
        changes: list[int] = []
        upstream.watch(lambda: changes.append(1))

        async def after(wording: Wording) -> set[str]:
            assert [each async for each in upstream.run(sequence(), wording)]
            return set(upstream.capabilities.words - {"text"})

        all_words = {"tools", "forced_tools", "json_object"}
        assert await after(CHAT) == await after(WHOLE) == all_words
        is_counted = False
        assert await after(CHAT) == await after(WHOLE) == {"json_object"}
        assert upstream.capabilities.lacks({"tools"}) == "tools"
        is_counted = True
        assert await after(CHAT) == {"json_object"}, "whole answers still have none"
        assert await after(WHOLE) == all_words
        assert len(changes) == 4


async def test_a_server_without_usage_is_tried_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all that is asked of it needs its usage, no other answer would come to show one."""
    monkeypatch.setattr(server_sequences, "USAGE_AGAIN_AFTER_S", 0.01)
    async with Peer(well("a")) as peer, upstream_of(peer, capabilities=("tools",)) as upstream:
        changed = asyncio.Event()
        assert [each async for each in upstream.run(sequence(), CHAT)]
        assert upstream.capabilities.lacks({"tools"}) == "tools"
        upstream.watch(changed.set)
        async with asyncio.timeout(10):
            await changed.wait()
        assert upstream.capabilities.lacks({"tools"}) is None


async def test_an_answer_that_loses_its_end_says_nothing_of_the_servers_usage() -> None:
    """Else one lost connection has every request with tools refused, and no answer comes to correct it."""

    async def answer(request: PeerRequest) -> None:
        await request.head()
        await request.events(piece("a", "stop"))
        request.writer.transport.abort()

    async with Peer(answer) as peer, upstream_of(peer, capabilities=("tools",)) as upstream:
        assert (await answer_of(upstream.run(sequence(), CHAT)))[0] == "a"
        assert "tools" in upstream.capabilities.words
        assert upstream.describe()["tells_usage"] is True


async def test_fragments_of_a_tool_call_wait_for_their_lease_as_text_does() -> None:
    """What a cancellation leaves of a call is marked as incomplete."""

    async def answer(request: PeerRequest) -> None:
        await request.head()
        for text in ('{"a', '": "', "bcd", "efg", '"}'):
            call = {"index": 0, "function": {"arguments": text}}
            await request.events({"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]})
        await request.until_gone()

    peer = Peer(answer)
    async with peer, upstream_of(peer, between_s=5.0) as upstream:
        deltas = upstream.run(sequence(lease_tokens=2), CHAT)
        arguments, tokens = "", 0
        outcome = None
        async for delta in deltas:
            for part in delta.parts:
                arguments += part["tool_calls"][0]["function"]["arguments"]
            tokens += len(delta.token_ids)
            if tokens == 2 and not delta.outcome:
                upstream.top_up("s0", 3, None)
            elif tokens == 3:
                upstream.cancel("s0", "budget")
            outcome = delta.outcome or outcome
    assert (arguments, tokens) == ('{"a": "bcd', 3)
    assert isinstance(outcome, CountedOutcome)
    assert (outcome.finish, outcome.incomplete, outcome.emitted_tokens) == ("budget", "tool_calls", 3)
