"""Token-fair composition: decode slots are shared between tenants by weight.

Each step hands out at most `slots` decode tokens, one a sequence:

- *floor*: while there are enough slots, every decoding sequence gets its token;
- *credit*: when there are not, tenants take turns by weight (stride scheduling, Waldspurger 1995: the tenant
  that had least per weight is next), and of a tenant's sequences the one
  that was served longest ago. A tenant
  whose sequences were all served was not held back and saves nothing up for later;
- *cap*: a prompt gets at most `cap_tokens` of a step.

Over any stretch of steps the tokens of tenants that compete in all of them match the weights to within one
round of slots; a tenant with fewer sequences than its part gets a token for each, and the others the rest.
Higher tiers first, as everywhere. Integers only.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from engine.scheduling.claims import NO_STARVATION, SAFE, WORK_CONSERVATION
from engine.scheduling.compose.prompts import PromptLimits
from engine.scheduling.room import Room
from engine.sequence import Sequence

STRIDE = 1_000_000
"""What a token adds to the count of a tenant of weight 1."""
PROMPT_PART = 4
"""One in this many of a step's tokens is kept for prompts, if there are any."""
UNLIMITED = 1 << 30


@dataclass(slots=True)
class TokenFair:
    """One object an engine: it remembers which sequences missed a turn."""

    slots: int = 0
    """0: as many as the step has tokens, less the prompts' part."""
    cap_tokens: int = 256
    target_step_s: float = 0.0
    least_chunk_tokens: int = 16
    name: str = "token-fair"
    claims: frozenset[str] = SAFE | {WORK_CONSERVATION, NO_STARVATION}
    """Work conservation: a step is never empty while something runs; slots and cap leave tokens over."""
    serves_all: bool = False
    floor_tokens: int = 0
    """Tokens that a sequence got because there was one for each."""
    credit_tokens: int = 0
    """Tokens that a sequence got for steps that it had missed."""
    capped_chunks: int = 0
    """Chunks that the cap cut short (of a newcomer: whenever it was asked for)."""
    _limits: PromptLimits = field(init=False)
    _served: dict[tuple[int, str], int] = field(default_factory=dict)
    """(Tier, tenant) -> tokens per weight, scaled; of those that compete."""
    _turns: dict[Sequence, int] = field(default_factory=dict)
    """When each was served last, or came: the number of that turn."""
    _turn: int = 0
    _missed: set[Sequence] = field(default_factory=set)
    """Got no token in the last step."""

    def __post_init__(self) -> None:
        self._limits = PromptLimits(
            max_num_partial_prefills=UNLIMITED,
            max_long_partial_prefills=UNLIMITED,
            long_prefill_token_threshold=self.cap_tokens,
            target_step_s=self.target_step_s,
            least_chunk_tokens=self.least_chunk_tokens,
        )

    def shares(self, running: SequenceOf[Sequence], room: Room) -> list[tuple[Sequence, int]]:
        """See `Compose`."""
        decoding: list[Sequence] = []
        prompts: list[Sequence] = []
        for sequence in running:
            if len(sequence.token_ids) - sequence.computed_tokens > 1:
                prompts.append(sequence)
            else:
                decoding.append(sequence)
        slots = self._slots(room, has_prompts=bool(prompts or room.num_waiting))
        if len(decoding) <= slots:
            self.floor_tokens += len(decoding)
            if decoding:
                self._served, self._turns, self._missed = {}, {}, set()
        else:
            decoding = self._choose(decoding, slots)
        shares = [(sequence, 1) for sequence in decoding]
        if prompts:
            step = room.draft()
            step.take_decodes(decoding)
            chunks = self._limits.shares(prompts, step)
            self.capped_chunks += sum(self._is_capped(sequence, tokens) for sequence, tokens in chunks)
            shares += chunks
        return shares

    def first_chunk(self, sequence: Sequence, room: Room) -> int:
        """What the step has left, up to the cap."""
        tokens = self._limits.first_chunk(sequence, room)
        self.capped_chunks += self._is_capped(sequence, tokens)
        return tokens

    def _is_capped(self, sequence: Sequence, tokens: int) -> bool:
        return tokens == self.cap_tokens < sequence.total_tokens - sequence.computed_tokens

    def _slots(self, room: Room, *, has_prompts: bool) -> int:
        """Decode tokens that this step may still hand out."""
        tokens = room.tokens
        if has_prompts:
            tokens -= max(0, min(tokens // PROMPT_PART + 1, tokens - 1))
        given = room.used_sequences - room.prefills
        return max(0, min(tokens, self.slots - given)) if self.slots else tokens

    def _choose(self, decoding: list[Sequence], slots: int) -> list[Sequence]:
        """`slots` of `decoding`."""
        lines: dict[int, dict[tuple[int, str], list[Sequence]]] = {}
        turns: dict[Sequence, int] = {}
        for sequence in decoding:
            submit = sequence.submit
            line = lines.setdefault(submit.tier, {}).setdefault((submit.tier, submit.tenant_id), [])
            line.append(sequence)
            turns[sequence] = self._turns.get(sequence) or self._next_turn()
        served, missed = self._served, self._missed
        self._served, self._turns, self._missed = {}, turns, set()
        chosen: list[Sequence] = []
        for tier in sorted(lines):
            tenants = lines[tier]
            known = [served[tenant] for tenant in tenants if tenant in served]
            # One that has just come stands with the least of those that were here: no claim on the past.
            start = min(known, default=0)
            ranks = [(served.get(tenant, start), number, tenant) for number, tenant in enumerate(tenants)]
            heapify(ranks)
            for line in tenants.values():
                line.sort(key=turns.__getitem__, reverse=True)
            while ranks and len(chosen) < slots:
                count, number, tenant = heappop(ranks)
                sequence = tenants[tenant].pop()
                self.credit_tokens += sequence in missed
                chosen.append(sequence)
                turns[sequence] = self._next_turn()
                count += round(STRIDE / sequence.submit.weight)
                self._served[tenant] = count
                if tenants[tenant]:
                    heappush(ranks, (count, number, tenant))
            behind = min((count for count, _, _ in ranks), default=0)
            for count, _, tenant in ranks:
                self._served[tenant] = count
            for tenant, line in tenants.items():
                if not line:
                    self._served[tenant] = max(self._served[tenant], behind)
                self._missed.update(line)
        return chosen

    def _next_turn(self) -> int:
        self._turn += 1
        return self._turn
