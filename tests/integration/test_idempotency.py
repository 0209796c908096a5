"""An idempotency key belongs to one request, under concurrent claims."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from tenants.directory.idempotency import (
    AnswersTooLarge,
    Claimed,
    IdempotentAnswers,
    Scope,
    StoredAnswer,
    TooManyKeys,
)
from tenants.storage.database import open_database

SCOPE = Scope("key_1", "order-17", "ten_1")
ANSWER = StoredAnswer(200, {"content-type": "text/event-stream"}, [b"data: 1\n\n", b"data: 2\n\n"])
HOUR_US = 3_600_000_000


@pytest.fixture
def answers(database_url: str) -> Iterator[IdempotentAnswers]:
    database = open_database(database_url)
    yield IdempotentAnswers(database, max_per_key=3, max_bytes=1_000)
    asyncio.run(database.close())


async def claim(
    answers: IdempotentAnswers,
    request_id: str,
    *,
    scope: Scope = SCOPE,
    now_us: int = 0,
    instead_of: str | None = None,
) -> Claimed | None:
    return await answers.claim(
        scope, "print", request_id, "gw_1", now_us=now_us, expires_us=now_us + HOUR_US, instead_of=instead_of
    )


def test_a_key_is_known_from_its_claim_until_it_expires(answers: IdempotentAnswers) -> None:
    async def main() -> list[bool]:
        before = await answers.is_claimed(SCOPE.key_id, SCOPE.idempotency_key, 0)
        await claim(answers, "req_1")
        return [
            before,
            await answers.is_claimed(SCOPE.key_id, SCOPE.idempotency_key, HOUR_US - 1),
            await answers.is_claimed("key_other", SCOPE.idempotency_key, 1),
            await answers.is_claimed(SCOPE.key_id, SCOPE.idempotency_key, HOUR_US),
        ]

    assert asyncio.run(main()) == [False, True, False, False]


def test_of_many_at_once_one_has_it(database_url: str) -> None:
    async def main() -> None:
        databases = [open_database(database_url) for _ in range(3)]
        stores = [IdempotentAnswers(database, max_per_key=3, max_bytes=1_000) for database in databases]
        found = await asyncio.gather(
            *(
                claim(store, f"req_{index}_{number}")
                for index, store in enumerate(stores)
                for number in range(8)
            )
        )
        winners = [each for each in found if each is None]
        assert len(winners) == 1
        others = {each.request_id for each in found if each is not None}
        assert len(others) == 1, "all others are told the same request"
        for database in databases:
            await database.close()

    asyncio.run(main())


def test_what_was_answered_is_found_again_byte_for_byte(answers: IdempotentAnswers) -> None:
    async def main() -> None:
        assert await claim(answers, "req_1") is None
        assert await claim(answers, "req_2") == Claimed("print", "req_1", "gw_1", None)
        assert not await answers.keep(SCOPE, "req_2", ANSWER), "only the request that has the key"
        assert await answers.keep(SCOPE, "req_1", ANSWER)
        assert await claim(answers, "req_3") == Claimed("print", "req_1", "gw_1", ANSWER)
        assert not await answers.keep(SCOPE, "req_1", StoredAnswer(500, {}, [])), "an answer stays as it is"
        await answers.release(SCOPE, "req_1")
        assert await claim(answers, "req_4") == Claimed("print", "req_1", "gw_1", ANSWER)
        too_large = Scope("key_1", "large", "ten_1")
        assert await claim(answers, "req_5", scope=too_large) is None
        assert await answers.keep(too_large, "req_5", StoredAnswer(200, {}, None))
        found = await claim(answers, "req_6", scope=too_large)
        assert found is not None
        assert found.answer == StoredAnswer(200, {}, None)

    asyncio.run(main())


def test_a_key_is_free_again_when_released_expired_or_taken_over(answers: IdempotentAnswers) -> None:
    async def main() -> None:
        assert await claim(answers, "req_1") is None
        await answers.release(SCOPE, "req_other")
        assert await claim(answers, "req_2") is not None
        await answers.release(SCOPE, "req_1")
        assert await claim(answers, "req_2") is None
        assert await claim(answers, "req_3", now_us=HOUR_US - 1) is not None
        assert await claim(answers, "req_3", now_us=HOUR_US) is None
        assert await claim(answers, "req_4", now_us=HOUR_US, instead_of="req_2") is not None, "not that one"
        assert await claim(answers, "req_4", now_us=HOUR_US, instead_of="req_3") is None
        assert await answers.keep(SCOPE, "req_4", ANSWER)
        found = await claim(answers, "req_5", now_us=HOUR_US, instead_of="req_4")
        assert found is not None, "an answer cannot be taken over"

    asyncio.run(main())


def test_keys_are_one_api_keys_own_and_bounded(answers: IdempotentAnswers) -> None:
    async def main() -> None:
        for number in range(3):
            assert await claim(answers, f"req_{number}", scope=Scope("key_1", f"k{number}", "ten_1")) is None
        with pytest.raises(TooManyKeys):
            await claim(answers, "req_9", scope=Scope("key_1", "k9", "ten_1"))
        assert await claim(answers, "req_9", scope=Scope("key_2", "k0", "ten_1")) is None, "another API key's"
        assert await answers.purge(HOUR_US - 1) == 0
        assert await answers.purge(HOUR_US) == 4
        assert await claim(answers, "req_9", scope=Scope("key_1", "k9", "ten_1")) is None

    asyncio.run(main())


def test_answers_of_a_tenant_are_bounded_in_bytes(answers: IdempotentAnswers) -> None:
    async def main() -> None:
        noise = random.Random(1).randbytes(600)
        for number in range(2):
            mine = Scope(f"key_{number}", "large", "ten_1")
            assert await claim(answers, f"req_{number}", scope=mine) is None
            assert await answers.keep(mine, f"req_{number}", StoredAnswer(200, {}, [noise]))
        first, second = Scope("key_0", "large", "ten_1"), Scope("key_1", "large", "ten_1")
        found = [await claim(answers, "req_9", scope=scope) for scope in (first, second)]
        assert [each.answer and each.answer.pieces for each in found if each] == [[noise], None], "the second"
        assert await claim(answers, "req_4", scope=Scope("key_4", "k", "ten_1")) is None
        assert await answers.keep(
            Scope("key_4", "k", "ten_1"), "req_4", StoredAnswer(200, {"x": "y" * 400}, [])
        )
        with pytest.raises(AnswersTooLarge):
            await claim(answers, "req_5", scope=Scope("key_5", "k", "ten_1"))
        assert await claim(answers, "req_6", scope=Scope("key_6", "k", "ten_2")) is None, "another tenant's"
        assert await answers.purge(HOUR_US) == 4
        assert await claim(answers, "req_7", scope=Scope("key_5", "k", "ten_1")) is None

    asyncio.run(main())
