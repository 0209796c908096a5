"""Answers the channel's frames in vLLM's engine core: what is not authenticated does no work."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from engine.vllm_plugin.channel.desk import LOG_EVERY_S, GatewayDesk
from engine.vllm_plugin.signature import (
    ChannelRefused,
    decode_exchange,
    encode_refusal,
    encode_report,
)

FRESH_S = 0.05
"""How long an answer from another thread waits for the next step, to report the present state."""

log = logging.getLogger("fairgate.vllm_plugin")


class Channel:
    """Answers frames; from any thread."""

    def __init__(
        self,
        desk: GatewayDesk,
        key: bytes,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._desk = desk
        self._key = key
        self._clock, self._wall_clock = clock, wall_clock
        self._logged_s: dict[str, float] = {}

    def answer(self, frame: bytes, *, is_core_thread: bool) -> bytes:
        """The sealed report, or the frame of a refusal. Never raises. `is_core_thread`: between two steps."""
        try:
            said = decode_exchange(frame, self._key, self._wall_clock())
            if is_core_thread:
                self._desk.ask_now()
            else:
                self._desk.ask(FRESH_S)
            return encode_report(self._desk.exchange(said, self._clock()), self._key)
        except ChannelRefused as error:
            self._complain(error)
            return encode_refusal(error.code, str(error))

    def _complain(self, error: ChannelRefused) -> None:
        now_s = self._clock()
        if now_s - self._logged_s.get(error.code, float("-inf")) >= LOG_EVERY_S:
            self._logged_s[error.code] = now_s
            log.warning("a gateway's exchange was refused (%s): %s", error.code, error)
