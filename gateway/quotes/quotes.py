"""Issues quotes, and binds requests to the ones they redeem.

A quote's token is all that is known of it (`gateway/domain/quote_token.py`), so any gateway can honour it.
The database ensures that it is redeemed once (`Redeemed`).

Outstanding quotes count in the replays as probable requests, so that no slot is sold twice: of other tenants
as many as each redeems on average; of the tenant itself all, in the highest tier allowed. Bounded.
"""

from __future__ import annotations

import logging
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from msgspec.structs import replace

from engine.entry import QueueEntry
from engine.messages import TIER_RANKS
from gateway import errors
from gateway.background import Site
from gateway.domain.call import Call
from gateway.domain.estimate import Estimate
from gateway.domain.quote_binding import Binding
from gateway.domain.quote_token import BadQuote, Quote, Signer, digest_of, quote_of
from gateway.domain.tiers import TIER_NAMES
from gateway.estimates.forecast_cache import Size
from tenants.errors import DatabaseUnavailable
from tenants.pricing.pricing import PriceBook
from tenants.types import Principal, Tier

HEADER = "X-Fairgate-Quote"
MAX_OUTSTANDING = 10_000
MAX_OF_A_TENANT = 200
REDEEMED_MEMORY = 0.02
"""Weight of the newest quote in a tenant's redeemed share."""
MAX_SHARES = 10_000
"""Tenants whose redeemed share is kept."""

log = logging.getLogger("fairgate.gateway.quotes")


class Redeemed(Protocol):
    """Which request redeemed an offer (`redeemed_quotes.py`). Both raise `DatabaseUnavailable`."""

    async def claim(self, offer_id: str, request_id: str, expires_us: int) -> bool:
        """Claims the offer for this request; False: another one redeemed it."""
        ...

    async def release(self, offer_id: str, request_id: str) -> None:
        """Frees the offer if it is this request's."""
        ...


