"""Signed quote tokens.

A token holds the whole promise and its addressee, signed with HMAC-SHA256 under a key derived from the
server's pepper, so that every gateway of an installation can verify it without having stored it:

    fgq1.<payload, base64url of msgpack>.<signature, base64url>

It is no secret: it opens nothing without the API key that it was made for.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from array import array
from collections.abc import Sequence

import msgspec

from engine.forecast.calibration import Bucket, HasTimes
from engine.forecast.wait.forecast import Figures
from gateway.domain.estimate import Estimate, Promise
from tenants.types import Tier

PREFIX = "fgq1"
MAX_TOKEN_CHARACTERS = 1_024
DIGEST_BYTES = 16
SIGNATURE_BYTES = 16

Pair = tuple[float, float]


class BadQuote(Exception):
    """No token, or its signature does not match."""


class Quote(msgspec.Struct, frozen=True, array_like=True):
    offer_id: str
    """The same in every tier: one of them can be redeemed, once."""
    tenant_id: str
    key_id: str
    model: str
    digest: bytes
    is_sized: bool
    """Quoted by length alone: any prompt of that length redeems it."""
    tier: str
    rank: int
    price_version: int
    issued_s: float
    """Unix time, as `expires_s`."""
    expires_s: float
    input_tokens: int
    choices: int
    max_tokens: int
    output_tokens: tuple[int, int]
    cost_nanousd: tuple[int, int]
    max_cost_nanousd: int
    told: Figures
    raw: Figures
    """Before correction: what it is judged by later."""
    load: int
    tokens_ahead: dict[str, int]
    basis: str
    samples: int
    saturated: bool
    is_binding: bool = True
    """False: made before anything was learned. It fixes tier and prices; a miss is not credited."""
    is_together: bool = False
    """Made while other quotes of its tenant were outstanding."""
    is_measured: bool = True

    def estimate(self) -> Estimate:
        bucket = Bucket("together" if self.is_together else "binding", False, self.rank, self.load)
        return Estimate(
            wait_s=self.told.wait_s,
            ttft_s=self.told.ttft_s,
            tpot_s=self.told.tpot_s,
            e2e_s=self.told.e2e_s,
            output_tokens=self.output_tokens,
            cost_nanousd=self.cost_nanousd,
            max_cost_nanousd=self.max_cost_nanousd,
            tokens_ahead=self.tokens_ahead,
            basis=self.basis,
            samples=self.samples,
            saturated=self.saturated,
            is_measured=self.is_measured,
            promise=Promise(bucket, self.raw),
        )


def figures_of(times: HasTimes) -> Figures:
    """Rounded to microseconds: a token is a header."""

    def pair(value: Pair) -> Pair:
        return round(value[0], 6), round(value[1], 6)

    return Figures(pair(times.wait_s), pair(times.ttft_s), pair(times.tpot_s), pair(times.e2e_s))


def digest_of(
    model: str, prompts: Sequence[Sequence[int]], choices: int, max_tokens: int, *, sized: bool = False
) -> bytes:
    """What a request and its quote have in common; `sized`: of the prompt only the number of tokens."""
    digest = hashlib.sha256(f"{model}\n{choices}\n{max_tokens}\n{len(prompts)}\n".encode())
    for prompt in prompts:
        digest.update(b"%d\n" % len(prompt))
        if not sized:
            digest.update(array("q", prompt).tobytes())
    return digest.digest()[:DIGEST_BYTES]


class Signer:
    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._decoder = msgspec.msgpack.Decoder(Quote)

    def sign(self, quote: Quote) -> str:
        payload = _encode(msgspec.msgpack.encode(quote))
        return f"{PREFIX}.{payload}.{_encode(self._signature(payload))}"

    def open(self, token: str) -> Quote:
        """Raises `BadQuote` with a reason for people."""
        if len(token) > MAX_TOKEN_CHARACTERS:
            raise BadQuote(f"it has {len(token)} characters; the most is {MAX_TOKEN_CHARACTERS}")
        prefix, _, rest = token.partition(".")
        payload, separator, signature = rest.partition(".")
        if prefix != PREFIX or not separator or not token.isascii():
            raise BadQuote("it is not a quote of this server")
        try:
            signed = hmac.compare_digest(_decode(signature), self._signature(payload))
            if not signed:
                raise BadQuote("it was altered, or another server signed it")
            return self._decoder.decode(_decode(payload))
        except (binascii.Error, msgspec.DecodeError):
            raise BadQuote("it was altered, or another server signed it") from None

    def _signature(self, payload: str) -> bytes:
        return hmac.digest(self._secret, payload.encode(), hashlib.sha256)[:SIGNATURE_BYTES]


def quote_of(
    estimate: Estimate,
    *,
    offer_id: str,
    tenant_id: str,
    key_id: str,
    model: str,
    digest: bytes,
    is_sized: bool,
    tier: Tier,
    rank: int,
    price_version: int,
    issued_s: float,
    valid_s: float,
    input_tokens: int,
    choices: int,
    max_tokens: int,
) -> Quote:
    promise = estimate.promise
    assert promise is not None, "an estimate of our own has a promise"
    return Quote(
        offer_id=offer_id,
        tenant_id=tenant_id,
        key_id=key_id,
        model=model,
        digest=digest,
        is_sized=is_sized,
        tier=tier.value,
        rank=rank,
        price_version=price_version,
        issued_s=round(issued_s, 6),
        expires_s=round(issued_s + valid_s, 3),
        input_tokens=input_tokens,
        choices=choices,
        max_tokens=max_tokens,
        output_tokens=estimate.output_tokens,
        cost_nanousd=estimate.cost_nanousd,
        max_cost_nanousd=estimate.max_cost_nanousd,
        told=figures_of(estimate),
        raw=figures_of(promise.raw),
        load=promise.bucket.load,
        tokens_ahead=estimate.tokens_ahead,
        basis=estimate.basis,
        samples=estimate.samples,
        saturated=estimate.saturated,
        is_binding=promise.is_learned,
        is_together=promise.bucket.kind == "together",
        is_measured=estimate.is_measured,
    )


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _decode(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
