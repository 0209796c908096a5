"""What is done to the contract? Bursts at limits, kill -9 of every part, clients that leave or ask twice.

A scenario makes tenants of its own, drives clients and kills; what it returns is audited afterwards
(`audit.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ops.bench.budgets.clients import ClientAttempt, ClientRequest, ask_once, persist
from ops.bench.budgets.stream_rate import tokens_per_s
from ops.bench.budgets.testbed import BudgetTenant, ScenarioFailed, Testbed
from ops.bench.common.http_client import HttpClient

PATIENCE_S = 30.0
"""So long a refused client goes on asking."""
MAX_TOKENS = 128
"""Asked for where a burst asks for something: more than any of the answers has."""
SHARE = {50: 0.4, 500: 0.15}
"""Of what a burst's answers take, so much is its budget."""
ADMITTED = 0.95
KILL_CLIENTS = 24
KILL_TOKENS = 160
STREAMS_BEFORE_KILL = 6
TOKENS_BEFORE_KILL = 12
LEAVERS = 16
KEYS = 8
RATE_PER_S = 100.0
BURST_TOKENS = 10
SLOPE_TOKENS = 320
SLOPE_FROM = 50
SLOPE_WITHIN = 0.05


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation, and how many tokens it and its whole answer have."""

    messages: list[dict[str, str]]
    prompt_tokens: int
    answer_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.answer_tokens


@dataclass(frozen=True)
class ScenarioContext:
    """What a scenario works with."""

    house: Testbed
    client: HttpClient
    questions: Sequence[Question]
    name: str
    """Tenants are called after it."""
    gateways: int

    @property
    def urls(self) -> list[str]:
        """Of the gateways that take part; if there are more, they stand by."""
        return [server.url for server in self.house.servers[: self.gateways]]

    def body(self, number: int, **fields: Any) -> dict[str, Any]:
        question = self.questions[number % len(self.questions)]
        return {"model": self.house.model, "messages": question.messages, "temperature": 0} | fields


@dataclass
class ScenarioEvidence:
    """What happened, for the audit, and figures of the scenario's own."""

    tenants: list[BudgetTenant]
    answers: list[ClientAttempt]
    figures: dict[str, float] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    """Requirements of the scenario's own that were not met."""
    after: Callable[[], Awaitable[None]] | None = None
    """Puts the house in order again, after the audit."""


Run = Callable[[ScenarioContext], Awaitable[ScenarioEvidence]]


@dataclass(frozen=True, slots=True)
class BudgetScenario:
    """One row of the report."""

    name: str
    gateways: int
    run: Run


async def questions(
    house: Testbed, client: HttpClient, chats: Sequence[list[dict[str, str]]]
) -> list[Question]:
    """Asks everything once without a limit: how long the answers are is measured, not assumed."""
    tenant = await house.tenant("lengths")
    await house.known(tenant)

    async def measure(messages: list[dict[str, str]]) -> Question:
        body = {"model": house.model, "messages": messages, "temperature": 0, "max_tokens": 300}
        answer = await ask_once(
            client, house.servers[0].url, ClientRequest(tenant.tenant_id, tenant.key, body)
        )
        if answer.status != 200 or answer.finish != "stop":
            raise ScenarioFailed(
                f"a question was not answered: {answer.status} {answer.code} {answer.finish}"
            )
        return Question(messages, answer.prompt_tokens, answer.delivered_tokens)

    return await asyncio.gather(*map(measure, chats))


# ---------------------------------------------------------------- bursts


def burst(concurrency: int, *, asks_max_tokens: bool, streams: bool) -> Run:
    """So many requests at once on one budget that is enough for a part of them."""

    async def run(stage: ScenarioContext) -> ScenarioEvidence:
        wanted = [stage.questions[number % len(stage.questions)] for number in range(concurrency)]
        demand = sum(question.total_tokens for question in wanted)
        amount = int(demand * SHARE.get(concurrency, 0.3))
        tenant = await stage.house.tenant(stage.name, meter="total_tokens", amount=amount, window="lifetime")
        await stage.house.known(tenant)
        fields = {"stream": streams} | ({"max_tokens": MAX_TOKENS} if asks_max_tokens else {})
        until_s = time.monotonic() + PATIENCE_S
        answers: list[ClientAttempt] = []
        begun_s = time.monotonic()
        await asyncio.gather(
            *(
                persist(
                    stage.client,
                    stage.urls,
                    ClientRequest(tenant.tenant_id, tenant.key, stage.body(number, **fields)),
                    answers,
                    first_url=number,
                    until_s=until_s,
                )
                for number in range(concurrency)
            )
        )
        return judged_burst(
            ScenarioEvidence([tenant], answers),
            amount,
            demand,
            time.monotonic() - begun_s,
            must=not asks_max_tokens,
        )

    return run


