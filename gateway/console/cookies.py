"""Cookies of the console. Pure.

`SESSION` holds the session, `FORM` a random value that binds forms before a log-in. Scripts cannot read
either. Over https their names start with `__Host-`, so that no other host of the domain can set them."""

from __future__ import annotations

from collections.abc import Iterable

from litestar.datastructures import Cookie
from litestar.types import Scope

from tenants.networks import Network, address_of, is_within

SESSION = "fairgate_session"
FORM = "fairgate_form"
MAX_VALUE_CHARACTERS = 256
_SCHEME_HEADER = b"x-forwarded-proto"


def is_https(scope: Scope, trusted: Iterable[Network]) -> bool:
    """Whether the client uses https, with us or with a trusted proxy."""
    if scope["scheme"] == "https":
        return True
    peer = scope.get("client")
    address = address_of(peer[0]) if peer else None
    if address is None or not is_within(address, tuple(trusted)):
        return False
    said = [value for name, value in scope["headers"] if name == _SCHEME_HEADER]
    # The first one is that of the proxy next to the client.
    return bool(said) and said[0].split(b",")[0].strip().lower() == b"https"


def full_name(name: str, *, secure: bool) -> str:
    return f"__Host-{name}" if secure else name


def read(scope: Scope, name: str, *, secure: bool) -> str:
    """The value of a cookie; empty if it is missing or if there are several different ones."""
    wanted = full_name(name, secure=secure)
    values: set[str] = set()
    for header, value in scope["headers"]:
        if header == b"cookie":
            for pair in value.decode("latin-1").split(";"):
                key, _, text = pair.strip().partition("=")
                if key == wanted:
                    values.add(text)
    only = values.pop() if len(values) == 1 else ""
    return only if len(only) <= MAX_VALUE_CHARACTERS and only.isascii() else ""


def cookie(name: str, value: str, *, secure: bool) -> Cookie:
    """A cookie that lasts until the browser closes; the server knows when its session ends."""
    key = full_name(name, secure=secure)
    return Cookie(key, value=value, secure=secure, httponly=True, samesite="lax")


def cleared(name: str, *, secure: bool) -> Cookie:
    key = full_name(name, secure=secure)
    return Cookie(key, value="", max_age=0, secure=secure, httponly=True, samesite="lax")
