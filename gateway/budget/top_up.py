"""Tops up the lease of a running request ahead of what it emits.

One task per request, unless the whole output is covered. It asks for all sequences in one call, before one
reaches the end of its lease; a grant is durable before the engine's lease grows. An empty bucket pauses the
sequences until it has refilled; a spent budget stops them at the end of what is covered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from gateway.budget import lease
from gateway.budget.holds import Holds
from gateway.budget.lease import SequenceLease
from gateway.budget.metering import RequestMetering
from gateway.domain.timeline import Timeline, TimelineKind
from gateway.domain.usage import SequenceUse
from gateway.upstream.base import Upstream, UpstreamUnavailable
from tenants.errors import DatabaseUnavailable
from tenants.quota.store import Denied, Granted, QuotaStoreUnavailable
from tenants.types import NOTHING, Amounts, Limit

RETRY_FIRST_S = 0.1
RETRY_MOST_S = 1.0

log = logging.getLogger("fairgate.gateway.topping")


class AccountsLost(Exception):
    """`cause`: the last error of the quota store or ledger."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


@dataclass(slots=True)
class Leases:
    """A request's hold and its division among the sequences."""

    limits: tuple[Limit, ...]
    counting: RequestMetering
    most_each: int
    kept: int = 0
    """Tokens at the end of each lease with which the engine closes the answer, if it is cut there."""
    covered: Amounts = NOTHING
    """Weighted amounts, as limits count them."""
    covered_output_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    gpu_us: list[int | None] = field(default_factory=list)
    """By sequence, as `tokens`; None: no limit counts it."""
    top_ups: int = 0
    timeline: Timeline = field(default_factory=Timeline)
    counts_gpu: bool = field(init=False)
    """Whether device time is leased. Constant: requests move only between tiers with the same limits."""

    def __post_init__(self) -> None:
        self.counts_gpu = lease.has_gpu_limit(self.limits)

    @property
    def uses(self) -> Sequence[SequenceUse]:
        return self.counting.uses

    def granted(self, covered: Amounts) -> None:
        self.covered = covered
        most = self.most_each * len(self.uses)
        self.covered_output_tokens = max(
            self.covered_output_tokens, lease.covered_tokens(covered, self.counting.size, most)
        )
        self.share_out()

    def share_out(self) -> None:
        self.tokens = lease.share_out(self.covered_output_tokens, self.parts())
        if not self.counts_gpu:
            self.gpu_us = [None] * len(self.uses)
            return
        before = self.gpu_us or [0] * len(self.uses)
        parts = [
            SequenceLease(use.gpu_us, old or 0, lease.FOR_EVER, use.outcome is None)
            for use, old in zip(self.uses, before, strict=True)
        ]
        self.gpu_us = list(lease.share_out(max(self.covered.gpu_ms * 1000, self.used_gpu_us), parts))

    @property
    def used_gpu_us(self) -> int:
        return sum(use.gpu_us for use in self.uses)

    def parts(self, kept: int = 0) -> list[SequenceLease]:
        """With `kept` tokens of a live one counted as emitted."""
        leases = self.tokens or [0] * len(self.uses)
        return [
            SequenceLease(self._reach(use, kept), old, self.most_each, use.outcome is None)
            for use, old in zip(self.uses, leases, strict=True)
        ]

    def _reach(self, use: SequenceUse, kept: int) -> int:
        return use.output_tokens if use.outcome is not None else min(self.most_each, use.output_tokens + kept)

    @property
    def is_whole(self) -> bool:
        """All remaining output is covered and device time is not limited: no top-up is needed."""
        return not self.counts_gpu and all(
            tokens >= self.most_each or use.outcome is not None
            for tokens, use in zip(self.tokens, self.uses, strict=True)
        )

    def is_used_up(self, index: int) -> bool:
        use, gpu_us = self.uses[index], self.gpu_us[index]
        if use.outcome is not None or use.output_tokens >= self.most_each:
            return False
        return self._is_at_end(index) or (gpu_us is not None and use.gpu_us >= gpu_us)

    @property
    def is_kept_whole(self) -> bool:
        """All that is left of a lease is kept: no token of it comes to ask for more."""
        return self.kept > 0 and any(map(self._is_at_end, range(len(self.uses))))

    def _is_at_end(self, index: int) -> bool:
        use, tokens = self.uses[index], self.tokens[index]
        return use.outcome is None and tokens < self.most_each and self._reach(use, self.kept) >= tokens