def judged_burst(
    evidence: ScenarioEvidence, amount: int, demand: int, seconds: float, *, must: bool
) -> ScenarioEvidence:
    """`admitted_of_admissible`: of the tokens that the budget would have allowed, given how long the answers
    are, so many were delivered (prompts included); `admitted_at_once`: to first attempts alone."""
    served = [answer for answer in evidence.answers if answer.status == 200]
    used = sum(answer.prompt_tokens + answer.delivered_tokens for answer in served)
    at_once = sum(answer.prompt_tokens + answer.delivered_tokens for answer in served if answer.attempt == 0)
    ratio = used / min(amount, demand)
    evidence.figures |= {
        "admitted_of_admissible": round(ratio, 3),
        "admitted_at_once": round(at_once / min(amount, demand), 3),
        "served": len(served),
        "refused": len({id(answer) for answer in evidence.answers if answer.status != 200}),
        "seconds": round(seconds, 1),
    }
    if must and ratio < ADMITTED:
        evidence.broken.append(f"admitted/admissible {ratio:.2f} < {ADMITTED}")
    if unexpected := [answer for answer in evidence.answers if answer.status not in (200, 429)]:
        evidence.broken.append(
            f"{len(unexpected)} unexpected answers, such as {unexpected[0].status} {unexpected[0].code}"
        )
    return evidence


# ---------------------------------------------------------------- kill -9


