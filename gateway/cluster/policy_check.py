"""Checks a policy to be stored: its name, its options, and their combination."""

from __future__ import annotations

from pathlib import Path

from engine.scheduling.options import OptionValue, PolicyOptions, parsed_options
from engine.scheduling.policy import (
    LEARNED_POLICIES,
    TABLE_POLICIES,
    make_policy,
    options_of,
    refuse_idle_options,
    require_learned_table,
)
from gateway.flow.learned.table_file import LearnedTable
from tenants.admin.platform.policy import StoredPolicy


def parsed_policy(wanted: StoredPolicy) -> StoredPolicy:
    """The policy with its changed options. Opens no file: that is done when storing. Raises ValueError."""
    options = parsed_options(dict(wanted.options)).changed()
    if wanted.name not in TABLE_POLICIES:
        make_policy(
            wanted.name, options_of({name: option for name, option in options.items() if name != "table"})
        )
    return StoredPolicy(wanted.name, options)


def checked_policy(wanted: StoredPolicy, settings: PolicyOptions) -> StoredPolicy:
    """`parsed_policy` with its table, or that of the settings. Raises ValueError."""
    policy = parsed_policy(wanted)
    options = options_of({**own_tables(settings), **policy.options})
    refuse_idle_options(policy.name, options)
    learned_table_of(policy.name, options)
    return policy


def own_tables(settings: PolicyOptions) -> dict[str, OptionValue]:
    """The tables of the settings, for a policy without tables of its own."""
    return {name: path for name in ("table", "learned_table") if (path := getattr(settings, name))}


def learned_table_of(name: str, options: PolicyOptions) -> LearnedTable | None:
    """The table of a learned policy; None: another policy. Raises `NeedsTable` and `BadLearnedTable`."""
    require_learned_table(name, options)
    return LearnedTable.load(Path(options.learned_table)) if name in LEARNED_POLICIES else None
