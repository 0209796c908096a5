"""Cursors of the audit log belong to one list, and every act is of a kind that can be asked for."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import msgspec
import pytest

from tenants.admin.audit_query import KINDS, MAX_CURSOR, AuditQuery, cursor_after, position
from tenants.errors import Invalid

ROOT = Path(__file__).parents[4]
ACTS = AuditQuery(act="tenant", since="2026-01-31T18:00:00+01:00")


def test_a_cursor_continues_its_own_list() -> None:
    assert position(cursor_after(ACTS, 41), ACTS) == 41
    assert position(cursor_after(AuditQuery(), 0), AuditQuery()) == 0


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (AuditQuery(), "no filter"),
        (AuditQuery(act="tenant"), "asked with act=tenant:"),
        (msgspec.structs.replace(ACTS, order="oldest"), "order=oldest"),
    ],
)
def test_a_cursor_of_another_filter_names_both_and_the_way_out(other: AuditQuery, named: str) -> None:
    with pytest.raises(Invalid) as caught:
        position(cursor_after(ACTS, 41), other)
    assert caught.value.field == "cursor"
    assert "act=tenant, since=2026-01-31T18:00:00+01:00" in caught.value.message
    assert named in caught.value.message
    assert "leave the cursor out" in caught.value.message


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "é",
        "A" * (MAX_CURSOR + 1),
        base64.urlsafe_b64encode(b'[{"act":"tenant"},-1]').decode(),
        base64.urlsafe_b64encode(b'[{"act":"tenant"},9223372036854775808]').decode(),
        base64.urlsafe_b64encode(b'[{"acts":"tenant"},1]').decode(),
        base64.urlsafe_b64encode(b"\xff\xfe").decode(),
    ],
)
def test_what_is_no_cursor_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match="next_cursor of the page before"):
        position(text, ACTS)


def test_the_longest_filter_fits_into_a_cursor() -> None:
    longest = AuditQuery(**dict.fromkeys(("actor", "subject", "act", "tenant", "since", "until"), "x" * 128))
    assert len(cursor_after(longest, 2**63 - 1)) <= MAX_CURSOR


def test_every_act_is_of_a_known_kind() -> None:
    """An act of a new kind: add the kind to `KINDS`."""
    found = {
        kind
        for package in ("gateway", "ops", "tenants")
        for path in (ROOT / package).rglob("*.py")
        for kind in re.findall(r'(?:actor|request), "([a-z_]+)\.[a-z_]+"', path.read_text())
    }
    assert found == set(KINDS)
