"""Scenarios of the budget benchmark: bursts, kill -9 of every process, clients that leave or retry."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from ops.bench.budgets.testbed import BudgetTenant, ScenarioFailed, Testbed
from ops.bench.common.attempts import (
    ClientAttempt,
    ClientRequest,
    StreamsUnderWay,
    ask_once,
    persist,
    tokens_per_s,
)
from ops.bench.common.http_client import LoadHttpClient
from ops.bench.common.load import admin_call
from ops.demo.prompts.prompts import chats_of
from ops.sandbox.services import Service
from ops.settings.settings import SHIPPED_MODEL

OUTPUT = "output_tokens"
QUESTIONS = 40
SEED = 4
PROMPT_TOKENS = 32
ANSWER_TOKENS = (6, 10, 16, 24, 36, 52, 76, 110)
"""Wished for in turn: a few long answers among many short ones, as in most traces."""
PATIENCE_S = 30.0
MAX_TOKENS = 128
"""`max_tokens` of bursts that set it: more than any of the answers has."""
SHARE = {50: 0.4, 500: 0.15}
"""A burst's budget over the tokens of all its answers, by concurrency."""
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
LOAD_CLIENTS = 96
"""Streams that run and wait when their tenant is suspended: more than the engine runs at once."""


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
    testbed: Testbed
    client: LoadHttpClient
    questions: Sequence[Question]
    name: str
    """Prefix of its tenants' names."""
    gateways: int

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self.testbed.servers[: self.gateways]]

    def ask(self, tenant: BudgetTenant, number: int, **fields: Any) -> ClientRequest:
        question = self.questions[number % len(self.questions)]
        body = {"model": self.testbed.model, "messages": question.messages, "temperature": 0}
        return ClientRequest(tenant.tenant_id, tenant.key, body | fields)

    async def tenant(self, suffix: str = "", amount: int = 100_000, meter: str = OUTPUT) -> BudgetTenant:
        """A tenant with a lifetime budget, known to all gateways."""
        name = f"{self.name}{suffix}"
        tenant = await self.testbed.tenant(name, meter=meter, amount=amount, window="lifetime")
        await self.testbed.known(tenant)
        return tenant

    async def persist(
        self, ask: ClientRequest, answers: list[ClientAttempt], first_url: int, until_s: float,
        on_token: Callable[[ClientAttempt], None] | None = None,
    ) -> ClientAttempt:  # fmt: skip
        return await persist(
            self.client, self.urls, ask, answers, first_url=first_url, until_s=until_s, on_token=on_token
        )


@dataclass
class ScenarioEvidence:
    """Evidence for the audit, and figures of the scenario's own."""

    tenants: list[BudgetTenant]
    answers: list[ClientAttempt]
    figures: dict[str, float] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    after: Callable[[], Awaitable[None]] | None = None


Run = Callable[[ScenarioContext], Awaitable[ScenarioEvidence]]


@dataclass(frozen=True, slots=True)
class BudgetScenario:
    name: str
    gateways: int
    run: Run


def question_chats() -> list[list[dict[str, str]]]:
    lengths = [(PROMPT_TOKENS, ANSWER_TOKENS[number % len(ANSWER_TOKENS)]) for number in range(QUESTIONS)]
    return chats_of(SHIPPED_MODEL, SEED, lengths)


async def questions(testbed: Testbed, client: LoadHttpClient) -> list[Question]:
    """Asks every question once without a limit, to measure the lengths of the answers."""
    tenant = await testbed.tenant("lengths")
    await testbed.known(tenant)

    async def measure(messages: list[dict[str, str]]) -> Question:
        body = {"model": testbed.model, "messages": messages, "temperature": 0, "max_tokens": 300}
        answer = await ask_once(
            client, testbed.servers[0].url, ClientRequest(tenant.tenant_id, tenant.key, body)
        )
        if answer.status != 200 or answer.finish != "stop":
            raise ScenarioFailed(
                f"a question was not answered: {answer.status} {answer.code} {answer.finish}"
            )
        return Question(messages, answer.prompt_tokens, answer.delivered_tokens)

    return await asyncio.gather(*map(measure, await asyncio.to_thread(question_chats)))


