"""How does a piece of text become a chunk of a stream at the least cost?

All chunks of one choice are the same but for their text, so what stands before and after it is made once. The
plain way is `responses.text_chunk`, which the frame is cut out of.
"""

from __future__ import annotations

from gateway import responses
from gateway.understand import Call

_PLACE = "\ue000"
"""Stands where the text is to be; what follows the text in a chunk holds no words of clients."""


class TextChunks:
    """Chunks of one request's choices, without log probabilities."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._frames = {0: self._frame(0)}

    def event(self, index: int, text: str) -> bytes:
        """One server-sent event: what `responses.event(responses.text_chunk(...))` gives."""
        frame = self._frames.get(index)
        if frame is None:
            frame = self._frames[index] = self._frame(index)
        return frame[0] + responses.encode_line(text) + frame[1]

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        event = responses.event(responses.text_chunk(self._call, index, _PLACE, (), 0))
        before, _, after = event.rpartition(responses.encode(_PLACE))
        return before, after