@dataclass(frozen=True, slots=True)
class _Offer:
    """Quotes of one request in several tiers, of which one may be redeemed."""

    pool: str
    entry: QueueEntry
    """In the tier in which it will probably be redeemed."""
    highest: QueueEntry
    """In the highest tier in which it may be redeemed."""
    expires_s: float


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be quoted."""

    model: str
    pool: str
    prompts: Sequence[Sequence[int]]
    is_sized: bool
    """Only the length of the prompt is known."""
    choices: int
    max_tokens: int

    @property
    def size(self) -> Size:
        tokens = sum(len(prompt) for prompt in self.prompts)
        return Size(tokens, len(self.prompts) * self.choices, self.choices, self.max_tokens, is_exact=False)


class Quotes:
    """Use from one event loop."""

    def __init__(
        self,
        site: Site,
        secret: bytes,
        prices_at: Callable[[int], Awaitable[PriceBook]],
        redeemed: Redeemed,
    ) -> None:
        """`prices_at` returns an earlier version of the price book."""
        self.valid_s = site.config.quote_valid_s
        self._redeemed_shares: dict[str, float] = {}
        """Recent share by tenant; 1 until known."""
        self._signer = Signer(secret)
        self._wall_clock = site.wall_clock
        self._prices_at = prices_at
        self._redeemed = redeemed
        self._offers: OrderedDict[str, _Offer] = OrderedDict()
        """By expiry."""
        self._of_tenant: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._offers)

    def require_room(self, tenant_id: str) -> None:
        """Raises `ApiError` (429) if too many quotes are outstanding."""
        self._forget()
        if self._of_tenant.get(tenant_id, 0) >= MAX_OF_A_TENANT or len(self._offers) >= MAX_OUTSTANDING:
            raise errors.rate_limited(
                f"{MAX_OF_A_TENANT} quotes of a tenant may be outstanding ({MAX_OUTSTANDING} of all tenants):"
                f" redeem some, or wait until they expire, {self.valid_s:g} s after they were made.",
                "requests",
                self.valid_s,
            )

    def issue(
        self,
        principal: Principal,
        wanted: Wanted,
        estimates: dict[Tier, Estimate],
        price_version: int,
        counted_in: Tier,
        now_s: float,
    ) -> dict[Tier, str]:
        """Signs a quote for each tier. `counted_in`: the likely one; `now_s`: on the clock of arrivals."""
        offer_id, wall_s = secrets.token_hex(8), self._wall_clock()
        size = wanted.size
        digest = digest_of(
            wanted.model, wanted.prompts, wanted.choices, wanted.max_tokens, sized=wanted.is_sized
        )
        tokens = {
            tier: self._signer.sign(
                quote_of(
                    estimate,
                    offer_id=offer_id,
                    tenant_id=principal.tenant_id,
                    key_id=principal.key_id,
                    model=wanted.model,
                    digest=digest,
                    is_sized=wanted.is_sized,
                    tier=tier,
                    rank=TIER_RANKS[tier],
                    price_version=price_version,
                    issued_s=wall_s,
                    valid_s=self.valid_s,
                    input_tokens=size.input_tokens,
                    choices=wanted.choices,
                    max_tokens=wanted.max_tokens,
                )
            )
            for tier, estimate in estimates.items()
        }
        entry = QueueEntry(
            entry_id=f"\0quote {offer_id}",
            tenant_id=principal.tenant_id,
            arrived_s=now_s,
            input_tokens=size.input_tokens * size.choices,
            predicted_output_tokens=estimates[counted_in].output_tokens[0],
            tier=TIER_RANKS[counted_in],
            weight=principal.weight,
        )
        highest = replace(entry, tier=min(TIER_RANKS[tier] for tier in estimates))
        self._offers[offer_id] = _Offer(wanted.pool, entry, highest, wall_s + self.valid_s)
        self._of_tenant[principal.tenant_id] = self._of_tenant.get(principal.tenant_id, 0) + 1
        return tokens

    def promised(self, pool: str, tenant_id: str | None = None) -> list[QueueEntry]:
        """Probable requests of one pool: of each tenant's as many as it redeems on average, evenly chosen; of
        `tenant_id` all, in their highest tier, as it can redeem them with its next quote."""
        self._forget()
        sums: dict[str, float] = {}
        chosen: list[QueueEntry] = []
        for offer in self._offers.values():
            whose = offer.entry.tenant_id
            if offer.pool != pool:
                continue
            if whose == tenant_id:
                chosen.append(offer.highest)
                continue
            sum_ = sums.get(whose, 0.0) + self.redeemed_share(whose)
            if sum_ >= 1.0 - 1e-9:
                sum_ -= 1.0
                chosen.append(offer.entry)
            sums[whose] = sum_
        return chosen

    def redeemed_share(self, tenant_id: str) -> float:
        return self._redeemed_shares.get(tenant_id, 1.0)

    def model_of(self, token: str) -> str:
        """Raises `ApiError` (400)."""
        return self._opened(token).model

    async def redeem(self, token: str, call: Call) -> Binding:
        """Raises `ApiError`: 400 for an invalid quote or one of another key or request, 409 for one that has
        expired or is redeemed. Raises `DatabaseUnavailable`."""
        quote = self._opened(token)
        self._require_same(quote, call)
        self._forget()
        if quote.expires_s <= self._wall_clock():
            raise errors.quote_refused("quote_expired", f"it was valid for {self.valid_s:g} s", conflict=True)
        prices = await self._prices_at(quote.price_version)
        release = partial(self._release, quote.offer_id, call.request_id)
        try:
            is_ours = await self._redeemed.claim(
                quote.offer_id, call.request_id, round(quote.expires_s * 1e6)
            )
        except BaseException:
            # Perhaps it was written down all the same.
            await release()
            raise
        if not is_ours:
            raise errors.quote_refused(
                "quote_redeemed", "it, or the same offer in another tier, was redeemed before", conflict=True
            )
        self._drop(quote.offer_id, was_redeemed=True)
        return Binding(quote, prices, quote.estimate(), release)

    def _opened(self, token: str) -> Quote:
        try:
            return self._signer.open(token.strip())
        except BadQuote as bad:
            raise errors.quote_refused("quote_invalid", f"{bad}") from None

    async def _release(self, offer_id: str, request_id: str) -> None:
        try:
            await self._redeemed.release(offer_id, request_id)
        except DatabaseUnavailable:
            log.warning(
                "the quote that request %s redeemed stays redeemed, though nothing was charged", request_id
            )

    @staticmethod
    def _require_same(quote: Quote, call: Call) -> None:
        principal = call.principal
        if (quote.tenant_id, quote.key_id) != (principal.tenant_id, principal.key_id):
            raise errors.quote_refused("quote_mismatch", "it was made for another API key")
        if quote.model != call.model:
            raise errors.quote_refused("quote_mismatch", f"it was made for the model {quote.model}")
        if call.names_tier and quote.tier != call.tier.value:
            quoted = TIER_NAMES[Tier(quote.tier)]
            raise errors.quote_refused(
                "quote_mismatch", f"it was made for service_tier '{quoted}': ask for that, or for 'auto'"
            )
        if (quote.choices, quote.max_tokens) != (call.choices, call.max_tokens):
            raise errors.quote_refused(
                "quote_mismatch",
                f"it was made for n {quote.choices} and max_tokens {quote.max_tokens}; the request has"
                f" {call.choices} and {call.max_tokens}",
            )
        digest = digest_of(call.model, call.prompts, call.choices, call.max_tokens, sized=quote.is_sized)
        if digest != quote.digest:
            thing = "a prompt of another length" if quote.is_sized else "another prompt"
            raise errors.quote_refused("quote_mismatch", f"it was made for {thing}")

    def _forget(self) -> None:
        now_s = self._wall_clock()
        while self._offers and next(iter(self._offers.values())).expires_s <= now_s:
            self._drop(next(iter(self._offers)), was_redeemed=False)

    def _drop(self, offer_id: str, *, was_redeemed: bool) -> None:
        offer = self._offers.pop(offer_id, None)
        if offer is None:
            return  # another gateway's
        tenant_id = offer.entry.tenant_id
        share = self.redeemed_share(tenant_id)
        self._redeemed_shares[tenant_id] = share + REDEEMED_MEMORY * (was_redeemed - share)
        if len(self._redeemed_shares) > MAX_SHARES:
            del self._redeemed_shares[next(iter(self._redeemed_shares))]
        left = self._of_tenant[tenant_id] - 1
        if left:
            self._of_tenant[tenant_id] = left
        else:
            del self._of_tenant[tenant_id]
