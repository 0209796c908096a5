"""Signatures between a gateway and the vLLM plug-in: HMAC-SHA256 (RFC 2104) under a shared key.

Signed claims are two base64url parts, `<claims>.<mac>`. A sealed frame of the channel is the hexadecimal MAC,
a line feed, and JSON. A frame that begins with `{` is a `ChannelRefusal`: it is not sealed, and proves only
that there was no answer. Each kind of message is signed as such, so that none passes for another. Pure: time
is passed in, in seconds of the wall clock, since two machines compare it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from typing import TypeVar

import msgspec

from engine.vllm_plugin.protocol import (
    PROTOCOL_VERSION,
    About,
    ChannelRefusal,
    ContractClaims,
    Exchange,
    PluginReport,
)

SKEW_S = 60.0
"""How far a signature's time may lie from the clock of the machine that checks it."""
MIN_KEY_BYTES = 32
MAX_CLAIMS_CHARS = 4096
MAX_FRAME_BYTES = 4 * 1024 * 1024
_CLAIMS, _EXCHANGE, _REPORT, _ABOUT = b"claims", b"exchange", b"report", b"about"


class SignatureRefused(Exception):
    """A signature that is not valid. `code`: `malformed`, `foreign`, `form`, `time`, or one of
    `PluginReport.refused_signatures`; the text, for a log, never holds the key, nor a MAC."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class ChannelRefused(Exception):
    """The plug-in refused an exchange: `code` is stable, the text is for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def sign(claims: ContractClaims, key: bytes) -> str:
    """Returns the claims as text, signed: `<claims>.<mac>`."""
    payload = msgspec.json.encode(claims)
    return f"{_base64(payload)}.{_base64(_mac(_CLAIMS, payload, key))}"


def verify(text: object, key: bytes, now_s: float) -> ContractClaims:
    """Returns the claims of a signed text, whether used before or not. Raises SignatureRefused."""
    if not isinstance(text, str) or len(text) > MAX_CLAIMS_CHARS or text.count(".") != 1:
        raise SignatureRefused("malformed", "it is no signature")
    encoded, _, mac = text.partition(".")
    try:
        payload, given = _bytes(encoded), _bytes(mac)
    except (binascii.Error, ValueError):
        raise SignatureRefused("malformed", "it is no signature") from None
    if not hmac.compare_digest(given, _mac(_CLAIMS, payload, key)):
        raise SignatureRefused("foreign", "signed with another key, or changed")
    try:
        claims = msgspec.json.decode(payload, type=ContractClaims)
    except msgspec.MsgspecError:
        raise SignatureRefused(
            "form", "claims of another form: gateway and plug-in differ in version"
        ) from None
    _check_time(claims.issued_at_s, now_s)
    return claims


def encode_exchange(exchange: Exchange, key: bytes) -> bytes:
    return _seal(_EXCHANGE, exchange, key)


def decode_exchange(frame: bytes, key: bytes, now_s: float) -> Exchange:
    """Returns the exchange of a sealed frame. Raises ChannelRefused, without work for a frame that is not
    signed with `key`. Whether its nonce was used before is the receiver's to see."""
    exchange = _unseal(_EXCHANGE, frame, key, Exchange)
    if exchange.protocol_version != PROTOCOL_VERSION:
        raise ChannelRefused(
            "protocol_version",
            f"the plug-in speaks protocol {PROTOCOL_VERSION}, the gateway {exchange.protocol_version}: "
            "install a fairgate-vllm of the gateway's version",
        )
    try:
        _check_time(exchange.issued_at_s, now_s)
    except SignatureRefused as error:
        raise ChannelRefused("time", str(error)) from None
    return exchange


def encode_report(report: PluginReport, key: bytes) -> bytes:
    return _seal(_REPORT, report, key)


def decode_report(frame: bytes, key: bytes, nonce: str) -> PluginReport:
    """Returns the report of a frame, the answer to the exchange with `nonce`. Raises ChannelRefused."""
    report = _unseal(_REPORT, frame, key, PluginReport)
    if report.nonce != nonce:
        raise ChannelRefused("malformed", "the report answers another exchange")
    return report


def encode_about(about: About, key: bytes) -> bytes:
    return _seal(_ABOUT, about, key)


def decode_about(frame: bytes, key: bytes, nonce: str) -> About:
    """Returns the description of a frame, the answer to the question with `nonce`. Raises ChannelRefused."""
    about = _unseal(_ABOUT, frame, key, About)
    if about.nonce != nonce:
        raise ChannelRefused("malformed", "the description answers another question")
    return about


def encode_refusal(code: str, message: str) -> bytes:
    """Returns the frame of a refusal; it is not sealed."""
    return msgspec.json.encode(ChannelRefusal(code, message))


Message = TypeVar("Message", Exchange, PluginReport, About)


def _seal(kind: bytes, message: Exchange | PluginReport | About, key: bytes) -> bytes:
    payload = msgspec.json.encode(message)
    return _mac(kind, payload, key).hex().encode() + b"\n" + payload


def _unseal(kind: bytes, frame: bytes, key: bytes, type_: type[Message]) -> Message:
    if len(frame) > MAX_FRAME_BYTES:
        raise ChannelRefused("too_large", f"a frame holds at most {MAX_FRAME_BYTES} bytes")
    if frame.startswith(b"{"):
        try:
            refusal = msgspec.json.decode(frame, type=ChannelRefusal)
        except msgspec.MsgspecError:
            raise ChannelRefused("malformed", "the answer is not one of the plug-in's") from None
        raise ChannelRefused(refusal.code[:64], refusal.message[:400])
    mac, _, payload = frame.partition(b"\n")
    if not hmac.compare_digest(mac, _mac(kind, payload, key).hex().encode()):
        raise ChannelRefused("signature", "signed with another key, or changed")
    try:
        return msgspec.json.decode(payload, type=type_)
    except msgspec.MsgspecError as error:
        raise ChannelRefused("malformed", f"{type_.__name__} of another form: {error}"[:400]) from None


def _check_time(issued_at_s: float, now_s: float) -> None:
    # Written so that a time that is no number is refused as well.
    if not abs(now_s - issued_at_s) <= SKEW_S:
        raise SignatureRefused(
            "time", f"signed {now_s - issued_at_s:.0f} s before this machine's clock; at most {SKEW_S:.0f} s"
        )


def _mac(kind: bytes, payload: bytes, key: bytes) -> bytes:
    """HMAC-SHA256 (RFC 2104). The kind is in it, so that no message passes for another."""
    if len(key) < MIN_KEY_BYTES:
        raise ValueError(f"the key must have at least {MIN_KEY_BYTES} bytes")
    return hmac.new(key, b"fairgate-vllm/1 " + kind + b"\n" + payload, hashlib.sha256).digest()


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
