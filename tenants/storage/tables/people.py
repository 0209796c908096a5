"""People who may log in to the console, their sessions, and links to set a password."""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, Column, ForeignKey, LargeBinary, String, Table

from tenants.storage.tables.base import ID, WORD, metadata

people = Table(
    "people",
    metadata,
    Column("id", ID, primary_key=True),
    # Folded: one spelling, however it is typed.
    Column("name", String(128), nullable=False, unique=True),
    Column("role", WORD, nullable=False),
    # Ids of a member's tenants.
    Column("tenants", JSON, nullable=False),
    Column("status", WORD, nullable=False),
    # argon2id; '': none.
    Column("password_hash", String(200), nullable=False),
    # When a password was set last; NULL: never. It stays when the password is reset.
    Column("password_us", BigInteger),
    # Raised by every change: sessions of an older one are void.
    Column("revision", BigInteger, nullable=False),
    Column("created_us", BigInteger, nullable=False),
)

# One-time links, by the SHA-256 of their token.
person_links = Table(
    "person_links",
    metadata,
    Column("digest", LargeBinary(32), primary_key=True),
    # Whose password it sets; NULL: it makes the first owner.
    Column("person_id", ID, ForeignKey("people.id"), index=True),
    Column("expires_us", BigInteger, nullable=False),
)

# By the SHA-256 of the cookie's value.
person_sessions = Table(
    "person_sessions",
    metadata,
    Column("digest", LargeBinary(32), primary_key=True),
    Column("id", ID, nullable=False, unique=True),
    Column("person_id", ID, ForeignKey("people.id"), nullable=False, index=True),
    # The person's, when it was opened.
    Column("person_revision", BigInteger, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    # Its last use, to the minute.
    Column("seen_us", BigInteger, nullable=False),
    # Its absolute end.
    Column("ends_us", BigInteger, nullable=False, index=True),
    Column("address", String(64), nullable=False),
    Column("user_agent", String(200), nullable=False),
)
