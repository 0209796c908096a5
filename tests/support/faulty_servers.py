"""Servers that misbehave, which an upstream has to survive.

A few lines of asyncio that speak just enough HTTP to be taken for a server of OpenAI's API, and then do what
a test tells them. They stand for other people's servers, never for ours.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

MODEL = "peer-model"


@dataclass
class PeerRequest:
    """What arrived, and where the answer goes."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, *parts: bytes) -> None:
        """Sends some bytes, each part by itself."""
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()

    async def head(self, status: int = 200, kind: str = "text/event-stream", extra: str = "") -> None:
        """The beginning of a chunked answer."""
        chunked = "transfer-encoding: chunked\r\n"
        await self.send(f"HTTP/1.1 {status} x\r\ncontent-type: {kind}\r\n{chunked}{extra}\r\n".encode())

    async def events(self, *values: Any) -> None:
        """Server-sent events, each in an HTTP chunk of its own; text goes as it is."""
        for value in values:
            data = value if isinstance(value, str) else json.dumps(value)
            payload = f"data: {data}\n\n".encode()
            await self.send(b"%x\r\n%s\r\n" % (len(payload), payload))

    async def last(self) -> None:
        """The end of a chunked answer."""
        await self.send(b"0\r\n\r\n")

    async def json(self, value: Any, status: int = 200) -> None:
        """A whole answer."""
        payload = json.dumps(value).encode()
        await self.send(
            f"HTTP/1.1 {status} x\r\ncontent-type: application/json\r\n"
            f"content-length: {len(payload)}\r\n\r\n".encode(),
            payload,
        )

    async def until_gone(self) -> None:
        """Returns when the other side has closed the connection."""
        while await self.reader.read(1):
            pass


def piece(text: str, finish: str | None = None, usage: Any = None) -> dict[str, Any]:
    """One chunk of a chat."""
    value: dict[str, Any] = {
        "choices": [{"index": 0, "delta": {"content": text} if text else {}, "finish_reason": finish}]
    }
    return value | ({"usage": usage} if usage is not None else {})


def usage(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    """A last chunk with the count."""
    return {
        "choices": [],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        },
    }


Handler = Callable[[PeerRequest], Awaitable[None]]


@dataclass
class Peer:
    """One server. `answer` is what it does with a completion."""

    answer: Handler
    models: tuple[str, ...] = (MODEL,)
    context_tokens: int | None = 1024
    owned_by: str = "x"
    """What it calls itself in its list of models."""
    page: str = ""
    """Its Prometheus page."""
    is_sound: bool = False
    """It answers the gateway's own question for one token well, whatever `answer` does with others."""
    asked: int = 0
    """How often it was asked for one token of a plain text, or for one vector, by a gateway."""
    requests: list[PeerRequest] = field(default_factory=list)
    """Completions that were asked for."""
    connections: int = 0
    """Accepted so far."""
    gone: int = 0
    """Connections that the other side closed under a completion."""
    url: str = ""
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def __aenter__(self) -> Peer:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def beside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs something beside its connections, until it stops."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        return task

    async def stop(self) -> None:
        """No answer here any more."""
        assert self._server is not None
        self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            while (request := await _read(reader, writer)) is not None:
                await self._serve(request)
                if writer.is_closing():
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            self.gone += 1
        except asyncio.CancelledError:
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _serve(self, request: PeerRequest) -> None:
        if request.path.endswith("/v1/models"):
            models = [
                {"id": each, "max_model_len": self.context_tokens, "owned_by": self.owned_by}
                for each in self.models
            ]
            await request.json({"object": "list", "data": models})
        elif request.path == "/metrics":
            page = self.page.encode()
            await request.send(
                f"HTTP/1.1 200 x\r\ncontent-type: text/plain\r\ncontent-length: {len(page)}\r\n\r\n".encode(),
                page,
            )
        elif _is_question(request.body):
            self.asked += 1
            await (_one_token if self.is_sound else self.answer)(request)
        else:
            self.requests.append(request)
            await self.answer(request)


def _is_question(body: Any) -> bool:
    match body:
        case {"messages": [{"content": "Hi"}]} | {"prompt": "Hi"}:
            return set(body) <= {"model", "messages", "prompt", "max_tokens"} and body["max_tokens"] == 1
    return body in ({"model": MODEL, "input": "Hi"},)


async def _one_token(request: PeerRequest) -> None:
    message = {"role": "assistant", "content": "1"}
    choice = {"index": 0, "message": message, "text": "1", "finish_reason": "length"}
    await request.json({"choices": [choice], "usage": usage(1, 1)["usage"]})


@contextmanager
def in_thread(peer: Peer) -> Iterator[Peer]:
    """The peer on an event loop of its own, for tests without one."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(peer.__aenter__(), loop).result(10)
        yield peer
        asyncio.run_coroutine_threadsafe(peer.stop(), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> PeerRequest | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode().split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines if line)}
    data = await reader.readexactly(int(headers.get("content-length", "0")))
    body = json.loads(data) if data[:1] in (b"{", b"[") else data
    return PeerRequest(method, path, headers, body or None, reader, writer)