class TopUpTask:
    def __init__(
        self,
        request_id: str,
        leases: Leases,
        upstream: Callable[[], Upstream],
        holds: Holds,
        *,
        predict: Callable[[int], int],
        sequence_ids: Sequence[str],
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
        hold_wait_s: float,
        accounts_wait_s: float,
    ) -> None:
        """`upstream`: where the request runs now; `predict`: predicted length of a sequence, given its
        emitted tokens."""
        self._request_id = request_id
        self._leases = leases
        self._upstream = upstream
        self._holds = holds
        self._predict = predict
        self._sequence_ids = sequence_ids
        self._clock = clock
        self._sleep = sleep
        self._hold_wait_s = hold_wait_s
        self._accounts_wait_s = accounts_wait_s
        self._first_token_s: float | None = None
        self._next_checks: list[int] = []
        """By sequence, the emitted and kept tokens at which to check again."""
        self._schedule_checks()
        self._wake = asyncio.Event()
        self._ask_if_kept_whole()
        self._must_resend = False
        """The engine did not accept the latest leases."""
        self.is_spent = False

    def seen(self, index: int) -> None:
        use = self._leases.uses[index]
        if self._first_token_s is None:
            self._first_token_s = self._clock()
        if use.outcome is not None and any(other.outcome is None for other in self._leases.uses):
            self._leases.share_out()
            self._send_leases()
            self._wake.set()
        if self.is_spent:
            self._stop_used_up()
        elif (
            use.output_tokens + self._leases.kept >= self._next_checks[index] or self._leases.counts_gpu
        ) and not self._wake.is_set():
            if self._is_due():
                self._wake.set()
            else:
                self._schedule_checks()

    async def run(self) -> None:
        """Raises `AccountsLost`."""
        while True:
            if self._must_resend:
                await self._sleep(RETRY_FIRST_S)
                self._send_leases()
            elif self.is_spent:
                # Repeated until the outcomes arrive: the engine may not have accepted the command.
                self._stop_used_up()
                await self._sleep(RETRY_MOST_S)
            else:
                await self._wake.wait()
                self._wake.clear()
                if self._is_due():
                    await self._top_up()
                self._schedule_checks()
                self._ask_if_kept_whole()

    def _ask_if_kept_whole(self) -> None:
        if self._leases.is_kept_whole:
            self._wake.set()

    # ------------------------------------------------------------ asking

    async def _top_up(self) -> None:
        leases = self._leases
        if leases.kept != lease.kept_tokens(
            leases.limits, leases.counting.size, len(leases.uses), leases.kept
        ):
            self.is_spent = True  # by a limit that was set meanwhile
            return
        since_s = self._clock()
        paused_s = 0.0
        takes_least = False
        while True:
            parts = leases.parts(leases.kept)
            first, ahead = lease.wanted_tokens(parts, self._chunk(), self._predicted())
            used = leases.counting.report()
            gpu_ms = first_gpu_ms = lease.wanted_gpu_ms(leases.limits, used.gpu_ms)
            if takes_least:
                first = min(first, leases.covered_output_tokens + 1)
                first_gpu_ms = min(gpu_ms, used.gpu_ms + 1)
            answer = await self._ask(
                used,
                replace(leases.counting.size(first), gpu_ms=first_gpu_ms),
                replace(leases.counting.size(ahead), gpu_ms=gpu_ms),
            )
            if isinstance(answer, Granted):
                leases.top_ups += 1
                leases.timeline.note(
                    TimelineKind.TOPPED_UP, self._clock(), round(paused_s * 1e6), answer.covered.output_tokens
                )
                leases.granted(answer.covered)
                self._send_leases()
                return
            retry_s = lease.retry_in_s(answer, self._clock() - since_s, self._hold_wait_s)
            if retry_s is not None:
                await self._sleep(retry_s)
                paused_s += retry_s
            elif not takes_least:
                # Not enough for a whole chunk: ask for the last tokens of the budget.
                takes_least = True
            else:
                self.is_spent = True
                return

    async def _ask(self, used: Amounts, first: Amounts, ahead: Amounts) -> Granted | Denied:
        """Durable on return. Waits for the accounts up to `accounts_wait_s`. Raises `AccountsLost`."""
        since_s = self._clock()
        delay_s = RETRY_FIRST_S
        while True:
            try:
                return await self._ask_once(used, first, ahead)
            except (QuotaStoreUnavailable, DatabaseUnavailable) as error:
                if self._clock() - since_s >= self._accounts_wait_s:
                    raise AccountsLost(error) from None
                log.warning("request %s: a top-up waits: %s", self._request_id, type(error).__name__)
            await self._sleep(delay_s)
            delay_s = min(RETRY_MOST_S, delay_s * 2)

    async def _ask_once(self, used: Amounts, first: Amounts, ahead: Amounts) -> Granted | Denied:
        asking = asyncio.create_task(self._holds.top_up(self._request_id, used, first, ahead))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            # The request is about to be settled: it must not be topped up after that.
            await asyncio.wait([asking], timeout=self._accounts_wait_s)
            asking.cancel()
            raise

    def _is_due(self) -> bool:
        leases = self._leases
        if any(lease_tokens < leases.most_each for lease_tokens in leases.tokens) and lease.is_due(
            leases.parts(leases.kept), self._chunk(), self._tokens_per_s()
        ):
            return True
        if not leases.counts_gpu:
            return False
        used_us = leases.used_gpu_us
        chunk_ms = lease.wanted_gpu_ms(leases.limits, 0)
        return leases.covered.gpu_ms * 1000 - used_us <= chunk_ms * 500

    def _schedule_checks(self) -> None:
        chunk, tokens_per_s = self._chunk(), self._tokens_per_s()
        parts = self._leases.parts(self._leases.kept)
        self._next_checks = [lease.next_look(part, chunk, tokens_per_s) for part in parts]

    def _chunk(self) -> int:
        live = sum(use.outcome is None for use in self._leases.uses)
        return lease.chunk_tokens(self._leases.limits, self._leases.counting.size, live, self._tokens_per_s())

    def _tokens_per_s(self) -> float:
        if self._first_token_s is None or (elapsed_s := self._clock() - self._first_token_s) <= 0:
            return 0.0
        return (max(use.output_tokens for use in self._leases.uses) - 1) / elapsed_s

    def _predicted(self) -> int:
        return sum(
            self._predict(use.output_tokens) if use.outcome is None else use.output_tokens
            for use in self._leases.uses
        )

    # ------------------------------------------------------------ commands to the engine

    def _send_leases(self) -> None:
        self._must_resend = False
        for index, use in enumerate(self._leases.uses):
            if use.outcome is None:
                try:
                    self._upstream().top_up(
                        self._sequence_ids[index], self._leases.tokens[index], self._leases.gpu_us[index]
                    )
                except UpstreamUnavailable:
                    # Gone, which the readers of its tokens will notice, or too busy now.
                    self._must_resend = True

    def _stop_used_up(self) -> None:
        for index, sequence_id in enumerate(self._sequence_ids):
            if self._leases.is_used_up(index):
                self._upstream().cancel(sequence_id, "budget")
