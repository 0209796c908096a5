"""Signatures of Standard Webhooks (standardwebhooks.com, 1.0.0), and the secrets that make them.

A secret is stored with its URL, encrypted (AES-256-GCM) with a key that is derived from the server's pepper:
a stolen database signs nothing, and posts nothing to receivers whose URL is a secret. Pure."""

from __future__ import annotations

import base64
import hashlib
import hmac

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from tenants.errors import Invalid

PREFIX = "whsec_"
SECRET_BYTES = 32
NONCE_BYTES = 12
_PURPOSE = b"fairgate webhook secrets"


def secret_text(secret: bytes) -> str:
    return PREFIX + base64.b64encode(secret).decode()


def headers(secret: bytes, event_id: str, at_s: int, body: bytes) -> dict[str, str]:
    """The headers that identify and sign one attempt to send an event."""
    signed = f"{event_id}.{at_s}.".encode() + body
    signature = base64.b64encode(hmac.digest(secret, signed, hashlib.sha256)).decode()
    return {"webhook-id": event_id, "webhook-timestamp": str(at_s), "webhook-signature": f"v1,{signature}"}


def seal(pepper: bytes, webhook_id: str, url: str, secret: bytes, nonce: bytes) -> bytes:
    """URL and secret as stored, bound to this webhook; `nonce`: random, `NONCE_BYTES`."""
    return nonce + _cipher(pepper).encrypt(nonce, secret + url.encode(), webhook_id.encode())


def unseal(pepper: bytes, webhook_id: str, sealed: bytes) -> tuple[str, bytes]:
    """URL and secret of a webhook. Raises `Invalid` where they were stored with another pepper or damaged."""
    try:
        opened = _cipher(pepper).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], webhook_id.encode())
        return opened[SECRET_BYTES:].decode(), opened[:SECRET_BYTES]
    except (InvalidTag, ValueError):
        raise Invalid(
            "webhook", "its secret was made with another pepper, or is damaged: remove it and add it again"
        ) from None


def _cipher(pepper: bytes) -> AESGCM:
    return AESGCM(hmac.digest(pepper, _PURPOSE, hashlib.sha256))
