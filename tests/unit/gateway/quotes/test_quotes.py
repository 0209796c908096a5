"""A quote binds exactly what was quoted, once, for its key, while it is valid."""

from __future__ import annotations

import base64
from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from msgspec import structs

from engine.forecast.calibration import bucket_of
from engine.forecast.wait.forecast import Figures, Forecast
from gateway.domain.call import Call
from gateway.domain.estimate import Estimate, Promise
from gateway.domain.quote_token import MAX_TOKEN_CHARACTERS, BadQuote, Quote, Signer
from gateway.errors import ApiError
from gateway.quotes import quotes as module
from gateway.quotes.quotes import Quotes, Wanted
from tenants.errors import DatabaseUnavailable
from tenants.pricing.pricing import FREE, PriceBook, uniform_book
from tenants.types import Principal, Tier
from tests.support import builders

PRINCIPAL = builders.principal()
PROMPT = [7, 8, 9]
RAW = Forecast(
    (0.5, 1.25), (0.6, 1.5), (0.02, 0.04), (2.0, 5.0), (50, 90), {"own": 1, "others": 2, "higher_tier": 3},
    "replay", 9, False,
)  # fmt: skip
TOLD = structs.replace(RAW, wait_s=(0.75, 1.75), ttft_s=(0.875, 2.0))
BOOKS = {version: uniform_book({"m": FREE}, version=version) for version in (1, 2)}


def estimate() -> Estimate:
    promise = Promise(bucket_of(RAW, 1, is_exact=False, kind="binding"), RAW)
    return Estimate(
        TOLD.wait_s, TOLD.ttft_s, TOLD.tpot_s, TOLD.e2e_s, (50, 90), (1_000, 2_000), 9_000, RAW.tokens_ahead,
        "replay", 9, False, promise,
    )  # fmt: skip


class Shelf:
    """What stands in the database (`tests/integration/test_redeemed_quotes.py`), in memory."""

    def __init__(self) -> None:
        self.owners: dict[str, tuple[str, int]] = {}
        self.is_lost = False
        """It writes, and is gone before it says so."""

    async def claim(self, offer_id: str, request_id: str, expires_us: int) -> bool:
        is_new = offer_id not in self.owners
        self.owners.setdefault(offer_id, (request_id, expires_us))
        if self.is_lost:
            raise DatabaseUnavailable("gone")
        return is_new

    async def release(self, offer_id: str, request_id: str) -> None:
        if self.owners.get(offer_id, ("", 0))[0] == request_id:
            del self.owners[offer_id]


class Desk:
    """Quotes on a clock of their own."""

    def __init__(self, secret: bytes = b"s" * 32, shelf: Shelf | None = None) -> None:
        self.now_s = 1_000.0
        self.shelf = shelf or Shelf()
        here = builders.site(None, lambda: self.now_s, quote_valid_s=10.0)
        self.quotes = Quotes(here, secret, self.prices_at, self.shelf)

    async def prices_at(self, version: int) -> PriceBook:
        return BOOKS[version]

    def issue(
        self, prompt: list[int] | range = PROMPT, principal: Principal = PRINCIPAL, **changes: Any
    ) -> dict[Tier, str]:
        wanted = Wanted("m", "m", [prompt], isinstance(prompt, range), 1, 100)
        offers = {tier: estimate() for tier in Tier}
        return self.quotes.issue(principal, wanted, offers, 1, Tier.STANDARD, 55.0)


def call(**changes: Any) -> Call:
    values = {"chat": False, "prompts": (PROMPT,), "max_tokens": 100, "stream": False, "include_usage": False}
    return builders.call(**(values | changes))


async def refused(desk: Desk, token: str, status: int, code: str, reason: str, **changes: Any) -> None:
    with pytest.raises(ApiError) as caught:
        await desk.quotes.redeem(token, call(**changes))
    error = caught.value
    assert (error.status, error.code, error.should_retry) == (status, code, False)
    assert reason in error.message
    assert error.param == "X-Fairgate-Quote"


async def test_a_redeemed_quote_holds_its_figures_and_prices() -> None:
    desk = Desk()
    token = desk.issue()[Tier.BATCH]
    assert len(token) < MAX_TOKEN_CHARACTERS
    binding = await desk.quotes.redeem(token, call())
    assert binding.prices is BOOKS[1]
    assert binding.quote.tier == "batch"
    held = binding.estimate
    assert (held.ttft_s, held.e2e_s, held.max_cost_nanousd) == (TOLD.ttft_s, TOLD.e2e_s, 9_000)
    assert held.promise is not None
    assert held.promise.raw == Figures(RAW.wait_s, RAW.ttft_s, RAW.tpot_s, RAW.e2e_s)
    assert held.promise.bucket.kind == "binding"
    assert held.promise.bucket.tier == 2


