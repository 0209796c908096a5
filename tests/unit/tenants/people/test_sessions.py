"""Secrets of sessions."""

from __future__ import annotations

from tenants.people.sessions import csrf_token_of, digest_of, is_secret, new_secret, plain


def test_secrets_are_long_random_and_recognised() -> None:
    made = {new_secret() for _ in range(100)}
    assert len(made) == 100
    assert all(is_secret(each) for each in made)
    for other in ("", "x" * 42, "x" * 44, "ä" * 43, "x" * 42 + "\0", "x" * 42 + "'", "٣" * 43):
        assert not is_secret(other)


def test_a_csrf_token_belongs_to_one_session_and_tells_nothing_of_its_cookie() -> None:
    one, other = new_secret(), new_secret()
    assert csrf_token_of(one) == csrf_token_of(one) != csrf_token_of(other)
    assert one not in csrf_token_of(one)
    assert digest_of(one).hex() != csrf_token_of(one)


def test_what_a_browser_says_of_itself_is_bounded_and_printable() -> None:
    assert plain("Mozilla\0\r\n\u202e/5.0" + "x" * 500, 20) == "Mozilla/5.0xxxxx"
