"""Passwords and names: what is accepted, and that only the right one opens."""

from __future__ import annotations

import pytest
from argon2 import PasswordHasher

from tenants.errors import Invalid
from tenants.people import passwords
from tenants.people.passwords import NO_PASSWORD, check_password, hash_password, verify_password
from tenants.people.person import MAX_NAME_CHARS, person_name

GOOD = "four words in a row"


@pytest.mark.parametrize(
    ("password", "says"),
    [
        ("", "at least 12"),
        ("short", "at least 12"),
        ("x" * 11, "at least 12"),
        ("x" * 201, "at most 200"),
        ("ada@example.org", "differ from the name"),
        ("ADA@Example.org", "differ from the name"),
    ],
)
def test_a_bad_password_is_refused_with_the_bound(password: str, says: str) -> None:
    with pytest.raises(Invalid, match=says) as refused:
        check_password(password, "ada@example.org")
    assert refused.value.field == "password"
    assert password not in str(refused.value) or len(password) < 3


@pytest.mark.parametrize(
    "password", [GOOD, "x" * 12, "x" * 200, "pässwörter sind gut", "密码密码密码密码密码密码"]
)
def test_any_long_enough_text_is_a_password(password: str) -> None:
    assert check_password(password, "ada") == password


def test_a_hash_opens_for_its_password_alone_and_never_repeats() -> None:
    stored, again = hash_password(GOOD), hash_password(GOOD)
    assert stored != again, "each has a salt of its own"
    assert stored.startswith("$argon2id$v=19$m=65536,t=3,p=1$")
    assert GOOD not in stored
    assert verify_password(stored, GOOD)
    for wrong in (GOOD + "x", GOOD[:-1], GOOD.upper(), "", "\ud800 lone surrogate"):
        assert not verify_password(stored, wrong)


def test_one_spelling_of_composed_letters() -> None:
    assert verify_password(hash_password("ga\u0308rtner im garten"), "g\u00e4rtner im garten")


@pytest.mark.parametrize("stored", ["", "plain", "$argon2id$v=19$m=65536,t=3,p=1$AAAA"])
def test_a_damaged_hash_opens_for_nothing(stored: str) -> None:
    assert not verify_password(stored, GOOD)


def test_the_hash_for_unknown_names_costs_what_a_real_one_does() -> None:
    hasher: PasswordHasher = passwords._HASHER
    assert not hasher.check_needs_rehash(NO_PASSWORD)
    assert len(NO_PASSWORD) == len(hash_password(GOOD)) < 200
    assert not verify_password(NO_PASSWORD, "")


@pytest.mark.parametrize(
    ("typed", "stored"),
    [("Ada", "ada"), ("ADA@Example.ORG", "ada@example.org"), ("Straße", "strasse"), ("Ａｄａ", "ada")],
)
def test_a_name_is_one_however_it_is_typed(typed: str, stored: str) -> None:
    assert person_name(typed) == stored == person_name(stored)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "two words",
        '"><img/src=x/onerror=alert(1)>',
        "nul\0",
        "line\nbreak",
        "\u202eright-to-left",
        "\ud800",
        "x" * (MAX_NAME_CHARS + 1),
    ],
)
def test_a_bad_name_is_refused(name: str) -> None:
    with pytest.raises(Invalid, match="letters, digits"):
        person_name(name)


def test_a_name_is_no_id() -> None:
    with pytest.raises(Invalid, match="look like an id"):
        person_name("PSN_4kXb")
