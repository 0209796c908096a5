"""Fuzz of the decoder of engine messages: any bytes are a message or a `DecodeError`, in bounded memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine import messages
from engine.messages import SamplingParams

DECODERS: list[Callable[[bytes], object]] = [messages.decode_command, messages.decode_event]
MOST_BYTES_PER_BYTE = 512
"""Memory that one byte of a message may take while it is decoded: a one-byte field makes a whole struct."""
FIXED_BYTES = 1 << 16

SUBMIT = messages.Submit("seq", "req", "tenant", [1, 2, 3], 16, 16, sampling=SamplingParams(stop=("\n",)))
OUTCOME = messages.SequenceOutcome("seq", "req", "tenant", "stop", 3, 0, 3, 2, chunks=[(0.5, 3)])
VALID = [
    messages.encode(each)
    for each in (
        messages.Hello("gw"),
        SUBMIT,
        messages.TopUp("seq", 32),
        messages.Acknowledge(["seq", "seq/1"]),
        messages.SetPolicy("vtc", {"quantum": 3}),
        messages.SetBrakes({2: 0.5}),
        messages.SetKnobs(messages.EngineKnobs(0.5, 0.25, 8, 250)),
        messages.Import(messages.SequenceState(SUBMIT, [1, 2], 4, [b"kv"])),
        messages.Step(3, 0.1, [messages.Delta("seq", 0, [1], "a", outcome=OUTCOME)]),
        messages.Inventory("engine-0", [], [OUTCOME], ["gw"]),
        messages.Refused("seq", "duplicate", "it exists already"),
    )
]
ACKNOWLEDGE = b"\x82\xa1t\xabacknowledge\xacsequence_ids"
UNKNOWN_FIELD = b"\x83\xa1t\xabacknowledge\xa1x"


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A valid message with some bytes replaced, inserted or cut out, or with another one's tail."""
    payload = bytearray(draw(st.sampled_from(VALID)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(payload)))
        match draw(st.sampled_from(("replace", "insert", "cut", "splice"))):
            case "replace":
                payload[at : at + 1] = draw(st.binary(min_size=1, max_size=5))
            case "insert":
                payload[at:at] = draw(st.binary(min_size=1, max_size=8)) * draw(
                    st.sampled_from((1, 300, 5000))
                )
            case "cut":
                del payload[at : at + draw(st.integers(1, 16))]
            case _:
                other = draw(st.sampled_from(VALID))
                payload[at:] = other[draw(st.integers(0, len(other))) :]
    return bytes(payload)


@pytest.mark.parametrize("decode", DECODERS)
@given(payload=st.binary(max_size=256) | damaged())
@example(ACKNOWLEDGE + b"\x91\xa2\xff\xfe").via("text that is not UTF-8")
@example(UNKNOWN_FIELD + b"\x91" * 100_000).via("100,000 nested lists in an unknown field")
@example(UNKNOWN_FIELD + b"\x81\xa1a" * 100_000).via("100,000 nested maps in an unknown field")
@example(ACKNOWLEDGE + b"\xdd\xff\xff\xff\xff").via("a list that says that it has four thousand million ids")
@example(ACKNOWLEDGE + b"\xdb\xff\xff\xff\xff").via("a text that says that it has 4 GiB")
def test_any_bytes_are_a_message_or_a_decode_error(decode: Callable[[bytes], object], payload: bytes) -> None:
    tracemalloc.start()
    try:
        decode(payload)
    except msgspec.DecodeError:
        pass
    finally:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak_bytes <= FIXED_BYTES + MOST_BYTES_PER_BYTE * len(payload)


@pytest.mark.parametrize("payload", VALID, ids=lambda payload: repr(payload[:20]))
def test_the_valid_ones_are_decoded(payload: bytes) -> None:
    decoded = 0
    for decode in DECODERS:
        try:
            assert messages.encode(decode(payload)) == payload
            decoded += 1
        except msgspec.DecodeError:
            pass
    assert decoded == 1
