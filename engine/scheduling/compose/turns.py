"""Turns: who has a step's decode slots when there are fewer than sequences, and the account of it.

Tenants take turns by their step counters (the one that had least per weight is next; stride scheduling,
Waldspurger 1995), each token counted as it is handed out; inside a tenant the sequence that was served
longest ago. A tenant that had far less than the others may have most slots for long, so each sequence's gap
is bounded besides: one that sat out `GAP_FACTOR` times as many steps in a row as turns by weight would have
it sit out (and `GAP_STEPS` more) is served before the others, in at most half of the slots (at least one).

Gap in steps: a sequence of a tenant of weight w with k sequences, among tenants of weights W in S slots, sits
out at most 2 x GAP_FACTOR x k x W / (w x S) + GAP_STEPS + the number of sequences / S steps: all of them may
become overdue in the same step, and are then served in at most half of the slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from heapq import heapify, heappop, heappush

from engine.entry import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST
from engine.scheduling.counters import scaled
from engine.scheduling.room import DecodeContest, Room
from engine.scheduling.step_counters import Standings
from engine.sequence import KEPT_TENANTS, Sequence
from engine.sizes import DECODE_TOKENS

GAP_FACTOR = 2
GAP_STEPS = 2
PLACE_BITS = 20
"""A turn is a step's number and the place in its order of hand-out."""
MOST_KEPT_TENANTS = 4 * KEPT_TENANTS
"""Tenants that the account of a sequence counts before it drops those with least."""

Lines = dict[str, list[Sequence]]


def by_tenant(sequences: Iterable[Sequence]) -> Lines:
    lines: Lines = {}
    for sequence in sequences:
        lines.setdefault(sequence.submit.tenant_id, []).append(sequence)
    return lines


def by_tier(sequences: Iterable[Sequence]) -> dict[int, list[Sequence]]:
    """Sequences by tier, the higher first."""
    tiers: dict[int, list[Sequence]] = {}
    for sequence in sequences:
        tiers.setdefault(sequence.submit.tier, []).append(sequence)
    return dict(sorted(tiers.items()))


