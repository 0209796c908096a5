"""Ring of one model's recent requests: the load while a request waited and ran.

Of each its tenant, when it could run, its real size: what `attribution.py` needs. In memory only; the oldest
are forgotten. Other gateways' requests have a ring of the same length (`pool_load.py`). Pure.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from gateway.explain.fluid_share import Job
from gateway.explain.own_work import LoggedRequest, own_time_s

MAX_KEPT = 4_096
MAX_CHANGES = 64


class LoadLog:
    """One model's log. One writer: the model's recorder."""

    def __init__(self, max_kept: int = MAX_KEPT) -> None:
        self._seen: OrderedDict[str, LoggedRequest] = OrderedDict()
        self._elsewhere: OrderedDict[str, LoggedRequest] = OrderedDict()
        self._max_kept = max_kept
        self._serving: list[tuple[float, int]] = []
        self.forgotten = 0
        """Requests that were still needed when the ring was full."""

    def __len__(self) -> int:
        return len(self._seen)

    def arrived(
        self,
        request_id: str,
        tenant_id: str,
        tier: int,
        weight: float,
        now_s: float,
        input_tokens: int,
        output_tokens: int,
        sequences: int = 1,
        *,
        came_s: float | None = None,
        known_s: float = 0.0,
        is_elsewhere: bool = False,
    ) -> None:
        """A request could run. Tokens of all sequences, output predicted; `came_s`: its arrival, if before;
        `known_s`: when it arrived or was quoted; `is_elsewhere`: at another gateway."""
        ring = self._elsewhere if is_elsewhere else self._seen
        ring[request_id] = LoggedRequest(
            tenant_id,
            tier,
            weight,
            now_s,
            input_tokens,
            output_tokens,
            sequences,
            now_s if came_s is None else came_s,
            known_s,
        )
        if len(ring) > self._max_kept:
            _, oldest = ring.popitem(last=False)
            self.forgotten += oldest.ended_s is None

    def dispatched(self, request_id: str, tier: int, now_s: float) -> None:
        seen = self._find(request_id)
        if seen is not None:
            seen.tier, seen.dispatched_s = tier, now_s

    def ended(
        self,
        request_id: str,
        now_s: float,
        computed_tokens: int,
        cached_tokens: int,
        output_tokens: int,
        *,
        is_complete: bool,
    ) -> None:
        """Tokens as counted. Not complete: it was taken away before its end."""
        seen = self._find(request_id)
        if seen is None:
            return
        seen.ended_s, seen.is_complete = now_s, is_complete
        if is_complete:
            seen.input_tokens, seen.cached_tokens = computed_tokens, cached_tokens
            seen.output_tokens = output_tokens
        else:
            seen.output_tokens = max(seen.output_tokens, output_tokens)

    def own_time_s(
        self, request_id: str, until_s: float, *, limited_s: float, rested_s: float
    ) -> float | None:
        """Of its time up to `until_s`, what later requests of its tenant here took; None: forgotten."""
        request = self._seen.get(request_id)
        if request is None:
            return None
        others = (other for other_id, other in self._seen.items() if other_id != request_id)
        return own_time_s(request, others, until_s, limited_s=limited_s, rested_s=rested_s)

    def _find(self, request_id: str) -> LoggedRequest | None:
        return self._seen.get(request_id) or self._elsewhere.get(request_id)

    def serving(self, now_s: float, replicas: int) -> None:
        if self._serving and self._serving[-1][1] == replicas:
            return
        self._serving.append((now_s, replicas))
        del self._serving[:-MAX_CHANGES]

    def serving_since(self) -> list[tuple[float, int]]:
        """Oldest first; empty: unknown."""
        return list(self._serving)

    def jobs(self, until_s: float, since_s: float = -math.inf) -> list[Job]:
        """What could run before `until_s`, from the last instant before `since_s` with nothing there."""
        all_seen = self._elsewhere | self._seen
        jobs = [
            Job(
                request_id,
                seen.tenant_id,
                seen.tier,
                seen.weight,
                seen.since_s,
                seen.input_tokens,
                seen.output_tokens,
                seen.sequences,
                seen.cached_tokens,
                math.inf if seen.is_complete or seen.ended_s is None else seen.ended_s,
            )
            for request_id, seen in all_seen.items()
            if seen.since_s < until_s
        ]
        jobs.sort(key=lambda job: job.arrived_s)
        start, busy_until_s = 0, -math.inf
        for index, job in enumerate(jobs):
            if job.arrived_s > since_s:
                break
            if job.arrived_s > busy_until_s:
                start = index
            ended_s = all_seen[job.job_id].ended_s
            busy_until_s = max(busy_until_s, math.inf if ended_s is None else ended_s)
        return jobs[start:]
