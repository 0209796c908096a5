"""Instants as microseconds since 1970, exactly. Pure."""

from __future__ import annotations

from datetime import UTC, datetime


def to_us(at: datetime) -> int:
    """Exact, unlike `timestamp()`."""
    delta = at - datetime(1970, 1, 1, tzinfo=UTC)
    return (delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds


def from_us(at_us: int) -> datetime:
    seconds, microseconds = divmod(at_us, 1_000_000)
    return datetime.fromtimestamp(seconds, UTC).replace(microsecond=microseconds)