async def test_another_gateway_of_the_installation_honours_it_and_a_stranger_does_not() -> None:
    shelf = Shelf()
    token = Desk(shelf=shelf).issue()[Tier.STANDARD]
    assert (await Desk(shelf=shelf).quotes.redeem(token, call())).quote.offer_id
    await refused(Desk(shelf=shelf), token, 409, "quote_redeemed", "redeemed before", request_id="req_2")
    await refused(Desk(b"t" * 32), token, 400, "quote_invalid", "altered, or another server signed it")


async def test_what_was_altered_is_refused_at_every_byte() -> None:
    desk = Desk()
    token = desk.issue()[Tier.STANDARD]
    signer = Signer(b"s" * 32)
    for index in range(len(token)):
        other = "A" if token[index] != "A" else "B"
        try:
            opened = signer.open(token[:index] + other + token[index + 1 :])
        except BadQuote:
            continue
        # The last character of base64 has bits that mean nothing.
        assert opened == signer.open(token), index
    for junk in ("", "fgq1", "fgq1..", "fgq1.a.b", "é", "x" * 5_000, token + ".x"):
        await refused(desk, junk, 400, "quote_invalid", "The quote in 'X-Fairgate-Quote' cannot be used")


async def test_a_better_price_cannot_be_written_into_it() -> None:
    token = Desk().issue()[Tier.STANDARD]
    prefix, payload, signature = token.split(".")
    quote = msgspec.msgpack.decode(base64.urlsafe_b64decode(payload + "=="), type=Quote)
    cheaper = msgspec.msgpack.encode(msgspec.structs.replace(quote, price_version=2))
    forged = f"{prefix}.{base64.urlsafe_b64encode(cheaper).decode().rstrip('=')}.{signature}"
    await refused(Desk(), forged, 400, "quote_invalid", "altered")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"principal": replace(PRINCIPAL, key_id="key_2")}, "another API key"),
        ({"principal": replace(PRINCIPAL, tenant_id="ten_2")}, "another API key"),
        ({"model": "other"}, "the model m"),
        ({"prompts": ([7, 8, 10],)}, "another prompt"),
        ({"prompts": (PROMPT, PROMPT)}, "another prompt"),
        ({"max_tokens": 101}, "max_tokens 100; the request has 1 and 101"),
        ({"choices": 2}, "n 1 and max_tokens 100; the request has 2"),
        ({"tier": Tier.INTERACTIVE, "names_tier": True}, "service_tier 'default'"),
    ],
)
async def test_it_is_of_no_use_for_anything_else(changes: dict[str, Any], reason: str) -> None:
    desk = Desk()
    token = desk.issue()[Tier.STANDARD]
    await refused(desk, token, 400, "quote_mismatch", reason, **changes)
    assert len(desk.quotes) == 1
    await desk.quotes.redeem(token, call())


async def test_a_quote_by_length_is_redeemed_by_any_prompt_of_that_length() -> None:
    desk = Desk()
    token = desk.issue(range(3))[Tier.STANDARD]
    await refused(desk, token, 400, "quote_mismatch", "another length", prompts=([1, 2],))
    assert (await desk.quotes.redeem(token, call(prompts=([5, 5, 5],)))).quote.is_sized


async def test_it_expires_and_is_redeemed_once_in_one_tier() -> None:
    desk = Desk()
    tokens = desk.issue()
    late = desk.issue()[Tier.STANDARD]
    await desk.quotes.redeem(tokens[Tier.STANDARD], call())
    for token in tokens.values():
        await refused(desk, token, 409, "quote_redeemed", "redeemed before")
    desk.now_s += 10.0
    await refused(desk, late, 409, "quote_expired", "valid for 10 s")
    await refused(desk, tokens[Tier.STANDARD], 409, "quote_expired", "valid for 10 s")


async def test_where_nothing_was_charged_it_may_be_redeemed_again() -> None:
    desk = Desk()
    token = desk.issue()[Tier.STANDARD]
    binding = await desk.quotes.redeem(token, call())
    for request_id in ("req_1", "req_2"):
        await refused(desk, token, 409, "quote_redeemed", "redeemed before", request_id=request_id)
    assert desk.shelf.owners == {binding.quote.offer_id: ("req_1", 1_010_000_000)}
    await binding.release()
    await desk.quotes.redeem(token, call(request_id="req_2"))
    await binding.release()
    await refused(desk, token, 409, "quote_redeemed", "redeemed before", request_id="req_3")


async def test_a_database_that_is_lost_while_it_writes_uses_no_quote_up() -> None:
    desk = Desk()
    token = desk.issue()[Tier.STANDARD]
    desk.shelf.is_lost = True
    with pytest.raises(DatabaseUnavailable):
        await desk.quotes.redeem(token, call())
    desk.shelf.is_lost = False
    await desk.quotes.redeem(token, call(request_id="req_2"))
    with pytest.raises(ApiError, match="redeemed before"):
        await desk.quotes.redeem(token, call(request_id="req_3"))


