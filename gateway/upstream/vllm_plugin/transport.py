"""Carries sealed frames to the plug-in of a vLLM server over HTTP, or a UNIX socket of the same host."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol

from engine.vllm_plugin.protocol import EXCHANGE_PATH
from engine.vllm_plugin.signature import MAX_FRAME_BYTES
from gateway.upstream.http.client import HttpClient, HttpFailed
from gateway.upstream.http.target import ServerAddress

LENGTH_BYTES = 4


class ChannelFailed(Exception):
    """No answer came; the text has none of the server's own words."""


class NoPlugin(ChannelFailed):
    """The server answers, and has no such path."""


class Transport(Protocol):
    async def ask(self, frame: bytes, timeout_s: float) -> bytes: ...

    def close(self) -> None: ...


class HttpTransport:
    """On a connection of its own: an exchange never waits for an answer that waits for it."""

    def __init__(self, target: ServerAddress, api_key: str) -> None:
        self._client = HttpClient(target, max_connections=2, api_key=api_key)

    async def ask(self, frame: bytes, timeout_s: float) -> bytes:
        try:
            status, body = await self._client.post(EXCHANGE_PATH, frame, timeout_s)
        except HttpFailed as error:
            raise ChannelFailed(f"its plug-in does not answer: {error}") from None
        if status in (404, 405) and not body.startswith(b'{"code"'):
            raise NoPlugin
        if status >= 500:
            raise ChannelFailed(f"its plug-in answers with status {status}")
        return body

    def close(self) -> None:
        self._client.close()


class SocketTransport:
    """Over a UNIX socket; each frame has its length before it (4 bytes, big endian)."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, frame: bytes, timeout_s: float) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                if self._streams is None:
                    self._streams = await asyncio.open_unix_connection(self._path)
                reader, writer = self._streams
                writer.write(len(frame).to_bytes(LENGTH_BYTES, "big") + frame)
                await writer.drain()
                size = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
                if size > MAX_FRAME_BYTES:
                    raise ChannelFailed(f"its answer has {size} bytes, the most is {MAX_FRAME_BYTES}")
                return await reader.readexactly(size)
        except TimeoutError:
            self.close()
            raise ChannelFailed(f"its plug-in does not answer within {timeout_s:g} s") from None
        except FileNotFoundError:
            raise ChannelFailed(
                f"there is no socket {self._path}: the server's FAIRGATE_VLLM_SOCKET"
            ) from None
        except (OSError, asyncio.IncompleteReadError) as error:
            self.close()
            said = getattr(error, "strerror", None) or "the connection was closed"
            raise ChannelFailed(f"its plug-in does not answer on {self._path}: {said}") from None
        except BaseException:
            # What comes later would be taken for the answer to the next one.
            self.close()
            raise

    def close(self) -> None:
        if self._streams is not None:
            with contextlib.suppress(RuntimeError):
                self._streams[1].transport.abort()
            self._streams = None


def transport_of(socket_path: str, target: ServerAddress, api_key: str) -> Transport:
    return SocketTransport(socket_path) if socket_path else HttpTransport(target, api_key)
