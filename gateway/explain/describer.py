"""Describes one model's server, and the terms of its requests, for their timelines.

Cheap after every request: a description is rebuilt only if something has changed. Step times are checked
every `PACE_EVERY_S`, and whenever a young engine has seen twice as many steps; they count as changed if some
step would take `PACE_CHANGED` longer or shorter. Use from one event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from engine.messages import Ready, StepTime
from engine.step_time.model import mean_of, predict_step_s
from gateway.background import Site
from gateway.domain.server_description import (
    DescribedEngine,
    DescribedQueue,
    RequestTerms,
    ServerDescription,
    packed,
)
from gateway.requests.run import Run
from gateway.upstream.base import Upstream
from tenants.admin.platform.policy import StoredPolicy
from tenants.ledger.timelines import description_id
from tenants.pricing.pricing import PriceEntry
from tenants.types import Limit, Tier

PACE_EVERY_S = 60.0
PACE_CHANGED = 0.05
MAX_TERMS = 4_096


class StoredDescription(NamedTuple):
    id: str
    content: bytes

    @classmethod
    def of(cls, described: ServerDescription | RequestTerms) -> StoredDescription:
        content = packed(described)
        return cls(description_id(content), content)


_TermsKey = tuple[float, float, tuple[Limit, ...], PriceEntry | None, Tier | None]


class Describer:
    def __init__(
        self,
        site: Site,
        model: str,
        upstreams: Collection[Upstream],
        policy: Callable[[], StoredPolicy],
        *,
        is_foreign: bool,
    ) -> None:
        """`policy`: the active one. `is_foreign`: some replica is not our engine."""
        self._gateway_id = site.gateway_id
        self._model = model
        self._upstreams = upstreams
        self._queue = DescribedQueue.of(site.config)
        self._policy = policy
        self._is_foreign = is_foreign
        self._seen: tuple[StoredPolicy, list[Ready | None]] | None = None
        self._pace: StepTime | None = None
        self._look_s = 0.0
        self._looked_at_samples = 0
        self._server: StoredDescription | None = None
        self._terms: dict[_TermsKey, StoredDescription] = {}

    def server(self, now_s: float) -> StoredDescription:
        seen = self._policy(), [upstream.ready for upstream in self._upstreams]
        if self._take_pace(now_s) or seen != self._seen or self._server is None:
            self._seen = seen
            policy, announced = seen
            self._server = StoredDescription.of(
                ServerDescription(
                    self._gateway_id,
                    self._model,
                    self._is_foreign,
                    tuple(DescribedEngine.of(ready) for ready in announced if ready is not None),
                    policy.name,
                    dict(policy.options),
                    self._queue,
                    self._pace,
                )
            )
        return self._server

    def terms(self, run: Run) -> StoredDescription:
        principal = run.call.principal
        limits = run.leases.limits if run.leases is not None else ()
        price = run.prices.entries.get((run.call.model, run.call.tier)) if limits else None
        key = principal.weight, principal.reserved_tokens_per_s, limits, price, principal.reserved_tier
        found = self._terms.get(key)
        if found is None:
            if len(self._terms) >= MAX_TERMS:
                self._terms.clear()
            found = self._terms[key] = StoredDescription.of(RequestTerms(*key))
        return found

    def _take_pace(self, now_s: float) -> bool:
        snapshots = (upstream.snapshot for upstream in self._upstreams)
        found = mean_of(snapshot.mean_step_time for snapshot in snapshots if snapshot is not None)
        if found is None or (now_s < self._look_s and found.samples < 2 * self._looked_at_samples):
            return False
        self._look_s, self._looked_at_samples = now_s + PACE_EVERY_S, found.samples
        if self._pace is not None and not _is_another(self._pace, found, self._largest()):
            return False
        self._pace = found
        return True

    def _largest(self) -> tuple[int, int]:
        """Sequences and tokens of the largest step."""
        found = [upstream.ready for upstream in self._upstreams]
        return (
            max((ready.max_sequences for ready in found if ready), default=1),
            max((ready.max_batched_tokens for ready in found if ready), default=1),
        )


def _is_another(before: StepTime, after: StepTime, largest: tuple[int, int]) -> bool:
    """Whether a step of one token, of a full batch or of a long prompt takes clearly different time."""
    sequences, tokens = largest
    shapes = ((1, 256, 1), (sequences, 256 * sequences, sequences), (tokens, 256 * tokens, 1))
    return any(
        abs(predict_step_s(after, *shape) / predict_step_s(before, *shape) - 1) > PACE_CHANGED
        for shape in shapes
    )
