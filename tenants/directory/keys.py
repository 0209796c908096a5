"""API keys and their keyed digests.

`fg_live_<public id>_<secret>`: the public id finds the row, the secret (256 random bits) authenticates. Only
HMAC-SHA256(pepper, whole key) is stored, so a stolen database is useless without the server's pepper. A fast
hash suffices: unlike a password the secret cannot be guessed."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import string
from dataclasses import dataclass
from functools import lru_cache

from tenants.errors import Invalid, KeyRejected

PEPPER_SETTING = "pepper_fingerprint"

PREFIX = "fg_live_"
_ALPHABET = string.digits + string.ascii_letters
_PUBLIC_CHARS = 12
_SECRET_CHARS = 43  # 62**43 > 2**256
_KEY_CHARS = len(PREFIX) + _PUBLIC_CHARS + 1 + _SECRET_CHARS
MIN_PEPPER_BYTES = 16


@dataclass(frozen=True, slots=True)
class NewSecret:
    """A new key. `text` is shown once and never stored."""

    text: str
    public_id: str
    digest: bytes


def new_id(kind: str) -> str:
    """A random id such as `ten_4kX…`; `kind` is its prefix."""
    return f"{kind}_{''.join(secrets.choice(_ALPHABET) for _ in range(16))}"


def check_pepper(pepper: bytes) -> bytes:
    """Returns the pepper. Raises `Invalid` when it is too short to protect keys."""
    if len(pepper) < MIN_PEPPER_BYTES:
        raise Invalid("pepper", f"must have at least {MIN_PEPPER_BYTES} bytes")
    return pepper


def new_secret(pepper: bytes) -> NewSecret:
    public_id = "".join(secrets.choice(_ALPHABET) for _ in range(_PUBLIC_CHARS))
    secret = "".join(secrets.choice(_ALPHABET) for _ in range(_SECRET_CHARS))
    text = f"{PREFIX}{public_id}_{secret}"
    return NewSecret(text, public_id, digest_key(pepper, text))


def digest_key(pepper: bytes, text: str) -> bytes:
    """The stored digest of a key: HMAC-SHA256, 32 bytes."""
    keyed = _keyed(pepper).copy()
    keyed.update(text.encode("ascii"))
    return keyed.digest()


@lru_cache(maxsize=4)
def _keyed(pepper: bytes) -> hmac.HMAC:
    """HMAC state shared by all keys: setting it up costs more than one key's digest."""
    return hmac.new(pepper, digestmod=hashlib.sha256)


def public_id_of(text: str) -> str:
    """The public id inside a key's text. Raises `KeyRejected("malformed")` for other texts."""
    if len(text) != _KEY_CHARS or not text.startswith(PREFIX) or not text.isascii():
        raise KeyRejected("malformed")
    public_id, separator, secret = text[len(PREFIX) :].partition("_")
    if not separator or len(public_id) != _PUBLIC_CHARS or not (public_id + secret).isalnum():
        raise KeyRejected("malformed")
    return public_id


def prefix_of(public_id: str) -> str:
    return PREFIX + public_id


def quote_secret(pepper: bytes) -> bytes:
    return hmac.digest(pepper, b"fairgate quotes", hashlib.sha256)


def cache_secret(pepper: bytes) -> bytes:
    """The key that tenants' salts of other servers' prefix caches are made with."""
    return hmac.digest(pepper, b"fairgate cache salts", hashlib.sha256)


def fingerprint(pepper: bytes) -> str:
    """Identifies a pepper without revealing it."""
    return hmac.new(pepper, b"fairgate pepper fingerprint", hashlib.sha256).hexdigest()
