"""Token-fair composition: each step's tokens are shared between tenants by weight.

- *floor*: while the step has a slot for each decoding sequence, each gets one token;
- *turns*: when it has not, tenants take turns by weight (`turns.py`). Slots are what the option `slots` (by
  default `auto_slots.py`) and the step's tokens, less the prompts' part, leave;
- *the rest*: prompts, divided between tenants by weight as well (`prompt_shares.py`), newcomers included:
  they are admitted before running prompts get their tokens. What prompts leave goes to the sequences that
  had no slot.

All three go by the tenant's one service counter, by what it had (`engine/scheduling/step_counters.py`).
Higher tiers have their slots, and their prompts' tokens, first.

A TPOT target (`Submit.tpot_target_s`) of a decoding sequence first shortens the prompts' part: the step's
predicted time is to stay below it. Prompts advance all the same, by a least chunk in every
`PATIENCE_STEPS`th step. Only where the step is too long for the target even without prompts do sequences of
its tier and of lower ones without such a target yield their slots, no more of them than helps, and each for
at most `PATIENCE_STEPS` steps in a row; where all have one, or more than there are slots, they take turns as
before.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Self

from engine.scheduling.claims import ALL
from engine.scheduling.compose.prompt_shares import FIRST_PART, PromptShares
from engine.scheduling.compose.turns import by_tier, contend, count_token, service_of, split, take_turns
from engine.scheduling.room import UNLIMITED, Room
from engine.sequence import Sequence
from engine.sizes import DECODE_TOKENS

PROMPT_PART = 4
"""One in this many of a step's tokens is kept for prompts, if there are any."""
PATIENCE_STEPS = 8
"""One step in this many in which prompts advance though a TPOT target leaves no time for them."""


