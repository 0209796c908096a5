"""Checks of a policy that is to be stored: its name, its options, and what they are together."""

from __future__ import annotations

from engine.scheduling.options import PolicyOptions, parsed_options
from engine.scheduling.policy import TABLE_POLICIES, make_policy, options_of
from tenants.admin.policy import StoredPolicy


def parsed_policy(wanted: StoredPolicy) -> StoredPolicy:
    """The policy with the options that are not its defaults. No file is read, since who may only look must
    not open files by an option: whether a table can be used is seen when it is stored. Raises ValueError."""
    options = parsed_options(dict(wanted.options)).changed()
    if wanted.name not in TABLE_POLICIES:
        make_policy(
            wanted.name, options_of({name: each for name, each in options.items() if name != "table"})
        )
    return StoredPolicy(wanted.name, options)


def checked_policy(wanted: StoredPolicy, settings: PolicyOptions) -> StoredPolicy:
    """The same, with its table, or that of the settings. Raises ValueError."""
    found = parsed_policy(wanted)
    table = {"table": settings.table} if settings.table else {}
    make_policy(found.name, options_of({**table, **found.options}))
    return found
