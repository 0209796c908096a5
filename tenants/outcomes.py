"""The closed sets of ways in which a request ends, and of causes for which it misses a target.

Each end settles, and metrics count by it."""

from __future__ import annotations

from enum import StrEnum


class RequestOutcome(StrEnum):
    COMPLETED = "completed"
    DISCONNECTED = "disconnected"
    """The client left; what was emitted is charged."""
    CANCELLED = "cancelled"
    """Its tenant, or an operator, cancelled it; what was emitted is charged."""
    SLOW_READER = "slow_reader"
    """The client did not read what was sent for too long; what was emitted is charged."""
    BUDGET = "budget"
    ENGINE_LOST = "engine_lost"
    """The engine died; what reached the gateway is charged."""
    ENGINE_FAILED = "engine_failed"
    """The engine gave up on it; what was emitted is charged."""
    UPSTREAM_ERROR = "upstream_error"
    """A server that is not our own sent no valid answer; what reached the gateway is charged."""
    REFUSED = "refused"
    """The engine, the queue or the ledger would not take it; nothing is charged."""
    ACCOUNTS_LOST = "accounts_lost"
    """The quota store or the ledger was away for too long to go on; what was emitted is charged."""
    EXPIRED = "expired"
    """Its deadline in the queue, or in the engine, passed."""
    NO_ENGINE = "no_engine"
    """It waited for an engine that did not come back; nothing is charged."""
    SHUTDOWN = "shutdown"
    """The gateway stopped; what was emitted is charged."""
    FAILED = "failed"
    """A fault of ours; what was emitted is charged."""
    RECOVERED = "recovered"
    """Its gateway died; the engine's count is charged."""
    LOST = "lost"
    """Its gateway died and no engine knows of it: what its last top-up reported is charged, or nothing."""
    WITHDRAWN = "withdrawn"
    """Key, project or tenant withdrawn: while it waited (uncharged), or with `now` while it ran (charged)."""


class Cause(StrEnum):
    """Why a request missed its target."""

    REQUEST = "request"
    """Too long or too large: alone on an idle engine it would have missed, too."""
    QUOTA = "quota"
    """Its tenant's own limit, or its tenant's own backlog."""
    CAPACITY = "capacity"
    """Too little for all requests: under an ideal fair share it would have missed, too."""
    SCHEDULING = "scheduling"
    """Under an ideal fair share it would have met its target: our policy is to blame."""
    GATEWAY = "gateway"
    """The gateway was late, or its stores: without that it would have met its target."""
    FAULT = "fault"
    """An engine, a store or an upstream failed on the way."""
    CLIENT = "client"
    """Its reader was slow."""
    UNKNOWN = "unknown"
    """Unknown: no step-time model of the server that ran it, or no record of the load."""
