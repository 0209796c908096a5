"""Signatures and frames between gateway and vLLM plug-in."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest

from engine.messages import SequenceOutcome, TenantShare
from engine.vllm_plugin.protocol import (
    PROTOCOL_VERSION,
    About,
    ContractClaims,
    Exchange,
    PluginReport,
    PolicyChoice,
    SequenceNews,
)
from engine.vllm_plugin.signature import (
    MAX_CLAIMS_CHARS,
    MAX_FRAME_BYTES,
    SKEW_S,
    ChannelRefused,
    SignatureRefused,
    decode_about,
    decode_exchange,
    decode_report,
    encode_about,
    encode_exchange,
    encode_refusal,
    encode_report,
    sign,
    verify,
)

KEY, FOREIGN = b"k" * 32, b"f" * 32
NOW = 1_790_000_000.0
CLAIMS = ContractClaims("gw-1", "req-1", "seq-1", "acme", 50, NOW, weight=3.0, tier=0, counter=7, heard=2)
NONCE = "0123456789abcdef"
ABOUT = About("0.1.0", "0.32.0", "hybrid", slots=16, places=64, not_supported=["lora"], nonce=NONCE)


def exchange(**fields: Any) -> Exchange:
    return Exchange(**{"gateway_id": "gw-1", "nonce": NONCE, "issued_at_s": NOW} | fields)


def test_signed_claims_come_back_as_they_were() -> None:
    text = sign(CLAIMS, KEY)
    assert verify(text, KEY, NOW) == CLAIMS
    assert verify(text, KEY, NOW + SKEW_S) == CLAIMS
    assert len(text) < 600


@pytest.mark.parametrize("now_s", [NOW + SKEW_S + 1, NOW - SKEW_S - 1, float("nan")])
def test_a_signature_of_another_time_is_refused(now_s: float) -> None:
    with pytest.raises(SignatureRefused, match="clock"):
        verify(sign(CLAIMS, KEY), KEY, now_s)


def test_a_foreign_signature_is_refused_and_the_reason_holds_no_secret() -> None:
    with pytest.raises(SignatureRefused, match="another key") as refused:
        verify(sign(CLAIMS, FOREIGN), KEY, NOW)
    assert "kkkk" not in str(refused.value)
    assert sign(CLAIMS, KEY).split(".")[1] not in str(refused.value)


def test_each_changed_character_is_noticed() -> None:
    text = sign(CLAIMS, KEY)
    for place, character in enumerate(text):
        other = "A" if character != "A" else "B"
        changed = text[:place] + other + text[place + 1 :]
        try:
            # The last character of a part may hold bits that are not used: then the claims are the same.
            assert verify(changed, KEY, NOW) == CLAIMS
            assert place in (text.index(".") - 1, len(text) - 1)
        except SignatureRefused:
            pass


@pytest.mark.parametrize("text", [None, 3, [], "", ".", "a.b.c", "ä.ö", "a" * (MAX_CLAIMS_CHARS + 1), "x.y"])
def test_what_is_no_signature_is_refused(text: object) -> None:
    with pytest.raises(SignatureRefused):
        verify(text, KEY, NOW)


@pytest.mark.parametrize(
    "change",
    [
        {"weight": 0},
        {"weight": -1},
        {"tier": 9},
        {"lease_tokens": -1},
        {"tenant_id": ""},
        {"tenant_id": "x" * 257},
    ],
)
def test_claims_out_of_range_are_refused_though_signed(change: dict[str, Any]) -> None:
    bad = msgspec.structs.replace(CLAIMS, **change)
    with pytest.raises(SignatureRefused, match="version"):
        verify(sign(bad, KEY), KEY, NOW)


def test_a_mac_of_an_exchange_is_none_of_claims() -> None:
    """One key, several kinds of message: none passes for another."""
    mac, _, payload = encode_exchange(exchange(), KEY).partition(b"\n")
    text = ".".join(
        base64.urlsafe_b64encode(part).decode().rstrip("=") for part in (payload, bytes.fromhex(mac.decode()))
    )
    with pytest.raises(SignatureRefused, match="another key"):
        verify(text, KEY, NOW)
    with pytest.raises(ChannelRefused, match="another key"):
        decode_report(encode_exchange(exchange(), KEY), KEY, NONCE)


def test_an_exchange_comes_back_as_it_was() -> None:
    said = exchange(
        top_ups={"seq-1": 80}, cancels={"seq-2": "budget"}, acknowledges=["seq-3"], adopt=True, report_from=9,
        policy=PolicyChoice("vtc", {"x": 1}), life="l", session="s",
    )  # fmt: skip
    assert decode_exchange(encode_exchange(said, KEY), KEY, NOW) == said


def test_a_report_comes_back_as_it_was() -> None:
    outcome = SequenceOutcome("seq-1", "req-1", "acme", "budget", 5, 0, 5, 50)
    report = PluginReport(
        nonce=NONCE, life="life", about=ABOUT, step=12, kv_usage=0.5,
        service={"acme": TenantShare(5, 50, {0: 9, 1: 9, 2: 9}, {1: 3})},
        sequences={"seq-1": SequenceNews("ended", 50, 50, outcome=outcome)},
        refused_signatures={"malformed": 1},
    )  # fmt: skip
    assert decode_report(encode_report(report, KEY), KEY, NONCE) == report
    with pytest.raises(ChannelRefused, match="another exchange"):
        decode_report(encode_report(report, KEY), KEY, "f" * 16)


def test_the_description_is_signed_and_answers_one_question() -> None:
    assert decode_about(encode_about(ABOUT, KEY), KEY, NONCE) == ABOUT
    with pytest.raises(ChannelRefused, match="another question"):
        decode_about(encode_about(ABOUT, KEY), KEY, "f" * 16)
    with pytest.raises(ChannelRefused, match="another key"):
        decode_about(encode_about(ABOUT, KEY), FOREIGN, NONCE)


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (encode_exchange(exchange(), FOREIGN), "signature"),
        (encode_exchange(exchange(), KEY)[:-1] + b" ", "signature"),
        (b"", "signature"),
        (b"\xff" * 100, "signature"),
        (b"x" * (MAX_FRAME_BYTES + 1), "too_large"),
        (encode_exchange(exchange(issued_at_s=NOW - SKEW_S - 1), KEY), "time"),
        (encode_exchange(exchange(protocol_version=PROTOCOL_VERSION + 1), KEY), "protocol_version"),
        (encode_exchange(exchange(nonce="short"), KEY), "malformed"),
        (encode_exchange(exchange(top_ups={"s": -1}), KEY), "malformed"),
    ],
)
def test_an_exchange_that_is_not_good_is_refused(frame: bytes, code: str) -> None:
    with pytest.raises(ChannelRefused) as refused:
        decode_exchange(frame, KEY, NOW)
    assert refused.value.code == code


def test_a_refusal_reaches_the_gateway_bounded() -> None:
    with pytest.raises(ChannelRefused, match="no") as refused:
        decode_report(encode_refusal("replayed", "no" * 1000), KEY, NONCE)
    assert refused.value.code == "replayed"
    assert len(str(refused.value)) == 400
    with pytest.raises(ChannelRefused, match="not one of the plug-in's"):
        decode_report(b'{"detail": "Not Found"}', KEY, NONCE)


def test_a_short_key_signs_nothing() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        sign(CLAIMS, b"short")
