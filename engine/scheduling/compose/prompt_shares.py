"""Division of a step's remaining tokens among tenants' prompts, by weight.

Higher tiers first. In a tier the tenant whose step counter (with what this step gave so far) is lowest gets
tokens until it has caught up with the next, and from there both alternate by weight. While another tenant
has a prompt, a prompt gets at most `cap_tokens`; what is left when all have had that goes on without the cap,
so no token is left over while a prompt is unfinished, the step's time limit aside. A tenant whose first
prompt starts in this step gets `least_chunk_tokens` of it before the others are compared, in at most half of
the step.

Inside a tenant: a quarter for the prompt that was begun first, so that it is finished though shorter ones
keep coming; the rest to the prompts with least left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from engine.entry import INPUT_TOKEN_COST
from engine.scheduling.compose.turns import by_tenant, by_tier
from engine.scheduling.counters import scaled
from engine.scheduling.room import Room
from engine.scheduling.step_counters import StepCounters
from engine.sequence import Sequence

PARTS = 64
"""Parts in which the tokens are handed out; none is larger than `least_chunk_tokens`."""
FIRST_PART = 4
"""One in this many of a tenant's prompt tokens goes to the prompt that it began first."""

Chunks = list[tuple[Sequence, int]]


@dataclass(slots=True)
class _Claim:
    """A tenant's prompts in one tier."""

    prompts: list[Sequence]
    standing: int
    token_cost: int
    most: int
    tokens: int = 0


@dataclass(slots=True)
class PromptShares:
    """See above."""

    cap_tokens: int = 256
    least_chunk_tokens: int = 16
    capped_chunks: int = 0
    """Chunks that the cap cut short."""

    def shares(
        self,
        prompts: SequenceOf[Sequence],
        step: Room,
        counters: StepCounters,
        given: Callable[[], dict[str, int]],
        *,
        limit_s: float,
        must_advance: bool,
        placed: Collection[Sequence] = (),
    ) -> tuple[Chunks, set[tuple[int, str]]]:
        """Chunks for `prompts`, and the tiers and tenants that got less than they could take. `step` is a
        draft that notes each chunk; `given`: what the step gives each tenant besides, asked only where
        several have prompts. `limit_s`: longest step, 0: any; with `must_advance` a least chunk is handed out
        anyway."""
        chunks: Chunks = []
        held: set[tuple[int, str]] = set()
        besides: dict[str, int] | None = None
        for tier, line in by_tier(prompts).items():
            tokens, forced = self._tokens(line, step, limit_s, must_advance and not chunks)
            lines = by_tenant(line)
            if besides is None and len(lines) > 1:
                besides = given()
            if sum(map(_left, line)) > tokens and len(lines) > 1:
                ran = {sequence.submit.tenant_id for sequence in line if sequence not in placed}
                counters.contend(tier, ran, step.step)
            claims = [
                _Claim(
                    sequences,
                    counters.value(tier, tenant_id) + (besides or {}).get(tenant_id, 0),
                    max(1, scaled(INPUT_TOKEN_COST, sequences[0].submit.weight)),
                    0,
                )
                for tenant_id, sequences in lines.items()
            ]
            self._divide(claims, tokens, placed)
            for claim in claims:
                for sequence, wanted in self._inside(claim, is_contested=len(claims) > 1):
                    chunk = min(wanted, step.tokens)
                    if limit_s and not forced:
                        chunk = step.tokens_within(sequence, chunk, limit_s)
                    if chunk > 0:
                        chunks.append((sequence, chunk))
                        step.take(sequence, chunk)
                    if chunk < _left(sequence):
                        held.add((tier, sequence.submit.tenant_id))
        return chunks, held

    def _tokens(
        self, line: SequenceOf[Sequence], step: Room, limit_s: float, must_advance: bool
    ) -> tuple[int, bool]:
        """Tokens that the prompts of a tier share, and whether the time limit allows fewer."""
        tokens = step.tokens_of(line[0].submit.tier)
        if not limit_s or tokens <= 0:
            return max(0, tokens), False
        deepest = max(line, key=lambda sequence: sequence.computed_tokens)
        within = step.tokens_within(deepest, tokens, limit_s)
        least = min(tokens, self.least_chunk_tokens)
        if within < least and must_advance:
            return least, True
        return within, False

    def _divide(self, claims: list[_Claim], tokens: int, placed: Collection[Sequence]) -> None:
        if len(claims) == 1:
            (claim,) = claims
            claim.tokens = min(tokens, sum(map(_left, claim.prompts)))
            return
        for claim in claims:
            claim.most = sum(min(_left(sequence), self.cap_tokens) for sequence in claim.prompts)
        begin = tokens // 2
        for claim in sorted(claims, key=lambda claim: claim.standing):
            if all(sequence in placed for sequence in claim.prompts):
                chunk = min(self.least_chunk_tokens, claim.most, begin)
                claim.tokens, begin, tokens = chunk, begin - chunk, tokens - chunk
        tokens = self._by_standing(claims, tokens)
        for claim in claims:
            claim.most = sum(map(_left, claim.prompts))
        self._by_standing(claims, tokens)

    def _by_standing(self, claims: list[_Claim], tokens: int) -> int:
        """Hands out up to `tokens` until each has `most`; returns what is left."""
        part = max(1, min(self.least_chunk_tokens, tokens // PARTS))
        ranks = [
            (claim.standing + claim.tokens * claim.token_cost, number)
            for number, claim in enumerate(claims)
            if claim.tokens < claim.most
        ]
        heapify(ranks)
        while ranks and tokens > 0:
            standing, number = heappop(ranks)
            claim = claims[number]
            chunk = min(part, tokens, claim.most - claim.tokens)
            claim.tokens += chunk
            tokens -= chunk
            if claim.tokens < claim.most:
                heappush(ranks, (standing + chunk * claim.token_cost, number))
        return tokens

    def _inside(self, claim: _Claim, *, is_contested: bool) -> Chunks:
        """A tenant's tokens by prompt; those that get none are named, too."""
        if len(claim.prompts) == 1:
            (sequence,) = claim.prompts
            left = _left(sequence)
            self.capped_chunks += is_contested and claim.tokens == self.cap_tokens < left
            return [(sequence, min(left, claim.tokens))]
        tokens = claim.tokens
        wanted = dict.fromkeys(sorted(claim.prompts, key=_left), 0)
        begun = next((sequence for sequence in claim.prompts if sequence.computed_tokens), claim.prompts[0])
        wanted[begun] = min(_left(begun), -(-tokens // FIRST_PART))
        tokens -= wanted[begun]
        longest = max(map(_left, wanted))
        for cap in (self.cap_tokens, longest) if is_contested else (longest,):
            for sequence, had in wanted.items():
                more = max(0, min(min(_left(sequence), cap) - had, tokens))
                wanted[sequence] = had + more
                tokens -= more
        self.capped_chunks += is_contested and sum(
            chunk == self.cap_tokens < _left(sequence) for sequence, chunk in wanted.items()
        )
        return list(wanted.items())


def _left(sequence: Sequence) -> int:
    return len(sequence.token_ids) - sequence.computed_tokens
