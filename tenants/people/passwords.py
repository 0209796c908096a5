"""Passwords: what is accepted as one, and argon2id. Pure computation, for a thread of its own.

A hash takes about 0.15 s of one core and 64 MiB: `hashing_gate.py` bounds how many run at a time."""

from __future__ import annotations

import unicodedata

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from tenants.errors import Invalid

MIN_CHARS = 12
MAX_CHARS = 200

_HASHER = PasswordHasher(time_cost=3, memory_cost=64 * 1024, parallelism=1)
"""The memory and passes that RFC 9106 names for small machines. One lane: a log-in takes one core at most."""

NO_PASSWORD = (
    "$argon2id$v=19$m=65536,t=3,p=1$CnAqcuswYvkIEL0WRsbbAg$s0Fd8RhBrGREXfNn4JmZ3rD47kuRZm1Tll1+cA+5K2k"
)
"""The hash of random bytes, checked where person or password is missing: the same work, and no match."""


def check_password(password: str, name: str) -> str:
    """Only length is checked: rules on characters make people choose worse ones. Raises `Invalid`."""
    if not isinstance(password, str) or len(password) < MIN_CHARS:
        raise Invalid("password", f"needs at least {MIN_CHARS} characters; a few words are fine")
    if len(password) > MAX_CHARS:
        raise Invalid("password", f"must have at most {MAX_CHARS} characters")
    if _bytes_of(password).lower() == _bytes_of(name).lower():
        raise Invalid("password", "must differ from the name")
    return password


def hash_password(password: str) -> str:
    return _HASHER.hash(_bytes_of(password))


def verify_password(stored: str, password: str) -> bool:
    """Takes as long for a wrong password."""
    try:
        return _HASHER.verify(stored, _bytes_of(password))
    except (VerificationError, InvalidHashError):
        return False


def _bytes_of(password: str) -> bytes:
    """One spelling of a password: keyboards compose the same letters differently."""
    return unicodedata.normalize("NFKC", password).encode("utf-8", "surrogatepass")
