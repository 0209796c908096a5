"""Values that pass through the queue: tickets, dispatches, refusals."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import msgspec

from engine.entry import QueueEntry


class Reason(Enum):
    ORDER = ""
    OWED = "owed"
    """As by order; its tenant has had less than its share."""
    RESERVATION = "reservation"


RESUMES = "resumes"
"""What a replica offers, and a request that has begun elsewhere needs: sequences go on there."""
Deadlines = tuple[float | None, float | None]
"""`QueueEntry.deadline_s` and `own_deadline_s`."""


class Ticket(msgspec.Struct, frozen=True):
    """A queued request. `entry`: all its sequences, the tier asked for, and the answer's deadline."""

    entry: QueueEntry
    sequences: int
    kv_tokens: int
    """Predicted: what all its sequences together occupy at their end."""
    max_tokens: int = 1_000_000
    """Of one sequence."""
    is_exact: bool = False
    expires_s: float | None = None
    """When it leaves the queue without a turn, by the clock of `entry.arrived_s`; None: its tier's time."""
    reserved_cost_per_s: float = 0.0
    """Cost tokens per second that its tenant has reserved, as of its arrival; 0: none."""
    reserved_tier: int | None = None
    """Rank of the tier that its tenant reserved them for (other tiers do not use them); None: all."""
    prefix_hashes: tuple[int, ...] = ()
    """Chain of its prompt's full blocks, see `routing.prefix_hashes`."""
    needs: frozenset[str] = frozenset()
    """What its server must offer; compared with `Replica.offers`."""
    before: tuple[int, int] | None = None
    """Input and output tokens that it had on a replica from which it goes on elsewhere: `entry` has the
    rest. None: it has not run."""

    @property
    def had(self) -> tuple[int, int]:
        return self.before or (0, 0)


class TokensAhead(msgspec.Struct, frozen=True):
    """Cost tokens (input + 2 x predicted output) ahead of a request, as counted when it joined the queue."""

    own: int = 0
    others: int = 0
    higher_tier: int = 0
    running: int = 0
    """The part of these that is dispatched and not served yet."""


NOTHING_AHEAD = TokensAhead()


@dataclass(frozen=True, slots=True)
class QueueFull:
    """Refused at the gate: `limit` requests wait already, of this tenant or altogether."""

    of_tenant: bool
    limit: int
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Displaced:
    """A request of a lower tier in a replica's window when a higher tier exceeded that."""

    entry_id: str
    tenant_id: str
    tier: int
    """That it has at the engine."""
    kv_tokens: int
    """Predicted, of its sequences that have not ended."""


class Dispatch(msgspec.Struct, frozen=True):
    """A turn: send `ticket` to `replica_id`."""

    ticket: Ticket
    replica_id: str
    counter: int
    """The tenant's, as the engine should know it, by what is charged: this request included."""
    tier: int
    """Its rank at the engine: its tier; a higher one after a long wait, the highest for reserved service."""
    by_reservation: bool = False
    displaced: tuple[Displaced, ...] = ()
    """The requests whose places it takes, if the engine needs them."""
    is_owed: bool = False
    """Of a tenant that has had less than its share: at the engine it takes the place of one that had more."""
    had: int = 0
    """The tenant's counter by what it had, as far as is known."""
    heard: int = 0
    """The last serial number of the tenant's service at that engine which is contained in `had`."""
    engine_life: str = ""
    """Of the engine that counts so; another life of it begins at 0."""


@dataclass(slots=True)
class InFlight:
    ticket: Ticket
    replica_id: str
    dispatched_s: float
    charged_cost: int
    output_tokens: int = 0
    live_sequences: int = 0
    kv_tokens: int = 0
    tier: int = 0
    """Its rank at the engine."""
    is_long: bool = False
    by_reservation: bool = False
    foreseen_tokens: tuple[int, int] | None = None
    """The engine's forecast of the whole output (p50, p90); None: the prediction on arrival stands."""
    announced_cost: int = 0
    """The charge that the log knows of: at the dispatch, then of each correction."""
    beyond_cost: int = 0
    """The most by which the charge exceeded that: output beyond the prediction."""
    is_reported: bool = True
    had_cost: int = 0

    @property
    def predicted_output_tokens(self) -> int:
        if self.foreseen_tokens is not None:
            return self.foreseen_tokens[0]
        return self.ticket.entry.predicted_output_tokens
