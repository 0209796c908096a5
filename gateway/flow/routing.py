"""Prefix-aware routing: chooses the replica with the smallest predicted TTFT.

The predicted TTFT: all prompt tokens to be computed there first and the request's own, less those that its
prefix cache probably holds (`PrefixIndex`), by the replica's step-time model with what decodes there;
and, where every place is taken, the wait for one. Prompts in flight count against a replica, so a popular
prefix spreads to as many as the load needs. If more than `MAX_IMBALANCE` more of its places are in use than
of the emptiest replica's, a hit counts for nothing.

To its own time a request adds its cost to later ones: each second of work delays the others by p / (1 - p)
seconds in all, where p is the share of time that a replica has prompts to compute (busy period of M/G/1;
estimated by what dispatches find there, since arrivals see time averages: Wolff, 1982). So a hit is worth
waiting for on a busy pool only. Figures: docs/benchmarks.md.

Pure: time is passed in. O(replicas x blocks of the prompt) a request.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from engine.sizes import DECODE_TOKENS
from engine.step_time.model import predict_decodes_s
from gateway.flow.placement import Score, Scorer, least_loaded
from gateway.flow.types import InFlight, Ticket
from gateway.flow.window import Replica, ReplicaLoad

MAX_IMBALANCE = 0.5
"""Share of a replica's places."""
MAX_EXTERNALITY = 8.0
"""Of p / (1 - p), which grows without bound as the pool fills up."""
BUSY_SMOOTHING = 1 / 64
MAX_AGE_S = 1800.0
BLOCK_TOKENS = 64
"""Coarser than an engine's blocks: precise enough to choose by, at a quarter of the work."""
MAX_BLOCKS = 512
"""Of one prompt; later blocks are assumed to be in no cache."""


