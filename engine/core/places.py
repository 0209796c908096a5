"""Places: whose place a sequence may take when all are taken.

That of a lower tier; within its tier, if its tenant is owed some (`Submit.is_owed`), that of a tenant that
has had more service per weight, or has more sequences running per weight, also with a place less; else as the
policy's order says.

Bound: a sequence loses its place to an owed one at most `max_displacements` times, not counting losses after
which it had `SET_BACK_TOKENS` of service: one of N tokens at most `max_displacements` + N / `SET_BACK_TOKENS`
times. So a tenant's streams never become immune against newcomers.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from engine.sequence import Sequence

if TYPE_CHECKING:
    from engine.core.sequence_table import SequenceTable

SET_BACK_TOKENS = 64
"""Service after which a sequence that lost its place to an owed one may lose it again."""


def replaceable(
    table: SequenceTable, sequence: Sequence, placed: Collection[Sequence], now_s: float
) -> tuple[list[Sequence], str] | None:
    """Running sequences whose place `sequence` may take, and by which rule; `placed` got theirs just now."""
    below = runners_below(table, sequence)
    if below:
        return below, "tier"
    if sequence.submit.is_owed and (below := _runners_above_share(table, sequence, placed)):
        return below, "share"
    if not table.waiting.order_interrupts:
        return None
    entry = sequence.entry()
    found = [
        runner
        for runner in table.running
        if runner.tier == sequence.tier
        and runner not in placed
        and table.waiting.outranks(entry, runner.entry(), now_s)
    ]
    return (found, "order") if found else None


def runners_below(table: SequenceTable, sequence: Sequence) -> list[Sequence]:
    tier = sequence.tier
    if max(table.running_by_tier, default=tier) <= tier:
        return []
    return [runner for runner in table.running if runner.submit.tier > tier]


def set_back(sequence: Sequence) -> None:
    if not _has_recovered(sequence):
        sequence.times_set_back += 1
    sequence.set_back_at = sequence.attained_tokens


def _has_recovered(sequence: Sequence) -> bool:
    return sequence.attained_tokens - sequence.set_back_at >= SET_BACK_TOKENS


def _runners_above_share(
    table: SequenceTable, sequence: Sequence, placed: Collection[Sequence]
) -> list[Sequence]:
    """Runners of its tier whose tenants have had more service per weight, or as much with more sequences per
    weight, or have more sequences per weight also with a place less; also those once owed their place. (A
    tenant idle for a moment begins level with those that wait: service alone would not tell.)"""
    tier, weight = sequence.tier, sequence.submit.weight
    standings = table.standings.of_tier(tier)
    had = standings.value(sequence.tenant_id)
    count = table.running_tenants.get((tier, sequence.tenant_id), 0)

    def stands_above(runner: Sequence) -> bool:
        value = standings.value(runner.tenant_id)
        if value > had:
            return True
        if runner.tenant_id == sequence.tenant_id:
            return False
        its, its_weight = table.running_tenants.get((tier, runner.tenant_id), 0), runner.submit.weight
        if value == had and count * its_weight < its * weight:
            return True
        return (count + 1) * its_weight <= (its - 1) * weight

    return [
        runner
        for runner in table.running
        if runner.tier == tier
        and runner not in placed
        and (runner.times_set_back < table.policy.options.max_displacements or _has_recovered(runner))
        and stands_above(runner)
    ]
