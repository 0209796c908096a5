"""Retries a sequence on another replica before its first token.

Never after the first token, so that nothing is generated or sent twice. The dispatcher's window counts a
moved sequence at its first replica: that is rare and short.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

import msgspec

from engine.messages import Delta, Submit
from gateway.upstream.base import NotBegun, Upstream, UpstreamFailed, UpstreamUnavailable, Wording
from gateway.upstream.failover import may_be_requests, next_replica
from gateway.upstream.openai.sequence import OpenAISequence

PROOF_WAIT_S = 5.0
"""Longest wait of a failed request for the proof of fault; then the server is to blame."""

log = logging.getLogger("fairgate.gateway.upstream")


class FailoverReplica(Upstream, Protocol):
    def begin(self, submit: Submit, wording: Wording) -> OpenAISequence:
        """Sends it. Raises `UpstreamUnavailable`."""
        ...


class FailoverSequence:
    """A sequence, and its attempts on replicas of its model until one has begun."""

    def __init__(
        self, submit: Submit, wording: Wording, first: FailoverReplica, others: Sequence[FailoverReplica]
    ) -> None:
        """Begins it, on another replica where `first` is not available. Raises `UpstreamUnavailable`."""
        self._submit = submit
        self._wording = wording
        self._others = others
        self._tried = [first]
        self._errors: list[Exception] = []
        self._lease_tokens = submit.lease_tokens
        self._cancelled = asyncio.Event()
        try:
            self._attempt = first.begin(submit, wording)
        except UpstreamUnavailable as error:
            if not self._moves(error):
                raise

    async def deltas(self, on_over: Callable[[], object]) -> AsyncIterator[Delta]:
        """Those of the first attempt that begins. `on_over` is called at the end."""
        try:
            while True:
                try:
                    async for delta in self._attempt:
                        yield delta
                    return
                except (UpstreamFailed, UpstreamUnavailable) as error:
                    last = self._last(error)
                if last is not None:
                    raise await self._settled(last)
        finally:
            on_over()

    def top_up(self, lease_tokens: int) -> None:
        self._lease_tokens = max(self._lease_tokens, lease_tokens)
        self._attempt.top_up(lease_tokens)

    def cancel(self, cause: str) -> None:
        self._cancelled.set()
        self._attempt.stop(cause)

    def _last(self, error: Exception) -> Exception | None:
        """The error to give up with; None: another attempt has been sent."""
        while isinstance(error, NotBegun | UpstreamUnavailable):
            try:
                return None if self._moves(error) else error
            except UpstreamUnavailable as unavailable:
                error = unavailable
        return error

    def _moves(self, error: Exception) -> bool:
        """Sends it to another replica; False: to none. Raises `UpstreamUnavailable`."""
        able = [other for other in self._others if other.capabilities.lacks(self._wording.needs) is None]
        self._errors.append(error)
        replica = None if self._cancelled.is_set() else next_replica(self._tried, able, self._errors)
        if replica is None:
            return False
        log.info("sequence %s goes to %s: %s", self._submit.sequence_id, replica.replica_id, error)
        self._tried.append(replica)
        submit = msgspec.structs.replace(self._submit, lease_tokens=self._lease_tokens)
        self._attempt = replica.begin(submit, self._wording)
        return True

    async def _settled(self, error: Exception) -> Exception:
        """The error of a request after the server's probe: whose fault it is, or a refusal."""
        if not isinstance(error, UpstreamFailed) or error.proof is None or not may_be_requests(error):
            return error
        proof, left = error.proof, asyncio.ensure_future(self._cancelled.wait())
        waiting: set[asyncio.Future[Any]] = {proof, left}
        try:
            await asyncio.wait(waiting, timeout=PROOF_WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            left.cancel()
        error.is_requests = proof.done() and not proof.cancelled() and proof.result()
        refusal = error.refusal if isinstance(error, NotBegun) and error.is_requests else None
        return refusal or error