def prefix_hashes(
    token_ids: Sequence[int], salt: str, *, block_tokens: int = BLOCK_TOKENS, most: int = MAX_BLOCKS
) -> tuple[int, ...]:
    """64-bit hash chain of the prompt's full blocks (at most `most`), without its last token. O(tokens)."""
    blocks = min(most, (len(token_ids) - 1) // block_tokens)
    if blocks <= 0:
        return ()
    tokens = memoryview(array("q", token_ids[: blocks * block_tokens])).cast("B")
    width = block_tokens * 8
    chain: list[int] = []
    parent = blake2b(salt.encode(), digest_size=8).digest()
    for start in range(0, blocks * width, width):
        digest = blake2b(parent, digest_size=8)
        digest.update(tokens[start : start + width])
        parent = digest.digest()
        chain.append(int.from_bytes(parent, "big"))
    return tuple(chain)


class PrefixIndex:
    """Prompt blocks that are probably in one replica's prefix cache, least recently used first.

    What was sent there is assumed to be cached until it is older than `max_age_s` or as many younger blocks
    went there as it can hold: a wrong guess costs time, never correctness. A block's hash covers all before
    it and the tenant's salt, so that a hit tells nothing of other tenants. O(blocks of the prompt).
    """

    def __init__(self, max_blocks: int, max_age_s: float) -> None:
        self._used_s: OrderedDict[int, float] = OrderedDict()
        self._max_blocks = max_blocks
        self._max_age_s = max_age_s

    def held(self, hashes: Sequence[int], now_s: float) -> int:
        oldest_s = now_s - self._max_age_s
        for number, block_hash in enumerate(hashes):
            used_s = self._used_s.get(block_hash)
            if used_s is None or used_s < oldest_s:
                return number
        return len(hashes)

    def note(self, hashes: Sequence[int], now_s: float) -> None:
        """Notes a prompt sent there. Its deepest blocks are forgotten first, as the replica evicts them."""
        for block_hash in reversed(hashes):
            self._used_s[block_hash] = now_s
            self._used_s.move_to_end(block_hash)
        while len(self._used_s) > self._max_blocks:
            self._used_s.popitem(last=False)

    def __len__(self) -> int:
        return len(self._used_s)


@dataclass(slots=True)
class _Under:
    rank: int
    prefill_tokens: int
    """Before its first token; 0 when that is out."""
    left_tokens: float
    """Output still to come of all its sequences: as its engine foresaw, else half of the prediction."""
    sequences: int


class PrefixRouter(Scorer):
    """Scores by predicted TTFT, with one index per replica. One router per pool."""

    wants_prefixes = True

    def __init__(self, *, block_tokens: int = BLOCK_TOKENS, max_age_s: float = MAX_AGE_S) -> None:
        """`block_tokens`: the size of the blocks whose hashes tickets carry."""
        self._block_tokens = block_tokens
        self._max_age_s = max_age_s
        self._indexes: dict[str, PrefixIndex] = {}
        self._under: dict[str, dict[str, _Under]] = {}
        self._replica_of: dict[str, str] = {}
        self._busy_share = 0.0
        """Share of replicas with prompts to compute, at dispatches."""

    def scores(
        self, ticket: Ticket, rank: int, candidates: Sequence[tuple[Replica, ReplicaLoad]], now_s: float
    ) -> Sequence[Score]:
        """Predicted TTFT and what it costs those after it, in seconds; of equals, the least loaded."""
        loads = [least_loaded(rank, replica, load) for replica, load in candidates]
        emptiest = min((load[0] for load in loads), default=0.0)
        return [
            (
                self._cost_s(
                    ticket,
                    rank,
                    replica,
                    load,
                    self._weighed(ticket, self.cached_tokens(ticket, replica.replica_id, now_s))
                    if share[0] <= emptiest + MAX_IMBALANCE
                    else 0,
                ),
                *share,
            )
            for share, (replica, load) in zip(loads, candidates, strict=True)
        ]

    def cached_tokens(self, ticket: Ticket, replica_id: str, now_s: float) -> int:
        index = self._indexes.get(replica_id)
        if index is None or not ticket.prefix_hashes:
            return 0
        held = index.held(ticket.prefix_hashes, now_s) * self._block_tokens
        return max(0, min(held, ticket.entry.input_tokens - 1))

    def _weighed(self, ticket: Ticket, cached_tokens: int) -> int:
        if self.prefix_weight == 1.0:
            return cached_tokens
        return min(round(cached_tokens * self.prefix_weight), ticket.entry.input_tokens - 1)

    def dispatched(self, flight: InFlight, replica: Replica, now_s: float) -> None:
        ticket, replica_id = flight.ticket, replica.replica_id
        entry = ticket.entry
        cached = self.cached_tokens(ticket, replica_id, now_s)
        self._note_busy(replica_id)
        self._under.setdefault(replica_id, {})[entry.entry_id] = _Under(
            flight.tier,
            max(1, entry.input_tokens - cached),
            entry.predicted_output_tokens / 2,
            ticket.sequences,
        )
        self._replica_of[entry.entry_id] = replica_id
        if ticket.prefix_hashes:
            index = self._indexes.get(replica_id)
            if index is None:
                blocks = max(1, replica.kv_tokens // self._block_tokens)
                index = self._indexes[replica_id] = PrefixIndex(blocks, self._max_age_s)
            index.note(ticket.prefix_hashes, now_s)

    def first_token(self, entry_id: str) -> None:
        replica_id = self._replica_of.get(entry_id)
        if replica_id is not None:
            self._under[replica_id][entry_id].prefill_tokens = 0

    def foreseen(self, entry_id: str, left_tokens: int) -> None:
        replica_id = self._replica_of.get(entry_id)
        if replica_id is not None:
            self._under[replica_id][entry_id].left_tokens = left_tokens

    def ended(self, entry_id: str) -> None:
        replica_id = self._replica_of.pop(entry_id, None)
        if replica_id is not None:
            del self._under[replica_id][entry_id]

    def forget(self, replica_id: str) -> None:
        self._indexes.pop(replica_id, None)

    def _note_busy(self, replica_id: str) -> None:
        self._under.setdefault(replica_id, {})
        computing = sum(
            any(request.prefill_tokens for request in under.values()) for under in self._under.values()
        )
        self._busy_share += BUSY_SMOOTHING * (computing / len(self._under) - self._busy_share)

    def _cost_s(
        self, ticket: Ticket, rank: int, replica: Replica, load: ReplicaLoad, cached_tokens: int
    ) -> float:
        step_time = replica.step_time
        under = self._under.get(replica.replica_id, {}).values()
        own = max(1, ticket.entry.input_tokens - cached_tokens)
        ahead = sum(request.prefill_tokens for request in under if request.rank <= rank)
        runs = min(sum(load.sequences), replica.max_sequences)
        context = sum(load.kv_tokens)
        beside_s = predict_decodes_s(step_time, runs, context)
        steps = math.ceil((ahead + own) / max(1, replica.max_batched_tokens - DECODE_TOKENS * runs))
        attended = own * cached_tokens + own * (own + 1) // 2
        prefill_s = (
            steps * beside_s
            + step_time.per_token_s * (ahead + own)
            + step_time.per_context_token_s * attended
        )
        externality = min(MAX_EXTERNALITY, self._busy_share / max(1e-9, 1 - self._busy_share))
        for_others_s = externality * own * step_time.per_token_s
        return prefill_s + for_others_s + self._place_s(ticket, rank, replica, load, beside_s)

    def _place_s(
        self, ticket: Ticket, rank: int, replica: Replica, load: ReplicaLoad, decode_step_s: float
    ) -> float:
        """The wait for a free place, by the mean of what is still to come there."""
        missing = load.ahead_of(rank)[0] + ticket.sequences - replica.max_sequences
        if missing <= 0:
            return 0.0
        under = [
            request for request in self._under.get(replica.replica_id, {}).values() if request.rank <= rank
        ]
        sequences = sum(request.sequences for request in under)
        if not sequences:
            return 0.0
        left_tokens = sum(request.left_tokens for request in under) / sequences
        return missing * left_tokens * decode_step_s / min(sequences, replica.max_sequences)