def burst(concurrency: int, *, asks_max_tokens: bool, streams: bool) -> Run:
    """`concurrency` simultaneous requests on one budget that is enough for a part of them."""

    async def run(context: ScenarioContext) -> ScenarioEvidence:
        wanted = [context.questions[number % len(context.questions)] for number in range(concurrency)]
        demand = sum(question.total_tokens for question in wanted)
        amount = int(demand * SHARE.get(concurrency, 0.3))
        tenant = await context.tenant(amount=amount, meter="total_tokens")
        fields = {"stream": streams} | ({"max_tokens": MAX_TOKENS} if asks_max_tokens else {})
        answers: list[ClientAttempt] = []
        begun_s = time.monotonic()
        asks = [context.ask(tenant, number, **fields) for number in range(concurrency)]
        await asyncio.gather(
            *(context.persist(ask, answers, number, begun_s + PATIENCE_S) for number, ask in enumerate(asks))
        )
        took_s = time.monotonic() - begun_s
        evidence = ScenarioEvidence([tenant], answers)
        return judged_burst(evidence, amount, demand, took_s, must=not asks_max_tokens)

    return run


def judged_burst(
    evidence: ScenarioEvidence, amount: int, demand: int, seconds: float, *, must: bool
) -> ScenarioEvidence:
    """`admitted_of_admissible`: delivered tokens (prompts included) over those that the budget allows, given
    the lengths of the answers; `admitted_at_once`: of first attempts alone."""
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


