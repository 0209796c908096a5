"""Signatures as the reference library checks them, and secrets that a database alone does not give away."""

from __future__ import annotations

import time

import pytest
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from tenants.errors import Invalid
from tenants.outbox.signing import NONCE_BYTES, headers, seal, secret_text, unseal

SECRET = bytes(range(32))
PEPPER = b"a pepper for tests, 32 bytes....."
BODY = b'{"type":"webhook.test","data":{"summary":"\xc3\xa9"}}'


def test_the_reference_library_accepts_a_signature_and_no_other() -> None:
    now_s = int(time.time())
    receiver = Webhook(secret_text(SECRET))
    signed = headers(SECRET, "evt_1", now_s, BODY)
    assert receiver.verify(BODY, signed)["type"] == "webhook.test"
    for wrong, body in (
        (signed | {"webhook-id": "evt_2"}, BODY),
        (signed, BODY.replace(b"test", b"tess")),
        (headers(SECRET[::-1], "evt_1", now_s, BODY), BODY),
        (headers(SECRET, "evt_1", now_s - 3_600, BODY), BODY),
    ):
        with pytest.raises(WebhookVerificationError):
            receiver.verify(body, wrong)


def test_a_secret_is_opened_with_the_pepper_and_for_its_webhook_alone() -> None:
    url = "https://hooks.example/a-secret-path"
    sealed = seal(PEPPER, "whk_1", url, SECRET, bytes(NONCE_BYTES))
    assert SECRET not in sealed
    assert b"a-secret-path" not in sealed
    assert unseal(PEPPER, "whk_1", sealed) == (url, SECRET)
    for pepper, webhook, stored in (
        (PEPPER[::-1], "whk_1", sealed),
        (PEPPER, "whk_2", sealed),
        (PEPPER, "whk_1", sealed[:-1] + bytes([sealed[-1] ^ 1])),
        (PEPPER, "whk_1", b""),
    ):
        with pytest.raises(Invalid, match="another pepper, or is damaged"):
            unseal(pepper, webhook, stored)