def kill(hit: Callable[[Testbed], Awaitable[None]], mend: Callable[[Testbed], Awaitable[None]]) -> Run:
    """Two tenants stream and wait for whole answers; in the middle `hit` kills. `mend` starts again what was
    killed."""

    async def run(stage: ScenarioContext) -> ScenarioEvidence:
        demand = KILL_CLIENTS // 2 * KILL_TOKENS
        tight = await stage.house.tenant(
            f"{stage.name}-tight", meter="output_tokens", amount=demand // 2, window="lifetime"
        )
        wide = await stage.house.tenant(
            f"{stage.name}-wide", meter="output_tokens", amount=demand * 3, window="lifetime"
        )
        await stage.house.known(tight, wide)
        answers: list[ClientAttempt] = []
        far_enough: set[int] = set()
        is_time = asyncio.Event()

        def on_token(answer: ClientAttempt) -> None:
            if answer.delivered_tokens >= TOKENS_BEFORE_KILL:
                far_enough.add(id(answer))
            if len(far_enough) >= STREAMS_BEFORE_KILL:
                is_time.set()

        until_s = time.monotonic() + PATIENCE_S
        clients = []
        for number in range(KILL_CLIENTS):
            tenant = (tight, wide)[number % 2]
            body = stage.body(number, stream=number // 2 % 3 > 0, max_tokens=KILL_TOKENS, ignore_eos=True)
            ask = ClientRequest(tenant.tenant_id, tenant.key, body)
            clients.append(
                asyncio.create_task(
                    persist(
                        stage.client,
                        stage.urls,
                        ask,
                        answers,
                        first_url=number // 6,
                        until_s=until_s,
                        on_token=on_token,
                    )
                )
            )
        try:
            async with asyncio.timeout(PATIENCE_S):
                await is_time.wait()
            await hit(stage.house)
            killed_s = time.monotonic()
            await mend(stage.house)
            mended_s = await _serving_again(stage, wide, answers) - killed_s
            await asyncio.gather(*clients)
        except TimeoutError:
            raise ScenarioFailed("the streams did not get far enough to kill something") from None
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
        evidence = ScenarioEvidence([tight, wide], answers)
        cut = [
            answer
            for answer in answers
            if answer.status in (0, 200) and not (answer.is_whole and not answer.code)
        ]
        evidence.figures |= {
            "served": sum(answer.is_whole and answer.status == 200 and not answer.code for answer in answers),
            "cut": len(cut),
            "refused": sum(answer.status >= 400 for answer in answers),
            "serving_again_s": round(mended_s, 1),
        }
        return evidence

    return run


async def _serving_again(stage: ScenarioContext, tenant: BudgetTenant, answers: list[ClientAttempt]) -> float:
    """When (monotonic) every gateway that lives has answered a request again."""
    alive = [server.url for server in stage.house.servers if server.process.returncode is None]
    ask = ClientRequest(tenant.tenant_id, tenant.key, stage.body(0, max_tokens=1))
    until_s = time.monotonic() + PATIENCE_S
    for url in alive:
        last = await persist(stage.client, [url], ask, answers, until_s=until_s)
        if last.status != 200:
            raise ScenarioFailed(f"{url} does not serve again: {last.status} {last.code}")
    return time.monotonic()


async def _kill_gateway(house: Testbed) -> None:
    await house.kill_gateway(0)


async def _others_serve(house: Testbed) -> None:
    await house.ready([number for number in range(len(house.servers)) if number])


async def _kill_engine(house: Testbed) -> None:
    await house.kill_engine()


async def _engine_again(house: Testbed) -> None:
    await house.start_engine()
    await house.ready()


async def _kill_both(house: Testbed) -> None:
    assert house.engine is not None
    house.engine.kill()
    house.servers[0].process.kill()
    await asyncio.gather(house.kill_engine(), house.kill_gateway(0))


async def _engine_and_others(house: Testbed) -> None:
    await house.start_engine()
    await _others_serve(house)


async def _kill_redis(house: Testbed) -> None:
    house.redis.kill()


async def _redis_again(house: Testbed) -> None:
    house.redis.start()
    await house.ready()


async def _kill_postgres(house: Testbed) -> None:
    house.postgres.kill()


async def _postgres_again(house: Testbed) -> None:
    house.postgres.start()
    await house.ready()


def _then_restart(run: Run) -> Run:
    """The killed gateway comes back after the audit: what it left was the others' to settle."""

    async def with_restart(stage: ScenarioContext) -> ScenarioEvidence:
        async def after() -> None:
            await stage.house.restart_gateway(0)
            await stage.house.ready()

        try:
            evidence = await run(stage)
        except BaseException:
            await after()
            raise
        evidence.after = after
        return evidence

    return with_restart


# ---------------------------------------------------------------- clients


async def disconnects(stage: ScenarioContext) -> ScenarioEvidence:
    """Clients that leave, streaming and not; each is a tenant of its own, so that what the engine emitted for
    it is known exactly."""
    tenants = [
        await stage.house.tenant(
            f"{stage.name}-{number}", meter="output_tokens", amount=100_000, window="lifetime"
        )
        for number in range(LEAVERS)
    ]
    await stage.house.known(*tenants)
    answers: list[ClientAttempt] = []

    async def leave(number: int, tenant: BudgetTenant) -> None:
        streams = number % 4 != 3
        body = stage.body(number, stream=streams, max_tokens=600, ignore_eos=True)
        ask = ClientRequest(
            tenant.tenant_id,
            tenant.key,
            body,
            leave_after_tokens=1 + 5 * number if streams else None,
            leave_after_s=None if streams else 0.2 + 0.02 * number,
        )
        answers.append(await ask_once(stage.client, stage.urls[number % len(stage.urls)], ask))

    await asyncio.gather(*(leave(number, tenant) for number, tenant in enumerate(tenants)))
    evidence = ScenarioEvidence(tenants, answers, {"left": sum(answer.has_left for answer in answers)})
    if evidence.figures["left"] < LEAVERS:
        evidence.broken.append(f"only {evidence.figures['left']} of {LEAVERS} clients left in the middle")
    return evidence


async def retries(stage: ScenarioContext) -> ScenarioEvidence:
    """Under each Idempotency-Key: two attempts at once through different gateways, one that leaves in the
    middle, and one afterwards: one run, one charge, the same answer. And the same without keys: as many runs
    as attempts."""
    tenant = await stage.house.tenant(stage.name, meter="output_tokens", amount=100_000, window="lifetime")
    plain = await stage.house.tenant(
        f"{stage.name}-plain", meter="output_tokens", amount=100_000, window="lifetime"
    )
    await stage.house.known(tenant, plain)
    answers: list[ClientAttempt] = []
    until_s = time.monotonic() + PATIENCE_S
    broken: list[str] = []

    async def one(number: int) -> None:
        body = stage.body(number, stream=number % 2 == 0, max_tokens=120, ignore_eos=True)
        key = f"{stage.name}-{number}"
        if number % 4 == 0:
            leaver = ClientRequest(
                tenant.tenant_id, tenant.key, body, leave_after_tokens=4, idempotency_key=key
            )
            answers.append(await ask_once(stage.client, stage.urls[0], leaver))
        ask = ClientRequest(tenant.tenant_id, tenant.key, body, idempotency_key=key)
        attempts = [
            persist(stage.client, stage.urls, ask, answers, first_url=number + place, until_s=until_s)
            for place in range(2)
        ]
        got = list(await asyncio.gather(*attempts))
        got.append(await persist(stage.client, stage.urls, ask, answers, first_url=number, until_s=until_s))
        if bad := [answer for answer in got if answer.status != 200 or not answer.is_whole]:
            broken.append(f"key {number}: {bad[0].status} {bad[0].code}")
        elif len({answer.text for answer in got}) > 1:
            broken.append(f"key {number}: two answers")

    async def without_key(number: int) -> None:
        ask = ClientRequest(
            plain.tenant_id, plain.key, stage.body(number, stream=True, max_tokens=40, ignore_eos=True)
        )
        for place in range(2):
            await persist(stage.client, stage.urls, ask, answers, first_url=number + place, until_s=until_s)

    await asyncio.gather(*map(one, range(KEYS)), *map(without_key, range(KEYS)))
    figures: dict[str, float] = {
        "replays": sum(answer.is_replay for answer in answers),
        "attempts": len(answers),
    }
    if not figures["replays"]:
        broken.append("nothing was replayed")
    return ScenarioEvidence([tenant, plain], answers, figures, broken)


async def slope(stage: ScenarioContext) -> ScenarioEvidence:
    """A limit of 100 output tokens a second with a burst of 10: how fast is the stream from token 50 on?"""
    tenant = await stage.house.tenant(
        stage.name, meter="output_tokens", amount=BURST_TOKENS, rate_per_s=RATE_PER_S
    )
    await stage.house.known(tenant)
    body = stage.body(0, stream=True, max_tokens=SLOPE_TOKENS, ignore_eos=True)
    answer = await ask_once(stage.client, stage.urls[0], ClientRequest(tenant.tenant_id, tenant.key, body))
    if not answer.is_whole or answer.delivered_tokens < SLOPE_TOKENS:
        raise ScenarioFailed(
            f"the stream ended after {answer.delivered_tokens} tokens: {answer.status} {answer.code}"
        )
    rate = tokens_per_s(answer.token_times_s, SLOPE_FROM)
    evidence = ScenarioEvidence([tenant], [answer], {"tokens_per_s": round(rate, 2)})
    if abs(rate / RATE_PER_S - 1) > SLOPE_WITHIN:
        evidence.broken.append(f"{rate:.1f} tokens/s, not {RATE_PER_S:g} +- {SLOPE_WITHIN:.0%}")
    return evidence


def scenarios(gateways: Sequence[int], concurrency: Sequence[int]) -> list[BudgetScenario]:
    """All of them, in the order in which they run: those with few gateways first."""
    found = [BudgetScenario("rate", 1, slope)]
    for count in sorted(set(gateways)):
        for clients in concurrency:
            for asks_max_tokens in (True, False):
                for streams in (True, False):
                    what = "max" if asks_max_tokens else "open"
                    name = f"burst-{clients}x{count}-{what}-{'stream' if streams else 'plain'}"
                    found.append(
                        BudgetScenario(
                            name, count, burst(clients, asks_max_tokens=asks_max_tokens, streams=streams)
                        )
                    )
        if count == min(max(gateways), 2):
            found += _others(count)
    if not any(scenario.name == "disconnects" for scenario in found):
        found += _others(2)
    return found


def _others(gateways: int) -> list[BudgetScenario]:
    count = max(2, gateways)
    return [
        BudgetScenario("disconnects", count, disconnects),
        BudgetScenario("retries", count, retries),
        BudgetScenario("kill-gateway", count, _then_restart(kill(_kill_gateway, _others_serve))),
        BudgetScenario("kill-engine", count, kill(_kill_engine, _engine_again)),
        BudgetScenario("kill-redis", count, kill(_kill_redis, _redis_again)),
        BudgetScenario("kill-postgres", count, kill(_kill_postgres, _postgres_again)),
        BudgetScenario("kill-both", count, _then_restart(kill(_kill_both, _engine_and_others))),
    ]