def kill(hit: Callable[[Testbed], Awaitable[None]], restart: Callable[[Testbed], Awaitable[None]]) -> Run:
    """Two tenants stream and wait for whole answers; in the middle `hit` kills."""

    async def run(context: ScenarioContext) -> ScenarioEvidence:
        demand = KILL_CLIENTS // 2 * KILL_TOKENS
        tight = await context.tenant("-tight", demand // 2)
        wide = await context.tenant("-wide", demand * 3)
        answers: list[ClientAttempt] = []
        streams = StreamsUnderWay(STREAMS_BEFORE_KILL, TOKENS_BEFORE_KILL)
        until_s = time.monotonic() + PATIENCE_S
        clients = []
        for number in range(KILL_CLIENTS):
            has_stream = number // 2 % 3 > 0
            ask = context.ask(
                (tight, wide)[number % 2], number, stream=has_stream, max_tokens=KILL_TOKENS, ignore_eos=True
            )
            asking = context.persist(ask, answers, number // 6, until_s, streams.on_token)
            clients.append(asyncio.create_task(asking))
        try:
            await streams.wait(PATIENCE_S)
            await hit(context.testbed)
            killed_s = time.monotonic()
            await restart(context.testbed)
            serving_s = await _serving_again(context, wide, answers) - killed_s
            await asyncio.gather(*clients)
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
        evidence = ScenarioEvidence([tight, wide], answers)
        begun = [answer.is_whole and not answer.code for answer in answers if answer.status in (0, 200)]
        evidence.figures |= {
            "served": sum(begun),
            "cut": len(begun) - sum(begun),
            "refused": sum(answer.status >= 400 for answer in answers),
            "serving_again_s": round(serving_s, 1),
        }
        return evidence

    return run


async def _serving_again(
    context: ScenarioContext, tenant: BudgetTenant, answers: list[ClientAttempt]
) -> float:
    """Monotonic time when every live gateway has answered a request again."""
    alive = [server.url for server in context.testbed.servers if server.process.returncode is None]
    ask = context.ask(tenant, 0, max_tokens=1)
    until_s = time.monotonic() + PATIENCE_S
    for url in alive:
        last = await persist(context.client, [url], ask, answers, until_s=until_s)
        if last.status != 200:
            raise ScenarioFailed(f"{url} does not serve again: {last.status} {last.code}")
    return time.monotonic()


async def _others_serve(testbed: Testbed) -> None:
    await testbed.ready([number for number in range(len(testbed.servers)) if number])


async def _engine_again(testbed: Testbed) -> None:
    await testbed.start_engine()
    await testbed.ready()


async def _kill_both(testbed: Testbed) -> None:
    assert testbed.engine is not None
    testbed.engine.kill()
    testbed.servers[0].process.kill()
    await asyncio.gather(testbed.kill_engine(), testbed.kill_gateway(0))


async def _engine_and_others(testbed: Testbed) -> None:
    await testbed.start_engine()
    await _others_serve(testbed)


def kill_service(of: Callable[[Testbed], Service]) -> Run:
    async def hit(testbed: Testbed) -> None:
        of(testbed).kill()

    async def restart(testbed: Testbed) -> None:
        of(testbed).start()
        await testbed.ready()

    return kill(hit, restart)


def _then_restart(run: Run) -> Run:
    """The killed gateway restarts after the audit: until then the others settle its requests."""

    async def with_restart(context: ScenarioContext) -> ScenarioEvidence:
        async def after() -> None:
            await context.testbed.restart_gateway(0)
            await context.testbed.ready()

        try:
            evidence = await run(context)
        except BaseException:
            await after()
            raise
        evidence.after = after
        return evidence

    return with_restart


async def disconnects(context: ScenarioContext) -> ScenarioEvidence:
    """Clients that leave; each is a tenant of its own, so that the engine's count of its tokens is exact."""
    tenants = [await context.tenant(f"-{number}") for number in range(LEAVERS)]
    answers: list[ClientAttempt] = []

    async def leave(number: int, tenant: BudgetTenant) -> None:
        streams = number % 4 != 3
        ask = replace(
            context.ask(tenant, number, stream=streams, max_tokens=600, ignore_eos=True),
            leave_after_tokens=1 + 5 * number if streams else None,
            leave_after_s=None if streams else 0.2 + 0.02 * number,
        )
        answers.append(await ask_once(context.client, context.urls[number % len(context.urls)], ask))

    await asyncio.gather(*(leave(number, tenant) for number, tenant in enumerate(tenants)))
    evidence = ScenarioEvidence(tenants, answers, {"left": sum(answer.has_left for answer in answers)})
    if evidence.figures["left"] < LEAVERS:
        evidence.broken.append(f"only {evidence.figures['left']} of {LEAVERS} clients left in the middle")
    return evidence


async def retries(context: ScenarioContext) -> ScenarioEvidence:
    """Attempts under one Idempotency-Key: one run, one charge, the same answer. And the same without keys."""
    tenant, plain = await context.tenant(), await context.tenant("-plain")
    answers: list[ClientAttempt] = []
    until_s = time.monotonic() + PATIENCE_S
    broken: list[str] = []

    async def one(number: int) -> None:
        ask = replace(
            context.ask(tenant, number, stream=number % 2 == 0, max_tokens=120, ignore_eos=True),
            idempotency_key=f"{context.name}-{number}",
        )
        if number % 4 == 0:
            leaver = replace(ask, leave_after_tokens=4)
            answers.append(await ask_once(context.client, context.urls[0], leaver))
        attempts = [context.persist(ask, answers, number + place, until_s) for place in range(2)]
        got = list(await asyncio.gather(*attempts))
        got.append(await context.persist(ask, answers, number, until_s))
        if bad := [answer for answer in got if answer.status != 200 or not answer.is_whole]:
            broken.append(f"key {number}: {bad[0].status} {bad[0].code}")
        elif len({answer.text for answer in got}) > 1:
            broken.append(f"key {number}: two answers")

    async def without_key(number: int) -> None:
        ask = context.ask(plain, number, stream=True, max_tokens=40, ignore_eos=True)
        for place in range(2):
            await context.persist(ask, answers, number + place, until_s)

    await asyncio.gather(*map(one, range(KEYS)), *map(without_key, range(KEYS)))
    figures: dict[str, float] = {
        "replays": sum(answer.is_replay for answer in answers),
        "attempts": len(answers),
    }
    if not figures["replays"]:
        broken.append("nothing was replayed")
    return ScenarioEvidence([tenant, plain], answers, figures, broken)


async def slope(context: ScenarioContext) -> ScenarioEvidence:
    """Rate of a stream from token 50 on, under a limit of 100 output tokens a second with a burst of 10."""
    tenant = await context.testbed.tenant(
        context.name, meter=OUTPUT, amount=BURST_TOKENS, rate_per_s=RATE_PER_S
    )
    await context.testbed.known(tenant)
    ask = context.ask(tenant, 0, stream=True, max_tokens=SLOPE_TOKENS, ignore_eos=True)
    answer = await ask_once(context.client, context.urls[0], ask)
    if not answer.is_whole or answer.delivered_tokens < SLOPE_TOKENS:
        raise ScenarioFailed(
            f"the stream ended after {answer.delivered_tokens} tokens: {answer.status} {answer.code}"
        )
    rate = tokens_per_s(answer.token_times_s, SLOPE_FROM)
    evidence = ScenarioEvidence([tenant], [answer], {"tokens_per_s": round(rate, 2)})
    if abs(rate / RATE_PER_S - 1) > SLOPE_WITHIN:
        evidence.broken.append(f"{rate:.1f} tokens/s, not {RATE_PER_S:g} +- {SLOPE_WITHIN:.0%}")
    return evidence


async def suspension_under_load(context: ScenarioContext) -> ScenarioEvidence:
    tenant = await context.tenant()
    streams = StreamsUnderWay()
    clients = []
    for number in range(LOAD_CLIENTS):
        ask = context.ask(tenant, number, stream=True, max_tokens=KILL_TOKENS, ignore_eos=True)
        url = context.urls[number % len(context.urls)]
        clients.append(asyncio.create_task(ask_once(context.client, url, ask, streams.on_token)))
    try:
        await streams.wait(PATIENCE_S)
    except TimeoutError:
        for client in clients:
            client.cancel()
        raise
    async with context.testbed.servers[0].operator() as operator:
        await admin_call(operator, "POST", f"tenants/{tenant.name}/suspend", {"now": True})
    suspended_s = time.monotonic()
    after = [await ask_once(context.client, url, context.ask(tenant, 0)) for url in context.urls]
    answers = await asyncio.gather(*clients)
    ended = sum(answer.code == "tenant_suspended" for answer in answers)
    evidence = ScenarioEvidence([tenant], [*answers, *after])
    evidence.figures = {"ended": ended, "ended_within_s": round(time.monotonic() - suspended_s, 1)}
    if ended < LOAD_CLIENTS:
        evidence.broken.append(f"{LOAD_CLIENTS - ended} of {LOAD_CLIENTS} streams did not end with it")
    if admitted := [answer for answer in after if answer.status != 403]:
        evidence.broken.append(f"{len(admitted)} gateways still admit: {admitted[0].status}")
    return evidence


def scenarios(gateways: Sequence[int], concurrency: Sequence[int]) -> list[BudgetScenario]:
    rows = [BudgetScenario("rate", 1, slope)]
    for count in sorted(set(gateways)):
        for clients, asks_max_tokens, streams in product(concurrency, (True, False), (True, False)):
            kind = f"{'max' if asks_max_tokens else 'open'}-{'stream' if streams else 'plain'}"
            run = burst(clients, asks_max_tokens=asks_max_tokens, streams=streams)
            rows.append(BudgetScenario(f"burst-{clients}x{count}-{kind}", count, run))
        if count == min(max(gateways), 2):
            rows += _others(count)
    rows.append(BudgetScenario("suspension-under-load", max(2, *gateways), suspension_under_load))
    if not any(scenario.name == "disconnects" for scenario in rows):
        rows += _others(2)
    return rows


def _others(gateways: int) -> list[BudgetScenario]:
    runs = {
        "disconnects": disconnects,
        "retries": retries,
        "kill-gateway": _then_restart(kill(lambda testbed: testbed.kill_gateway(0), _others_serve)),
        "kill-engine": kill(Testbed.kill_engine, _engine_again),
        "kill-redis": kill_service(lambda testbed: testbed.redis),
        "kill-postgres": kill_service(lambda testbed: testbed.postgres),
        "kill-both": _then_restart(kill(_kill_both, _engine_and_others)),
    }
    return [BudgetScenario(name, max(2, gateways), run) for name, run in runs.items()]
