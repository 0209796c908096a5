"""Claims of idempotency keys."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence

from gateway import errors
from gateway.deps import GatewayDeps
from gateway.domain.call import Call
from tenants.directory.idempotency import (
    MAX_KEY_CHARACTERS,
    AnswersTooLarge,
    Claimed,
    IdempotentAnswers,
    Scope,
    TooManyKeys,
)
from tenants.directory.idempotency import StoredAnswer as Kept
from tenants.errors import DatabaseUnavailable
from tenants.ledger.rows import LedgerRow

HEADER = "idempotency-key"
REPLAY_HEADER = "x-fairgate-idempotent-replay"
RETRY_S = 1.0
TOO_MANY_RETRY_S = 60.0
log = logging.getLogger("fairgate.gateway.idempotency")


def check_key(key: str, ttl_s: float) -> None:
    """Raises `ApiError` (400) for an unusable key."""
    if ttl_s == 0:
        raise errors.bad_request(
            "This server keeps no answers (setting gateway.idempotency_ttl is 0), so 'Idempotency-Key' cannot"
            " be honoured. Leave the header out.",
            "Idempotency-Key",
            "idempotency_off",
        )
    if not 0 < len(key) <= MAX_KEY_CHARACTERS or not (key.isascii() and key.isprintable()):
        raise errors.bad_request(
            f"Invalid 'Idempotency-Key': it has {len(key)} characters; 1 to {MAX_KEY_CHARACTERS} printable"
            " ASCII characters are allowed.",
            "Idempotency-Key",
        )


def fingerprint(route: str, body: bytes) -> str:
    return hashlib.sha256(route.encode() + b"\n" + body).hexdigest()


def charged_tokens(rows: Sequence[LedgerRow]) -> int | None:
    """None: not settled."""
    for row in rows:
        if row.kind == "settle":
            return row.amounts.input_tokens + row.amounts.output_tokens
    return None


class IdempotencyKeys:
    def __init__(self, deps: GatewayDeps) -> None:
        self._deps = deps
        self._store = IdempotentAnswers(
            deps.database,
            max_per_key=deps.config.max_idempotency_keys,
            max_bytes=deps.config.idempotent_bytes,
        )
        self._running: dict[Scope, asyncio.Future[None]] = {}

    async def purge(self) -> int:
        """Deletes expired keys. Raises `DatabaseUnavailable`."""
        return await self._store.purge(self._now_us())

    async def claim(self, call: Call, scope: Scope, print_: str) -> Kept | None:
        """None: run it and call `ended` or `lost` afterwards. Otherwise the stored answer, after waiting for
        a run in progress. Raises `ApiError`, `DatabaseUnavailable`."""
        until_s = self._deps.clock() + self._deps.config.idempotency_wait_s
        instead_of: str | None = None
        while True:
            kept = await self._claim(call, scope, print_, instead_of)
            if kept is None:
                self._running[scope] = asyncio.get_running_loop().create_future()
                return None
            if kept.fingerprint != print_:
                raise errors.idempotency_key_reused()
            if kept.answer is not None:
                if kept.answer.pieces is None:
                    raise errors.idempotent_answer_too_large(request_id=kept.request_id)
                return kept.answer
            here = self._running.get(scope)
            if here is None:
                instead_of = await self._never_began(kept)
                continue
            try:
                async with asyncio.timeout(until_s - self._deps.clock()):
                    await asyncio.shield(here)
            except TimeoutError:
                raise errors.idempotent_run_in_progress(retry_after_s=RETRY_S) from None

    async def is_known(self, key_id: str, key: str) -> bool:
        """Whether its answer may come from memory, which needs no budget. Raises `DatabaseUnavailable`."""
        return await self._store.is_claimed(key_id, key, self._now_us())

    async def ended(self, call: Call, scope: Scope, answer: Kept | None) -> None:
        """The run is over; None: nothing was charged and the key is free again."""
        try:
            if answer is None:
                await self._store.release(scope, call.request_id)
            else:
                await self._store.keep(scope, call.request_id, answer)
        except DatabaseUnavailable:
            # The claim stays: a repeat gets what the ledger says.
            log.warning("the answer of %s could not be kept", call.request_id)
        self.lost(scope)

    def lost(self, scope: Scope) -> None:
        """The run is over with an unknown result. Idempotent."""
        ended = self._running.pop(scope, None)
        if ended is not None:
            ended.set_result(None)

    async def _claim(self, call: Call, scope: Scope, print_: str, instead_of: str | None) -> Claimed | None:
        now_us = self._now_us()
        # The key outlives the longest wait of its request: it must not be free again while that waits.
        waits_s = call.timeout_s if call.names_timeout and call.timeout_s is not None else 0.0
        try:
            return await self._store.claim(
                scope,
                print_,
                call.request_id,
                self._deps.gateway_id,
                now_us=now_us,
                expires_us=now_us + round((self._deps.config.idempotency_ttl_s + waits_s) * 1e6),
                instead_of=instead_of,
            )
        except TooManyKeys as error:
            raise errors.rate_limited(
                f"{error.most} idempotency keys of this API key are in use, the limit."
                f" They expire after {self._deps.config.idempotency_ttl_s:g} s.",
                "requests",
                TOO_MANY_RETRY_S,
            ) from None
        except AnswersTooLarge as error:
            raise errors.rate_limited(
                f"Answers of {error.most_bytes} bytes (compressed) are kept under this tenant's idempotency"
                " keys, the limit (setting gateway.idempotent_bytes). They expire after"
                f" {self._deps.config.idempotency_ttl_s:g} s; without 'Idempotency-Key' the request is run.",
                "requests",
                TOO_MANY_RETRY_S,
            ) from None

    async def _never_began(self, found: Claimed) -> str:
        """Another gateway's request id, if nothing was or can be charged. Raises `ApiError` otherwise."""
        if found.gateway_id != self._deps.gateway_id:
            stale_s = self._deps.config.gateway_stale_s
            seen = await self._deps.registry.seen()
            if any(row.gateway_id == found.gateway_id and row.silent_s <= stale_s for row in seen):
                raise errors.idempotent_run_in_progress(retry_after_s=RETRY_S)
        rows = await self._deps.ledger.find(found.request_id)
        charged = charged_tokens(rows)
        if rows and charged is None:
            raise errors.idempotent_run_in_progress(retry_after_s=RETRY_S)
        if charged:
            raise errors.idempotent_run_lost(request_id=found.request_id, charged_tokens=charged)
        return found.request_id

    def _now_us(self) -> int:
        return round(self._deps.wall_clock() * 1e6)
