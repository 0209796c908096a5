"""Parser of server-sent events. Pure.

As in the HTML standard, as far as OpenAI-compatible servers use it: `data` lines, `event` names, comments.
Lines may end in LF or CRLF and break anywhere. Linear in the bytes, however small the pieces.
"""

from __future__ import annotations

MAX_EVENT_BYTES = 2**20
ENDS = (b"\n\n", b"\n\r\n")
"""Ends of an event; the line before may have a CR, too."""


class EventTooLarge(Exception):
    """One event exceeds the size of any chunk of an answer."""


class SseParser:
    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._rest = bytearray()
        """Start of an event whose end has not come."""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of every event now complete; its lines are joined by LF. Raises `EventTooLarge`."""
        if self._rest:
            seen = max(0, len(self._rest) - 2)  # an end may lie across two pieces
            self._rest += data
            if not any(self._rest.find(end, seen) >= 0 for end in ENDS):
                self._check(len(self._rest))
                return []
            data = bytes(self._rest)
            self._rest.clear()
        if b"\r" in data:
            # A CR at the very end stays until the next piece brings its LF.
            data = data.replace(b"\r\n", b"\n")
        *events, rest = data.split(b"\n\n")
        self._rest += rest
        self._check(len(rest))
        if len(data) > self._max_event_bytes:
            self._check(max(map(len, events), default=0))
        payloads: list[bytes] = []
        for event in events:
            if event.startswith(b"data: ") and b"\n" not in event:
                payloads.append(event[6:])
            elif (value := _data(event)) is not None:
                payloads.append(value)
        return payloads

    @property
    def is_between_events(self) -> bool:
        return not self._rest.strip()

    def _check(self, size: int) -> None:
        if size > self._max_event_bytes:
            raise EventTooLarge(f"an event is larger than {self._max_event_bytes} bytes")


def _data(event: bytes) -> bytes | None:
    lines: list[bytes] = []
    for line in event.split(b"\n"):
        if line.startswith(b"data:"):
            value = line[5:]
            lines.append(value[1:] if value.startswith(b" ") else value)
    return b"\n".join(lines) if lines else None