def split(sequences: Iterable[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
    """Those with an unfinished prompt (`is_prefilling`), and those that decode."""
    prompts: list[Sequence] = []
    decoding: list[Sequence] = []
    # `is_prefilling`, without a call: all running sequences pass here in each step.
    for sequence in sequences:
        computed = sequence.computed_tokens
        if computed < sequence.prompt_tokens or len(sequence.token_ids) - computed > DECODE_TOKENS:
            prompts.append(sequence)
        else:
            decoding.append(sequence)
    return prompts, decoding


def service_of(shares: Iterable[tuple[Sequence, int]]) -> dict[str, int]:
    """What such shares give each tenant, as it will be charged."""
    given: dict[str, int] = {}
    for sequence, tokens in shares:
        if sequence.is_prefilling:
            tenant_id = sequence.submit.tenant_id
            cost = scaled(INPUT_TOKEN_COST * tokens, sequence.submit.weight)
            given[tenant_id] = given.get(tenant_id, 0) + cost
        else:
            count_token(sequence, given)
    return given


def contend(tier: int, line: list[Sequence], room: Room) -> None:
    """Notes that the decoding sequences of a tier are more than the step has tokens for."""
    room.contests.append(DecodeContest(tier, line))
    ran = {sequence.submit.tenant_id for sequence in line if sequence not in room.placed}
    room.counters.contend(tier, ran, room.step)


def take_turns(
    line: SequenceOf[Sequence], slots: int, step: int, standings: Standings, given: dict[str, int]
) -> list[Sequence]:
    """`slots` of the decoding sequences of one tier. What they get is added to `given`."""
    lines = by_tenant(line)
    for sequence in line:
        turns = sequence.turns
        if not turns.last_turn:
            # Its first token came with its prompt: it is the last of its tenant's line.
            turns.last_turn = (step << PLACE_BITS) - 1
        if turns.missed_step < step - 1:
            turns.missed = 0
    if slots <= 0:
        return []
    chosen = _overdue(lines, slots)
    left = slots - len(chosen)
    taken = set(chosen)
    ranks: list[tuple[int, int, str]] = []
    for sequence in chosen:
        count_token(sequence, given)
    for number, (tenant_id, sequences) in enumerate(lines.items()):
        if taken:
            sequences[:] = [sequence for sequence in sequences if sequence not in taken]
        # Of equals the one that was admitted first.
        sequences.sort(key=_served)
        sequences.reverse()
        if sequences:
            ranks.append((standings.value(tenant_id) + given.get(tenant_id, 0), number, tenant_id))
    heapify(ranks)
    for _ in range(min(left, sum(map(len, lines.values())))):
        value, number, tenant_id = heappop(ranks)
        sequences = lines[tenant_id]
        sequence = sequences.pop()
        chosen.append(sequence)
        cost = count_token(sequence, given)
        if sequences:
            heappush(ranks, (value + cost, number, tenant_id))
    return chosen


def note_turns(room: Room) -> None:
    """Enters a composed step's contests in the sequences' accounts, each once even under a brake."""
    counted: set[Sequence] = set()
    for contest in room.contests:
        served: Counter[str] = Counter()
        lines = by_tenant(contest.sequences)
        members = set(contest.sequences)
        for place, sequence in enumerate(room.given):
            if sequence in members:
                sequence.turns.turn_tokens += sequence not in counted
                sequence.turns.last_turn = room.step << PLACE_BITS | place
                sequence.turns.missed = 0
                served[sequence.submit.tenant_id] += 1
        slots = served.total()
        had = served or Counter(
            sequence.submit.tenant_id
            for sequence in room.given
            if sequence.submit.tier < contest.tier and not sequence.is_prefilling
        )
        most = [tenant_id for tenant_id, _ in had.most_common(KEPT_TENANTS + 1)]
        for tenant_id, line in lines.items():
            held = [sequence for sequence in line if sequence not in room.given and sequence not in counted]
            held.sort(key=_served)
            # How many more of its sequences would have had a token without the other tenants.
            by_others = min(len(line), slots) - served[tenant_id]
            others = [other for other in most if other != tenant_id]
            for place, sequence in enumerate(held):
                turns = sequence.turns
                turns.missed += 1
                turns.missed_step = room.step
                if slots and place >= by_others:
                    turns.sat_out_own += 1
                    continue
                turns.sat_out_share += slots > 0
                turns.sat_out_tier += slots == 0
                _add(turns.sat_out_for, others)
        counted |= members


def _add(counts: dict[str, int], tenants: Iterable[str]) -> None:
    for tenant_id in tenants:
        counts[tenant_id] = counts.get(tenant_id, 0) + 1
    if len(counts) > MOST_KEPT_TENANTS:
        for tenant_id in sorted(counts, key=lambda tenant: -counts[tenant])[KEPT_TENANTS:]:
            del counts[tenant_id]


def held_tenants(contest: DecodeContest, room: Room) -> set[str]:
    return {sequence.submit.tenant_id for sequence in contest.sequences if sequence not in room.given}


def _overdue(lines: Lines, slots: int) -> list[Sequence]:
    """Those that sat out for too long, the longest first, for at most half of the slots."""
    weights = {tenant_id: line[0].submit.weight for tenant_id, line in lines.items()}
    weight = sum(weights.values())
    overdue: list[Sequence] = []
    for tenant_id, line in lines.items():
        most = GAP_FACTOR * len(line) * weight / (weights[tenant_id] * slots) + GAP_STEPS
        overdue += [sequence for sequence in line if sequence.turns.missed > most]
    overdue.sort(key=lambda sequence: -sequence.turns.missed)
    return overdue[: (slots + 1) // 2]


def count_token(sequence: Sequence, given: dict[str, int]) -> int:
    """Adds a decode token to what its tenant is given; returns its cost."""
    cost = sequence.token_charge or scaled(OUTPUT_TOKEN_COST, sequence.submit.weight)
    tenant_id = sequence.submit.tenant_id
    given[tenant_id] = given.get(tenant_id, 0) + cost
    return cost


def _served(sequence: Sequence) -> int:
    return sequence.turns.last_turn
