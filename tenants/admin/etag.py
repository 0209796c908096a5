"""Entity tags of stored objects, and the condition of an act that names one (`If-Match`).

A tag is a digest of the object as stored, without what is shown beside it (names, use, status by clock).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from tenants.errors import PreconditionFailed

IfMatch = frozenset[str] | None
"""Tags of which the object must have one; None: no condition."""
ANY = frozenset({"*"})
"""The object must exist."""
TAG_CHARACTERS = 16


def etag_of(stored: Mapping[str, Any]) -> str:
    """The tag, without its quotes, of an object's stored state in its JSON form."""
    return hashlib.sha256(msgspec.json.encode(stored, order="sorted")).hexdigest()[:TAG_CHARACTERS]


def check(if_match: IfMatch, stored: Mapping[str, Any] | None) -> None:
    """Raises `PreconditionFailed` unless the object exists (None: it does not) and has one of the tags."""
    if if_match is None:
        return
    if stored is None or (if_match != ANY and etag_of(stored) not in if_match):
        raise PreconditionFailed(stored)