@dataclass(slots=True)
class TokenFair:
    slots: int = 0
    """0: as many as the step has tokens, less the prompts' part."""
    is_auto: bool = False
    """The step-time model limits the number (`auto_slots.py`)."""
    cap_tokens: int = 256
    target_step_s: float = 0.0
    """What keeps a step's predicted time below it bounds prompts. 0: no limit."""
    least_chunk_tokens: int = 16
    max_num_partial_prefills: int = 1
    """Unfinished prompts of a tenant with which no further one of it starts that the step cannot complete, if
    they take all that the step has left and only its own wait."""
    name: str = "token-fair"
    claims: frozenset[str] = ALL
    """Work conservation: a step leaves tokens over only because of `slots` or a time target."""
    serves_all: bool = False
    prompts_last: bool = True
    floor_tokens: int = 0
    """Tokens that a sequence got because there was one for each, where the step was put together in full."""
    credit_tokens: int = 0
    """Tokens that a sequence got for steps that it had missed."""
    _prompts: PromptShares = field(init=False)
    _room: Room | None = None
    _seen: set[Sequence] = field(default_factory=set)
    """Decoding sequences that had their chance in the step of `_room`."""
    _promised: dict[Sequence, int] = field(default_factory=dict)
    """Tokens of that step that newcomers are to get."""
    _pace_s: float = 0.0
    """The shortest TPOT target of those that decode in the step of `_room`."""
    _late_steps: int = 0
    """Steps in a row in which a target of a token's time left nothing for prompts."""

    def __post_init__(self) -> None:
        self._prompts = PromptShares(self.cap_tokens, self.least_chunk_tokens)

    @property
    def capped_chunks(self) -> int:
        return self._prompts.capped_chunks

    def most_decodes(self, auto_slots: int) -> int:
        return min(self.slots or UNLIMITED, (self.is_auto and auto_slots) or UNLIMITED)

    def floor_holds(self, decoding: SequenceOf[Sequence], room: Room, steps: int = 1) -> bool:
        count, room.slots = len(decoding), self._slots(room, room.prompts_ahead)
        if count > room.slots:
            return False
        if not room.tightest_tpot_s:
            return True
        computed = count * (steps - 1) + sum([sequence.computed_tokens for sequence in decoding])
        return room.predicted_decodes_s(count, computed) <= room.tightest_tpot_s

    def shares(self, running: SequenceOf[Sequence], room: Room) -> list[tuple[Sequence, int]]:
        self._begin(room)
        prompts, decoding = split(running)
        fresh = [sequence for sequence in decoding if sequence not in self._seen] if self._seen else decoding
        chosen = self._decodes(fresh, prompts, room) if fresh else []
        decodes = [(sequence, DECODE_TOKENS) for sequence in chosen]
        if not prompts and len(decoding) == len(chosen):
            return decodes
        step, shares = room.draft(), decodes

        def given() -> dict[str, int]:
            return service_of((*room.given.items(), *decodes))

        if chosen:
            step.take_decodes(chosen)
        if prompts:
            limit_s, must_advance = self._limit_s()
            chunks, room.held_prompts = self._prompts.shares(
                prompts,
                step,
                room.counters,
                given,
                limit_s=limit_s,
                must_advance=must_advance,
                placed=room.placed,
            )
            self._late_steps = 0 if chunks else self._late_steps + 1
            shares = decodes + chunks
        if len(chosen) < len(decoding) and not room.prompts_ahead:
            extra = self._left_over(decoding, chosen, step, given())
            shares = shares + [(sequence, DECODE_TOKENS) for sequence in extra]
        return shares

    def turned(self, fresh: Self) -> Self:
        self.slots, self.max_num_partial_prefills = fresh.slots, fresh.max_num_partial_prefills
        return self

    def first_chunk(self, sequence: Sequence, room: Room) -> int:
        self._begin(room)
        promised = {
            sequence: tokens for sequence, tokens in self._promised.items() if sequence not in room.given
        }
        tier, left = sequence.submit.tier, sequence.total_tokens - sequence.computed_tokens
        of_tier = sum([tokens for sequence, tokens in promised.items() if sequence.submit.tier == tier])
        free = min(room.tokens - sum(promised.values()), room.tokens_of(tier) - of_tier)
        tokens = min(free, left)
        if tokens <= 0:
            return 0
        least = min(tokens, self.least_chunk_tokens)
        if self._piles_up(sequence, room):
            # One that this step completes does no harm, beside the part of the prompt begun first.
            least = left
            if left > free - -(-free // FIRST_PART):
                return 0
        limit_s, must_advance = self._limit_s()
        if limit_s:
            forced = self.least_chunk_tokens if must_advance and not room.prefills else 0
            tokens = max(room.tokens_within(sequence, tokens, limit_s), min(tokens, forced))
        if tokens:
            self._promised[sequence] = least
        return tokens

    def _begin(self, room: Room) -> None:
        if room is not self._room:
            self._room, self._pace_s = room, 0.0
            self._seen, self._promised = set(), {}
            if room.slots is None:
                room.slots = self._slots(room, room.prompts_ahead)

    def _slots(self, room: Room, ahead: int) -> int:
        """Decoding sequences that an empty step has room for, with `ahead` tokens of prompts."""
        tokens = room.tokens - max(0, min(room.tokens // PROMPT_PART + 1, ahead, room.tokens - DECODE_TOKENS))
        return min(tokens // DECODE_TOKENS, self.most_decodes(room.auto_slots))

    def _decodes(self, decoding: list[Sequence], prompts: list[Sequence], room: Room) -> list[Sequence]:
        self._seen.update(decoding)
        self._pace_s = _pace_s(decoding)
        slots = self._slots_left(decoding, prompts, room)
        if len(decoding) <= slots and not _is_late(decoding, room, self._pace_s):
            self.floor_tokens += len(decoding)
            return decoding
        given = service_of(room.given.items())
        chosen: list[Sequence] = []
        pace_s = 0.0
        for tier, line in by_tier(decoding).items():
            # A sequence yields to its own tier and to higher ones.
            paces = [pace for pace in (pace_s, _pace_s(line)) if pace]
            pace_s = min(paces, default=0.0)
            left = slots - len(chosen)
            kept: list[Sequence] = []
            if _is_late(decoding, room, pace_s):
                kept = [
                    sequence
                    for sequence in line
                    if sequence.submit.tpot_target_s or _is_overdue(sequence, room.step)
                ]
                helps = max(_fitting(decoding, room, pace_s) - len(chosen), len(kept), not chosen)
                left, kept = min(left, helps), kept if len(kept) <= left else []
            chosen += line if len(line) <= left else self._in_turn(tier, line, left, kept, room, given)
        return chosen

    def _in_turn(
        self,
        tier: int,
        line: list[Sequence],
        slots: int,
        kept: list[Sequence],
        room: Room,
        given: dict[str, int],
    ) -> list[Sequence]:
        """`slots` sequences of one tier, `kept` among them."""
        contend(tier, line, room)
        taken = set(kept)
        others = [sequence for sequence in line if sequence not in taken]
        for sequence in kept:
            count_token(sequence, given)
        standings = room.counters.of_tier(tier)
        chosen = kept + take_turns(others, slots - len(kept), room.step, standings, given)
        self.credit_tokens += sum(sequence.turns.missed > 0 for sequence in chosen)
        return chosen

    def _slots_left(self, decoding: list[Sequence], prompts: list[Sequence], room: Room) -> int:
        """Decoding sequences that this step still has room for, before any prompt."""
        ahead = room.prompts_ahead or sum(
            [sequence.total_tokens - sequence.computed_tokens for sequence in prompts]
        )
        if ahead and self._pace_s:
            # A target of time shortens the prompts' part first.
            limit_s, must_advance = self._limit_s()
            spare_s = max(0.0, limit_s - _decodes_s(decoding, room))
            least = self.least_chunk_tokens if must_advance else 0
            ahead = min(ahead, max(least, int(spare_s / max(1e-9, room.step_time.per_token_s))))
        slots = self._slots(room, ahead)
        given = room.used_sequences - room.prefills
        return max(0, min(slots, self.most_decodes(room.auto_slots) - given))

    def _left_over(
        self, decoding: list[Sequence], chosen: list[Sequence], step: Room, given: dict[str, int]
    ) -> list[Sequence]:
        """Sequences without a slot that get a token which the prompts left."""
        given_decodes = step.used_sequences - step.prefills
        slots = min(step.decodes_left, self.most_decodes(step.auto_slots) - given_decodes)
        taken = set(chosen)
        held = [sequence for sequence in decoding if sequence not in taken]
        if self._pace_s and step.step_time.graph_sizes:
            slots = min(slots, _fitting_padded(held, step, self._pace_s))
        elif self._pace_s:
            one_s = DECODE_TOKENS * step.step_time.per_token_s + step.step_time.per_sequence_s
            slots = min(slots, int((self._pace_s - step.predicted_s()) / max(1e-9, one_s)))
        takers: list[Sequence] = []
        for tier, line in by_tier(held).items():
            if slots > len(takers):
                standings = step.counters.of_tier(tier)
                takers += take_turns(line, slots - len(takers), step.step, standings, given)
        return takers

    def _limit_s(self) -> tuple[float, bool]:
        """How long a step with prompts may take (0: any time), and whether prompts advance all the same."""
        if self._pace_s and (not self.target_step_s or self._pace_s < self.target_step_s):
            return self._pace_s, self._late_steps + 1 >= PATIENCE_STEPS
        return self.target_step_s, True

    def _piles_up(self, sequence: Sequence, room: Room) -> bool:
        """Whether its tenant's many unfinished prompts take the step's rest, with no other tenant waiting."""
        tenant_id = sequence.submit.tenant_id
        if any(other != tenant_id for other in room.waiting_tenants):
            return False
        unfinished = [sequence for sequence in room.prefilling if sequence.submit.tenant_id == tenant_id]
        if len(unfinished) < self.max_num_partial_prefills:
            return False
        return (
            sum([sequence.total_tokens - sequence.computed_tokens for sequence in unfinished]) >= room.tokens
        )


def _is_overdue(sequence: Sequence, step: int) -> bool:
    """Whether it has sat out too many steps for others' targets to yield again."""
    turns = sequence.turns
    return turns.missed >= PATIENCE_STEPS and turns.missed_step >= step - 1


def _pace_s(sequences: SequenceOf[Sequence]) -> float:
    """The shortest TPOT target; 0: none has one."""
    return min([pace for sequence in sequences if (pace := sequence.submit.tpot_target_s)], default=0.0)


def _decodes_s(decoding: SequenceOf[Sequence], room: Room) -> float:
    """The step's predicted time with all of `decoding`, and no prompt."""
    return room.predicted_decodes_s(len(decoding), sum([sequence.computed_tokens for sequence in decoding]))


def _is_late(decoding: SequenceOf[Sequence], room: Room, pace_s: float) -> bool:
    """Whether a step of all of `decoding`, and no prompt, takes too long."""
    return pace_s > 0.0 and _decodes_s(decoding, room) > pace_s


def _fitting(decoding: SequenceOf[Sequence], room: Room, pace_s: float) -> int:
    """How many of `decoding`, of middling length, a step of that time has."""
    if room.step_time.graph_sizes:
        return _fitting_padded(decoding, room, pace_s)
    none_s, all_s = room.predicted_with_s(0, 0, 0), _decodes_s(decoding, room)
    return int(len(decoding) * (pace_s - none_s) / (all_s - none_s)) if pace_s > none_s else 0


def _fitting_padded(decoding: SequenceOf[Sequence], room: Room, pace_s: float) -> int:
    """As `_fitting` where a step's time is a staircase: that many fill it, unless they are all."""
    count, computed = len(decoding), sum([sequence.computed_tokens for sequence in decoding])
    rows = range(1, count + 1)
    return bisect_right(rows, pace_s, key=lambda n: room.predicted_decodes_s(n, n * computed // count))
