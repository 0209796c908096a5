"""What routes ask about models before a request begins: which pool serves a name, what it takes, quotes."""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from gateway import errors
from gateway.background import Site
from gateway.budget.free_calls import QUOTES, TOKEN_CALLS, Asked, FreeCalls
from gateway.domain.call import Call, ServedModel
from gateway.error_mapping import as_api_error
from gateway.errors import ApiError
from gateway.pools.catalogue import Catalogue, merged
from gateway.pools.chain_walk import ChainWalk, OnPassed, nothing_passed
from gateway.pools.pool import ModelPool, Pools
from gateway.quotes.offered import offered
from gateway.quotes.quotes import Quotes, Wanted
from tenants.errors import DatabaseUnavailable
from tenants.nouns.alias import Alias, Chain
from tenants.pricing.pricing import PriceBook
from tenants.types import Tier

T = TypeVar("T")


class ServedModels:
    """Use from one event loop."""

    def __init__(
        self,
        site: Site,
        pools: Pools,
        aliases: Mapping[str, Alias],
        quotes: Quotes,
        prices: Callable[[], PriceBook],
        asked: Asked | None = None,
    ) -> None:
        """`asked`: see `FreeCalls`."""
        config = site.config
        self.catalogue = Catalogue(list(pools), aliases)
        self.stored: Mapping[str, Alias] = {}
        """Aliases of the database."""
        self.left_out: Mapping[str, str] = {}
        """Why some of them are not in force here, by name."""
        self._of_settings = aliases
        self.token_calls = FreeCalls(TOKEN_CALLS, config.token_calls_per_s, site.clock, asked)
        self._quote_calls = FreeCalls(QUOTES, config.quotes_per_s, site.clock, asked)
        self._pools = pools
        self._quotes = quotes
        self._prices = prices
        self._clock = site.clock
        self._wall_clock = site.wall_clock
        self._body_bytes = config.max_body_bytes

    def follow(self, stored: Mapping[str, Alias]) -> None:
        """Aliases as they are stored now."""
        if stored != self.stored:
            self.catalogue, self.left_out = merged(list(self._pools), self._of_settings, stored)
            self.stored = stored

    def served(self, name: str, request_id: str) -> ServedModel:
        """Raises `ApiError`: 404 for an unknown name, 503 before any replica has announced itself."""
        # Drawn from the id, so that a repeated call for one request gives the same answer.
        draw = zlib.crc32(request_id.encode()) / 2**32
        try:
            pool = self.catalogue.choose(name, draw, lambda target: self._pools[target].has_engine)
        except KeyError:
            raise errors.model_not_found(name=name) from None
        return self._pools[pool].served(name)

    def walk(
        self,
        name: str,
        chain: Chain,
        tiers: Sequence[Tier],
        parse: Callable[[ServedModel], Awaitable[T]],
        *,
        only: str | None = None,
        on_passed: OnPassed = nothing_passed,
    ) -> ChainWalk[T]:
        async def parsed(pool: str) -> T:
            return await parse(replace(self._pools[pool].served(pool), asked=name))

        return ChainWalk(
            name,
            chain,
            tiers,
            self._prices(),
            parse=parsed,
            has_engine=lambda pool: self._pools[pool].has_engine,
            on_passed=on_passed,
            only=only,
        )

    def capabilities(self, name: str) -> list[str]:
        """Words of `Capability` that some server of the model has. Raises `KeyError`."""
        upstreams = [upstream for pool in self._targets(name) for upstream in pool.spec.upstreams]
        return sorted({word for upstream in upstreams for word in upstream.capabilities.words})

    def largest_body(self, models: Collection[str] | None) -> int:
        """In bytes, over these model names (None: all)."""
        names = self.catalogue.names() if models is None else set(models).intersection(self.catalogue.names())
        pools = {pool for name in names for pool, _ in self.catalogue.targets(name)}
        limits = (self._pools[pool].body_limit(self._body_bytes) for pool in pools)
        return max(limits, default=self._body_bytes)

    def require_body(self, pool: str, body_bytes: int, image_bytes: int) -> None:
        """Raises `ApiError` (413) for a body that is too large for the pool, or has too much text."""
        if body_bytes <= self._body_bytes:
            return
        most = self._pools[pool].body_limit(self._body_bytes)
        if body_bytes > most:
            raise errors.body_too_large(max_body_bytes=most)
        if body_bytes - image_bytes > self._body_bytes:
            raise errors.text_too_large(max_text_bytes=self._body_bytes)

    def context_tokens(self, name: str) -> int | None:
        """The context every model of a name accepts; a chain's longest. None: unknown. Raises `KeyError`."""
        context_sizes = [pool.context_tokens for pool in self._targets(name)]
        known = [tokens for tokens in context_sizes if tokens is not None]
        if self.catalogue.chain(name) is not None:
            return max(known, default=None)
        return min(known) if len(known) == len(context_sizes) else None

    def require_engine(self, pool: str) -> None:
        """Raises `NoEngineAvailable` if no replica of the pool serves now."""
        if not self._pools[pool].has_engine:
            raise self._pools[pool].dispatcher.no_engine()

    async def ready(self, call: Call, token: str | None) -> Call:
        """The call for a pool that serves now. Raises `ApiError`, `NoEngineAvailable`, `NoneTook`."""
        if call.chained is None:
            self.require_engine(call.pool)
        elif not self._pools[call.pool].has_engine:
            call = await call.chained.onward(self._pools[call.pool].dispatcher.no_engine())
        return call if token is None else await self._bound(call, token)

    async def _bound(self, call: Call, token: str) -> Call:
        try:
            binding = await self._quotes.redeem(token, call)
        except DatabaseUnavailable as error:
            raise as_api_error(error, call.request_id) from error
        return replace(call, tier=Tier(binding.quote.tier), binding=binding)

    async def take_quote(self, tenant_id: str) -> None:
        """Counts one quote against the tenant's rate. Raises `ApiError` (429)."""
        self._quotes.require_room(tenant_id)
        await self._quote_calls.take(tenant_id)

    async def quotes_instead(self, call: Call, tiers: Sequence[Tier]) -> dict[str, Any]:
        """Quotes of `tiers` for a refusal; redeemable if the key has the scope and room for more."""
        principal = call.principal
        pool = self._pools[call.pool] if call.pool else self._pools.first
        if not tiers or not pool.estimates.is_enabled:
            return {}
        quotes: Quotes | None = self._quotes
        try:
            if "quote" not in principal.scopes:
                quotes = None
            else:
                await self.take_quote(principal.tenant_id)
        except ApiError:
            quotes = None
        wanted = Wanted(call.model, pool.name, call.prompts, False, call.choices, call.max_tokens)
        made = offered(
            pool.estimates, quotes, principal, wanted, tiers, self._prices().version, self._clock()
        )
        expires_s = None if quotes is None else round(self._wall_clock() + quotes.valid_s, 3)
        return {"quotes": made, "expires_at": expires_s}

    def _targets(self, name: str) -> list[ModelPool]:
        """Raises `KeyError`."""
        return [self._pools[pool] for pool, weight in self.catalogue.targets(name) if weight]
