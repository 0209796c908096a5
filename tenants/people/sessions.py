"""Sessions of people in the console: their rules and secrets. Pure.

The cookie holds 256 random bits, the database only their SHA-256 (random bits need no slow hash). The CSRF
token is derived from the cookie's value, so that a token of another session never fits."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import Any

from tenants.instants import from_us
from tenants.people.person import Person

SECRET_CHARS = 43
"""Of 32 bytes in URL-safe base64."""
SEEN_EVERY_S = 60.0
"""Granularity of a session's last use: otherwise each page would write."""
MAX_ADDRESS_CHARS = 64
MAX_USER_AGENT_CHARS = 200


@dataclass(frozen=True, slots=True)
class SessionRules:
    idle_s: float = 12 * 3600.0
    """Ends when unused for so long."""
    max_s: float = 7 * 86_400.0
    """Ends so long after the log-in, however it is used."""
    most: int = 20
    """Of one person; one more ends the oldest."""

    @property
    def seen_every_s(self) -> float:
        """How often a use is stored: often enough that no session in use counts as idle."""
        return min(SEEN_EVERY_S, self.idle_s / 10)


DEFAULT_RULES = SessionRules()


@dataclass(frozen=True, slots=True)
class Session:
    session_id: str
    person: Person
    created_us: int
    seen_us: int
    """Its last use, to the minute."""
    ends_us: int
    address: str
    user_agent: str
    csrf_token: str = ""
    """Only where it was found by its cookie."""

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.session_id,
            "person_id": self.person.person_id,
            "person": self.person.name,
            "created_at": from_us(self.created_us).isoformat(),
            "seen_at": from_us(self.seen_us).isoformat(),
            "ends_at": from_us(self.ends_us).isoformat(),
            "address": self.address,
            "user_agent": self.user_agent,
        }


@dataclass(frozen=True, slots=True)
class OpenedSession:
    """A new session. `cookie_value` is for the browser and is never stored."""

    cookie_value: str
    session: Session


def new_secret() -> str:
    """256 random bits as text: the value of a session's cookie, or the token of a link."""
    return secrets.token_urlsafe(32)


def is_secret(text: str) -> bool:
    """Whether a text can be one of `new_secret`; others need no look-up."""
    return len(text) == SECRET_CHARS and text.isascii() and text.replace("-", "a").replace("_", "a").isalnum()


def digest_of(secret: str) -> bytes:
    """SHA-256, as stored."""
    return hashlib.sha256(secret.encode()).digest()


def csrf_token_of(cookie_value: str) -> str:
    digest = hmac.digest(cookie_value.encode(), b"fairgate console forms", hashlib.sha256)
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def plain(text: str, most: int) -> str:
    """A user agent, printable and bounded."""
    return "".join(character for character in text[:most] if character.isprintable())
