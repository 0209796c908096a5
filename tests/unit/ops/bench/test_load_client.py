"""HTTP client and load client of the benchmarks, against a server that answers from a script."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator

import pytest

from ops.bench.common.http_client import HttpBroken, LoadHttpClient
from ops.bench.common.load import LoadClient
from ops.bench.common.load_client import TenantLoad

PLAIN = b'HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\n{"a":1}'
ACCOUNT = b'data: {"usage": {"prompt_tokens": 9}, "fairgate": {"id": 1}}\n\ndata: [DONE]\n\n'
EVENTS = b'data: {"n": 1}\r\n\r\n', b": waiting\n\n", ACCOUNT
STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    + b"".join(f"{len(event):x}\r\n".encode() + event + b"\r\n" for event in EVENTS)
    + b"0\r\n\r\n"
)
REFUSAL = b"HTTP/1.1 429 No\r\ncontent-length: 2\r\n\r\n{}"


class Script:
    """Answers each request with the next of `answers`, over and over; keeps its connections."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = answers
        self.asked: list[bytes] = []
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                self.asked.append(head + await reader.readexactly(length))
                answer = self.answers[(len(self.asked) - 1) % len(self.answers)]
                writer.write(answer)
                if not answer:
                    break
        writer.close()


@contextlib.asynccontextmanager
async def serving(script: Script) -> AsyncIterator[str]:
    async with await asyncio.start_server(script.serve, "127.0.0.1") as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        for writer in script.writers:
            writer.close()
            # The load client may have gone, and reset its connection, by then.
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def test_connections_are_kept_where_an_answer_was_read_to_its_end() -> None:
    script = Script(PLAIN, STREAM)
    client = LoadHttpClient(timeout_s=5.0)
    async with serving(script) as url:
        async with client.post(url, b"{}", {"authorization": "Bearer k"}) as response:
            assert (response.status, await response.read()) == (200, b'{"a":1}')
        async with client.post(url, b"{}") as response:
            assert response.is_stream
            lines = [line async for line in response.lines()]
        assert lines[:3] == ['data: {"n": 1}', "", ": waiting"]
        assert len(script.writers) == 1
        async with client.post(url, b"{}"):
            pass
        async with client.post(url, b"{}") as response:
            await response.read()
        assert len(script.writers) == 2, "an answer that was left ends its connection"
        client.close()
    assert b"authorization: Bearer k\r\n" in script.asked[0]


@pytest.mark.parametrize("answer", [b"", b"nonsense\r\n\r\n", PLAIN[:-3], STREAM[:-20]])
async def test_what_is_no_whole_answer_is_an_error(answer: bytes) -> None:
    client = LoadHttpClient(timeout_s=0.2)
    async with serving(Script(answer)) as url:
        with pytest.raises(HttpBroken):
            async with client.post(url, b"{}") as response:
                await response.read()


async def test_a_deadline_of_the_caller_is_the_callers() -> None:
    client = LoadHttpClient(timeout_s=30.0)
    async with serving(Script(PLAIN[:-3])) as url:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1), client.post(url, b"{}") as response:
                await response.read()


async def test_a_tenants_load_counts_what_its_clients_see() -> None:
    script = Script(STREAM, REFUSAL, PLAIN)
    async with serving(script) as url:
        load = TenantLoad(url, "key", ['{"n": 1}', '{"n": 2}'], "seed")
        load.poisson(1_000.0, 3, 1)
        await load.finish()
        seen = load.take()
        assert load.take().finished == 0
        await load.stop()
    assert (seen.finished, seen.refused) == (2, 1)
    assert seen.longest_prompt == 9
    assert seen.accounts == [{"id": 1}]
    assert len(seen.ttfts_s) == 1
    assert seen.cpu_share > 0
    assert [asked[-8:] for asked in script.asked] == [b'{"n": 1}', b'{"n": 2}', b'{"n": 1}']


async def test_tokens_are_counted_one_by_one_and_the_first_event_without_one_is_not_the_first_token() -> None:
    role = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
    two = (
        b'data: {"choices": [{"delta": {"content": "a\\"logprob\\":b"}, "logprobs": {"content": '
        b'[{"token": "a", "logprob":-0.1}, {"token": "b", "logprob": -0.2}]}}]}\n\n'
    )
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    chunks = [f"{len(event):x}\r\n".encode() + event + b"\r\n" for event in (role, two, ACCOUNT)]
    empty = [f"{len(event):x}\r\n".encode() + event + b"\r\n" for event in (role, ACCOUNT)]
    answers = (head + b"".join(chunks) + b"0\r\n\r\n", head + b"".join(empty) + b"0\r\n\r\n")
    async with serving(Script(*answers)) as url:
        load = TenantLoad(url, "key", ["{}"], "seed", counts_tokens=True)
        load.poisson(1_000.0, 2, 1)
        await load.finish()
        seen = load.take()
        await load.stop()
    assert (seen.finished, seen.tokens) == (2, 2)
    assert len(seen.ttfts_s) == 1, "an answer without a token has no first one"


async def test_the_process_carries_out_orders() -> None:
    async with serving(Script(PLAIN)) as url:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "ops.bench.common.load_client"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        client = LoadClient("day", process)
        await client.send({"url": url, "key": "k", "bodies": [json.dumps({})], "seed": "1"})
        await client.closed(2)
        seen = 0
        async with asyncio.timeout(10.0):
            while not seen:
                seen = (await client.take()).finished
        await client.stop()
        assert (await client.take()).finished == 0, "it has stopped"
        assert process.stdin is not None
        process.stdin.close()
        assert await process.wait() == 0, "it ends when its orders do"
