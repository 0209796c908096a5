"""Form of API keys; a keyed hash suffices to check them."""

from __future__ import annotations

import pytest

from tenants.directory.keys import (
    cache_secret,
    check_pepper,
    digest_key,
    fingerprint,
    new_secret,
    prefix_of,
    public_id_of,
    quote_secret,
)
from tenants.errors import Invalid, KeyRejected

PEPPER = b"0123456789abcdef"


def test_a_key_has_the_documented_form() -> None:
    key = new_secret(PEPPER)
    live, kind, public_id, secret = key.text.split("_")
    assert (live, kind, public_id) == ("fg", "live", key.public_id)
    assert (len(public_id), len(secret)) == (12, 43)
    assert public_id_of(key.text) == key.public_id
    assert prefix_of(key.public_id) == f"fg_live_{key.public_id}"


def test_two_keys_are_never_alike() -> None:
    keys = [new_secret(PEPPER) for _ in range(200)]
    assert len({key.text for key in keys}) == len({key.public_id for key in keys}) == 200


def test_the_digest_depends_on_every_part_and_on_the_pepper() -> None:
    key = new_secret(PEPPER)
    assert key.digest == digest_key(PEPPER, key.text)
    assert len(key.digest) == 32
    last = "a" if key.text[-1] != "a" else "b"
    assert digest_key(PEPPER, key.text[:-1] + last) != key.digest
    assert digest_key(b"fedcba9876543210", key.text) != key.digest
    assert key.text.encode() not in key.digest


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fg_live_",
        "sk-1234567890",
        "fg_live_abcdefghijkl",
        "fg_live_abcdefghijkl_" + "x" * 42,
        "fg_live_abcdefghijkl_" + "x" * 44,
        "fg_test_abcdefghijkl_" + "x" * 43,
        "fg_live_abcdefghijkl-" + "x" * 43,
        "fg_live_abcdefghijk__" + "x" * 43,
        "fg_live_abcdefghijkl_" + "x" * 42 + "é",
        "fg_live_abcdefghijkl_" + "x" * 42 + "²",
        "fg_live_abcdefghijkl_" + "x" * 42 + "\n",
        "x" * 1_000_000,
    ],
)
def test_what_is_no_key_is_called_malformed(text: str) -> None:
    with pytest.raises(KeyRejected) as caught:
        public_id_of(text)
    assert caught.value.reason == "malformed"


def test_a_pepper_must_be_long_and_has_a_fingerprint() -> None:
    assert check_pepper(PEPPER) == PEPPER
    with pytest.raises(Invalid, match="pepper"):
        check_pepper(b"short")
    assert fingerprint(PEPPER) != fingerprint(b"fedcba9876543210")
    assert PEPPER.hex() not in fingerprint(PEPPER)


def test_what_is_derived_from_the_pepper_serves_one_purpose() -> None:
    pepper = b"p" * 32
    derived = {pepper, quote_secret(pepper), cache_secret(pepper), fingerprint(pepper).encode()}
    assert len(derived) == 4
    assert cache_secret(pepper) == cache_secret(pepper) != cache_secret(b"q" * 32)
