"""Commands of acts on people: shared by HTTP body, command line and method. None: not given."""

from __future__ import annotations

import msgspec


class PersonInvite(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /admin/v1/people`."""

    name: str
    """An e-mail address or a plain name, unique however it is capitalised."""
    role: str
    tenants: list[str] | None = None
    """Of a member: the tenants (names or ids), at least one."""


class PersonChange(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`PATCH /admin/v1/people/{person}`."""

    role: str | None = None
    tenants: list[str] | None = None
    """Replaces those that a member has; for other roles there are none."""
