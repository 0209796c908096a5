"""Streams pass up to what a rate can feed, in order; others wait without holding budget."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from gateway.budget.stream_limiter import StreamLimiter, StreamLimitReached, fed_streams
from tenants.types import Amounts, Limit, LimitMode, Meter, SubjectKind, Tier, Window


def bucket(rate_per_s: float, meter: Meter = Meter.OUTPUT_TOKENS, mode: LimitMode = LimitMode.HARD) -> Limit:
    return Limit("l", "t", SubjectKind.TENANT, "t", meter, 10, rate_per_s=rate_per_s, mode=mode)


def sizes(output_tokens: int) -> Amounts:
    """A token counts two units, and costs 300 nano-dollars."""
    return Amounts(7, 2 * output_tokens, 300 * output_tokens)


@pytest.mark.parametrize(
    ("limit", "streams"),
    [
        (bucket(200), 2),
        (bucket(201), 3),
        (bucket(1), 1),
        (bucket(60_000, Meter.COST_NANOUSD), 4),
        (bucket(200, Meter.TOTAL_TOKENS), 2),
    ],
)
def test_a_rate_feeds_as_many_streams_as_its_tokens_make(limit: Limit, streams: int) -> None:
    assert list(fed_streams([limit], sizes, 50.0).values()) == [streams]


def test_spare_capacity_feeds_more_streams() -> None:
    rates = {bucket(200).identity: 800.0}
    fed = fed_streams([bucket(200)], sizes, 50.0, lambda limit: rates[limit.identity])
    assert list(fed.values()) == [8]


def test_what_is_no_hard_rate_of_output_lets_everybody_pass() -> None:
    window = Limit("l", "t", SubjectKind.TENANT, "t", Meter.OUTPUT_TOKENS, 10, Window.DAY)
    others = [
        window,
        bucket(5, Meter.REQUESTS),
        bucket(5, Meter.INPUT_TOKENS),
        bucket(5, mode=LimitMode.SHADOW),
        replace(bucket(5), kind=SubjectKind.PLATFORM),
        replace(bucket(5), kind=SubjectKind.END_USER),
    ]
    assert fed_streams(others, sizes, 50.0) == {}


def entering(
    limiter: StreamLimiter, name: str, needs: dict[str, int], sequences: int = 1
) -> asyncio.Task[bool]:
    async def enter() -> bool:
        return await limiter.enter(name, needs, sequences)

    return asyncio.create_task(enter(), name=name)


async def passed(*tasks: asyncio.Task[bool]) -> list[str]:
    for _ in range(5):
        await asyncio.sleep(0)
    return [task.get_name() for task in tasks if task.done()]


async def test_they_pass_in_order_as_others_leave() -> None:
    limiter = StreamLimiter(max_waiting=10)
    tasks = [entering(limiter, name, {"b": 2}) for name in "abcd"]
    assert await passed(*tasks) == ["a", "b"]
    assert len(limiter) == 2
    limiter.leave("b")
    assert await passed(*tasks) == ["a", "b", "c"]
    assert [task.result() for task in tasks[:3]] == [False, True, True], "who shares a rate is patient"
    limiter.leave("a")
    limiter.leave("c")
    assert await passed(*tasks) == ["a", "b", "c", "d"]


async def test_nobody_overtakes_who_waits_for_the_same_bucket() -> None:
    limiter = StreamLimiter(max_waiting=10)
    tasks = [
        entering(limiter, "first", {"b": 3}, 2),
        entering(limiter, "large", {"b": 3}, 2),
        entering(limiter, "small", {"b": 3}, 1),
        entering(limiter, "elsewhere", {"c": 1}, 1),
    ]
    assert await passed(*tasks) == ["first", "elsewhere"], "the small one would starve the large one"
    limiter.leave("first")
    assert await passed(*tasks) == ["first", "large", "small", "elsewhere"]


async def test_one_larger_than_the_rate_goes_alone() -> None:
    limiter = StreamLimiter(max_waiting=10)
    tasks = [entering(limiter, "large", {"b": 2}, 8), entering(limiter, "next", {"b": 2})]
    assert await passed(*tasks) == ["large"]
    limiter.leave("large")
    assert await passed(*tasks) == ["large", "next"]


async def test_who_gives_up_makes_room_for_those_behind() -> None:
    limiter = StreamLimiter(max_waiting=10)
    tasks = [entering(limiter, name, {"b": 1}) for name in "abc"]
    assert await passed(*tasks) == ["a"]
    tasks[1].cancel()
    limiter.leave("a")
    limiter.leave("b")
    assert await passed(tasks[0], tasks[2]) == ["a", "c"]
    limiter.leave("c")
    assert len(limiter) == 0
    assert await limiter.enter("d", {"b": 1}, 1) is False, "no other stream is left: it need not wait"


async def test_only_so_many_wait() -> None:
    limiter = StreamLimiter(max_waiting=1)
    tasks = [entering(limiter, "a", {"b": 1}), entering(limiter, "b", {"b": 1})]
    assert await passed(*tasks) == ["a"]
    with pytest.raises(StreamLimitReached):
        await limiter.enter("c", {"b": 1}, 1)
    assert await limiter.enter("free", {}, 1) is False, "no rate, no wait"
    others = entering(limiter, "others", {"slow": 1, "theirs": 1})
    assert await passed(others) == ["others"]
    assert others.result() is False, "waiters for one bucket turn no others away"
    with pytest.raises(StreamLimitReached):
        await limiter.enter("both", {"theirs": 1, "b": 1}, 1)
    tasks[1].cancel()


async def test_only_so_many_wait_in_all() -> None:
    limiter = StreamLimiter(max_waiting=10, max_waiting_in_all=2)
    tasks = [entering(limiter, f"{name}{bucket}", {bucket: 1}) for bucket in "bc" for name in "12"]
    assert await passed(*tasks) == ["1b", "1c"]
    with pytest.raises(StreamLimitReached, match="2 requests wait"):
        await limiter.enter("d", {"d": 1}, 1)
    for task in tasks:
        task.cancel()


def test_limits_of_other_tiers_are_another_bucket() -> None:
    one = Limit("l", "t", SubjectKind.TENANT, "t", Meter.OUTPUT_TOKENS, 9, rate_per_s=50, tier=Tier.BATCH)
    assert len(fed_streams([bucket(100), one], sizes, 50.0)) == 2


async def test_buckets_that_feed_streams_are_told_from_those_that_do_not() -> None:
    limiter, mine, other = StreamLimiter(max_waiting=10), bucket(5), bucket(5, Meter.INPUT_TOKENS)
    assert not limiter.feeds([mine, other])
    await limiter.enter("a", {mine.identity: 2}, 1)
    assert limiter.feeds([other, mine])
    assert not limiter.feeds([other])
    limiter.leave("a")
    assert not limiter.feeds([mine])
