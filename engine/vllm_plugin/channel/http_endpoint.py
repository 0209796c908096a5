"""Endpoint plug-in of vLLM: the channel over vLLM's own HTTP, in its API server process.

vLLM loads it where `VLLM_PLUGINS` names `fairgate`. A call whose MAC is not good is refused here, before the
engine core is asked. `GET /fairgate/v1/about` is open, and answered from a copy that is read at most once a
second; its answer is sealed, so that a gateway sees whether the server has its key.
"""

from __future__ import annotations

import os
import time
from typing import Any

import msgspec

from engine.vllm_plugin.entry_points import NO_CHANNEL
from engine.vllm_plugin.key_file import read_key
from engine.vllm_plugin.protocol import ABOUT_PATH, EXCHANGE_PATH, About
from engine.vllm_plugin.signature import (
    MAX_FRAME_BYTES,
    ChannelRefused,
    decode_exchange,
    encode_about,
    encode_refusal,
)

STATUS = {
    "signature": 401,
    "time": 401,
    "replayed": 401,
    "malformed": 400,
    "too_large": 413,
    "superseded": 409,
    "protocol_version": 409,
    "no_channel": 503,
}
"""HTTP status by code of refusal; others are 503."""
ABOUT_S = 1.0
MAX_NONCE_CHARS = 64


class FairgateEndpoint:
    """vLLM's `EndpointPlugin`; it is made without arguments, once in each API server."""

    name = "fairgate"
    required_tasks = None

    def __init__(self) -> None:
        path = os.environ.get("FAIRGATE_VLLM_KEY_FILE", "")
        self._key = read_key(path) if path else None
        self._client: Any = None
        self._about: tuple[float, About] | None = None

    def attach_router(self, app: Any) -> None:
        from fastapi import Request

        # FastAPI reads the annotations of these functions where they were defined: they are set as objects.
        async def exchange(request: Any) -> Any:
            return _response(
                *await self.exchange(request.stream(), request.headers.get("content-length", ""))
            )

        async def about(nonce: str = "") -> Any:
            return _response(*await self.about(nonce))

        exchange.__annotations__ = {"request": Request}
        app.add_api_route(EXCHANGE_PATH, exchange, methods=["POST"], include_in_schema=False)
        about.__annotations__ = {"nonce": str}
        app.add_api_route(ABOUT_PATH, about, methods=["GET"], include_in_schema=False)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        self._client = engine_client

    async def exchange(self, body: Any, length: str) -> tuple[int, bytes]:
        """Status and frame that answer an exchange. `body`: its parts, asynchronously."""
        frame = bytearray()
        if length.isdecimal() and len(length) < 20 and int(length) > MAX_FRAME_BYTES:
            return _refusal("too_large", f"a frame holds at most {MAX_FRAME_BYTES} bytes")
        async for part in body:
            frame += part
            if len(frame) > MAX_FRAME_BYTES:
                return _refusal("too_large", f"a frame holds at most {MAX_FRAME_BYTES} bytes")
        if self._key is None or self._client is None:
            return STATUS["no_channel"], NO_CHANNEL.encode()
        try:
            decode_exchange(bytes(frame), self._key, time.time())
        except ChannelRefused as error:
            return _refusal(error.code, str(error))
        answer: str = await self._client.engine_core.call_utility_async("fairgate_exchange", frame.decode())
        if answer.startswith("{"):
            return STATUS.get(msgspec.json.decode(answer)["code"], 503), answer.encode()
        return 200, answer.encode()

    async def about(self, nonce: str) -> tuple[int, bytes]:
        """Status and sealed description, the answer to the question with `nonce`."""
        if self._key is None or self._client is None:
            return STATUS["no_channel"], NO_CHANNEL.encode()
        if not 16 <= len(nonce) <= MAX_NONCE_CHARS or not nonce.isascii():
            return _refusal("malformed", f"nonce must have 16 to {MAX_NONCE_CHARS} ASCII characters")
        now_s = time.monotonic()
        if self._about is None or now_s - self._about[0] > ABOUT_S:
            text: str = await self._client.engine_core.call_utility_async("fairgate_about")
            if not text:
                return STATUS["no_channel"], NO_CHANNEL.encode()
            self._about = now_s, msgspec.json.decode(text, type=About)
        return 200, encode_about(msgspec.structs.replace(self._about[1], nonce=nonce), self._key)


def _refusal(code: str, message: str) -> tuple[int, bytes]:
    return STATUS.get(code, 503), encode_refusal(code, message)


def _response(status: int, frame: bytes) -> Any:
    from fastapi import Response

    is_refusal = frame.startswith(b"{")
    return Response(
        frame, status, media_type="application/json" if is_refusal else "application/octet-stream"
    )