async def test_prices_that_cannot_be_read_use_no_quote_up() -> None:
    desk = Desk()
    token = desk.issue()[Tier.STANDARD]
    kept = BOOKS.pop(1)
    try:
        with pytest.raises(KeyError):
            await desk.quotes.redeem(token, call())
    finally:
        BOOKS[1] = kept
    await desk.quotes.redeem(token, call())


async def test_outstanding_quotes_are_promised_until_redeemed_or_expired_and_bounded() -> None:
    desk = Desk()
    tokens = [desk.issue()[Tier.STANDARD] for _ in range(module.MAX_OF_A_TENANT)]
    promised = desk.quotes.promised("m")
    assert len(promised) == module.MAX_OF_A_TENANT
    assert {(each.tenant_id, each.tier, each.input_tokens) for each in promised} == {("ten_1", 1, 3)}
    assert desk.quotes.promised("other model") == []
    with pytest.raises(ApiError) as caught:
        desk.quotes.require_room("ten_1")
    assert (caught.value.status, caught.value.retry_after_s) == (429, 10.0)
    desk.quotes.require_room("ten_2")
    await desk.quotes.redeem(tokens[0], call())
    desk.quotes.require_room("ten_1")
    assert len(desk.quotes.promised("m")) == module.MAX_OF_A_TENANT - 1
    desk.now_s += 10.0
    assert desk.quotes.promised("m") == []
    assert len(desk.quotes) == 0


async def test_a_tenant_is_quoted_behind_all_of_its_own_in_the_highest_tier_they_may_take() -> None:
    desk = Desk()
    other = replace(PRINCIPAL, tenant_id="ten_2", key_id="key_2")
    for _ in range(60):
        desk.issue()
        desk.issue(principal=other)
        desk.now_s += 20.0
    for _ in range(10):
        desk.issue()
        desk.issue(principal=other)
    desk.quotes.require_room("ten_1")
    assert 0.2 < desk.quotes.redeemed_share("ten_1") < 0.4
    counted = Counter((each.tenant_id, each.tier) for each in desk.quotes.promised("m", "ten_1"))
    assert counted["ten_1", 0] == 10, "all, though few were redeemed of late"
    assert 1 <= counted["ten_2", 1] <= 4
    everyone = Counter(each.tenant_id for each in desk.quotes.promised("m"))
    assert everyone["ten_1"] == everyone["ten_2"] == counted["ten_2", 1]


async def test_what_one_tenant_redeems_says_nothing_of_another() -> None:
    desk = Desk()
    for _ in range(200):
        desk.issue(principal=replace(PRINCIPAL, tenant_id="ten_2", key_id="key_2"))
        desk.now_s += 20.0
    desk.issue()
    assert [each.tenant_id for each in desk.quotes.promised("m")] == ["ten_1"]
    assert desk.quotes.redeemed_share("ten_2") < 0.05


async def test_a_quote_carries_whether_it_binds_and_was_made_beside_others() -> None:
    desk = Desk()
    token = desk.issue()[Tier.STANDARD]
    first = (await desk.quotes.redeem(token, call())).quote
    assert (first.is_binding, first.is_together) == (True, False)
    assert first.issued_s == desk.now_s
    promise = Promise(bucket_of(RAW, 1, is_exact=False, kind="together"), RAW, is_learned=False)
    unlearned = structs.replace(estimate(), promise=promise, is_measured=False)
    wanted = Wanted("m", "m", [PROMPT], False, 1, 100)
    [token] = desk.quotes.issue(
        PRINCIPAL, wanted, {Tier.STANDARD: unlearned}, 1, Tier.STANDARD, 55.0
    ).values()
    binding = await desk.quotes.redeem(token, call(request_id="req_2"))
    assert (binding.quote.is_binding, binding.quote.is_together) == (False, True)
    assert not binding.estimate.is_measured
    assert binding.estimate.promise is not None
    assert binding.estimate.promise.bucket.kind == "together"


async def test_who_never_redeems_is_not_waited_for() -> None:
    desk = Desk()
    for _ in range(400):
        desk.issue(principal=replace(PRINCIPAL, key_id=f"key_{_}"))
        desk.now_s += 20.0
        assert desk.quotes.promised("m") == []
    assert desk.quotes.redeemed_share("ten_1") < 0.01
    for number in range(100):
        desk.issue(principal=replace(PRINCIPAL, key_id=f"late_{number}"))
    assert len(desk.quotes.promised("m")) == 0
    assert len(desk.quotes) == 100
