"""`StepLog`: tokens of the last steps by tenant, for operators."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from itertools import islice

from engine.core.plan import Plan
from engine.core.sequence_table import SequenceTable
from engine.core.step_service import ServiceShare
from engine.messages import StepRecord
from engine.sequence import Sequence
from engine.sizes import DECODE_TOKENS
from engine.step_time.model import padded_shape

KEPT_STEPS = 4096
MOST_TENANTS = 64
"""Tenants with waiting sequences that a record names."""


class StepLog:
    def __init__(self, kept: int = KEPT_STEPS) -> None:
        self._steps: deque[StepRecord] = deque(maxlen=kept)

    def note(
        self, step: int, at_s: float, plan: Plan, shares: Mapping[str, ServiceShare], table: SequenceTable
    ) -> None:
        """Notes a committed step. Looks at single sequences only where some of them waited."""
        room = plan.room
        self._steps.append(
            StepRecord(
                step,
                at_s,
                room.slots if room.slots is not None else (room.tokens + room.used_tokens) // DECODE_TOKENS,
                {tenant: share.decoded_tokens for tenant, share in shares.items() if share.decoded_tokens},
                {
                    tenant: share.tokens - share.decoded_tokens
                    for tenant, share in shares.items()
                    if share.tokens > share.decoded_tokens
                },
                room.tokens,
                *_held(plan),
                _left(table.prefills) if table.prefills else {},
                dict(islice(table.waiting_tenants.items(), MOST_TENANTS)) if table.waiting_tenants else {},
                padded_shape(room.step_time, plan.num_tokens, len(plan.shares))[0] - plan.num_tokens,
            )
        )

    def last(self, steps: int) -> list[StepRecord]:
        return list(self._steps)[-steps:] if steps > 0 else []


def _held(plan: Plan) -> tuple[dict[str, int], dict[str, int]]:
    """By tenant: decoding sequences without a token, and the most steps that one has gone without."""
    count: Counter[str] = Counter()
    gaps: dict[str, int] = {}
    for contest in plan.room.contests:
        for sequence in contest.sequences:
            if sequence not in plan.shares:
                tenant_id = sequence.submit.tenant_id
                count[tenant_id] += 1
                gaps[tenant_id] = max(gaps.get(tenant_id, 0), sequence.turns.missed)
    return dict(count), gaps


def _left(prefills: Iterable[Sequence]) -> dict[str, int]:
    """Prompt tokens to compute, by tenant."""
    found: Counter[str] = Counter()
    for sequence in prefills:
        found[sequence.tenant_id] += sequence.total_tokens - sequence.computed_tokens
    return dict(found)
