"""Leases inside vLLM's decode: exact to the token, on a real server with our plug-in."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from engine.vllm_plugin.protocol import EXCHANGE_PATH, ContractClaims, Exchange, PluginReport, SequenceNews
from engine.vllm_plugin.signature import ChannelRefused, decode_report, encode_exchange, sign
from ops.bench.common.errors import CannotBench
from ops.bench.versus.phases import Row
from ops.bench.versus.plugin_parts import VllmBench
from ops.bench.versus.vllm_server import MODEL, PluginOptions, VllmOptions, vllm_server

PROMPT = "The queue of the gateway holds"
LEASE, WHOLE = 50, 200
MANY, MANY_LEASE, MANY_WHOLE = 48, 100, 400
SHORT_KV_BLOCKS = 120
GATEWAY_TIMEOUT_S = 10.0
SLOTS, PLACES = 16, 64
BLOCKS = ("--block-size", "32")
POLL_S = 0.02
WAIT_S = 120.0
REQUEST_TIMEOUT_S = 300.0


@dataclass
class StreamedAnswer:
    text: str = ""
    tokens: int = 0
    """Output tokens, by the server's running count."""
    finish: str | None = None


@dataclass
class LeaseClient:
    """One gateway, and the clients of its requests."""

    http: httpx.AsyncClient
    """Of the server, without `/v1`."""
    key: bytes
    gateway_id: str = "bench"
    session: str = field(default_factory=lambda: secrets.token_hex(8))

    def signed(self, sequence_id: str, lease_tokens: int, *, key: bytes | None = None, **fields: Any) -> str:
        """Claims of a request; `fields` as in `ContractClaims`."""
        given: dict[str, Any] = {"tenant_id": "acme", "issued_at_s": time.time()} | fields
        claims = ContractClaims(
            gateway_id=self.gateway_id,
            request_id=sequence_id,
            sequence_id=sequence_id,
            lease_tokens=lease_tokens,
            session=self.session,
            **given,
        )
        return sign(claims, key or self.key)

    async def stream(
        self, prompt: str, max_tokens: int, signature: str | None = None, into: StreamedAnswer | None = None
    ) -> StreamedAnswer:
        """A completion, greedy and to its end; `into` is filled meanwhile."""
        answer = into or StreamedAnswer()
        body: dict[str, Any] = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        if signature is not None:
            body["vllm_xargs"] = {"fairgate": signature}
        async with self.http.stream(
            "POST", "/v1/completions", json=body, timeout=REQUEST_TIMEOUT_S
        ) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")[:400]
                raise CannotBench(f"the server answers {response.status_code}: {text}")
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                answer.tokens = (chunk.get("usage") or {}).get("completion_tokens", answer.tokens)
                for choice in chunk["choices"]:
                    answer.text += choice["text"]
                    answer.finish = choice["finish_reason"] or answer.finish
        return answer

    async def exchange(self, **fields: Any) -> PluginReport:
        """One exchange over vLLM's HTTP. Raises `ChannelRefused`."""
        said = Exchange(
            gateway_id=self.gateway_id,
            nonce=secrets.token_hex(16),
            issued_at_s=time.time(),
            session=self.session,
            **fields,
        )
        response = await self.http.post(EXCHANGE_PATH, content=encode_exchange(said, self.key))
        return decode_report(response.content, self.key, said.nonce)

    async def until(
        self, is_so: Callable[[dict[str, SequenceNews]], bool], what: str
    ) -> dict[str, SequenceNews]:
        """Polls the news of all its sequences until `is_so`. Raises `CannotBench`."""
        deadline_s = time.monotonic() + WAIT_S
        while True:
            news = (await self.exchange()).sequences
            if is_so(news):
                return news
            if time.monotonic() > deadline_s:
                states = {name: (each.state, each.emitted_tokens) for name, each in list(news.items())[:8]}
                raise CannotBench(f"after {WAIT_S:g} s it is not so that {what}: {states}")
            await asyncio.sleep(POLL_S)


@dataclass(frozen=True, slots=True)
class LeaseCheck:
    name: str
    measured: object
    must_be: object

    def row(self) -> Row:
        return {
            "case": self.name,
            "measured": str(self.measured),
            "must_be": str(self.must_be),
            "ok": self.measured == self.must_be,
        }


async def rest_and_go_on(client: LeaseClient) -> list[LeaseCheck]:
    """A lease of 50 of 200 tokens: rests, is topped up twice with the same figure, ends."""
    whole = await client.stream(PROMPT, WHOLE)
    answer = StreamedAnswer()
    task = asyncio.create_task(client.stream(PROMPT, WHOLE, client.signed("s1", LEASE), answer))
    news = await client.until(lambda news: _is(news, "s1", "parked"), "s1 is parked")
    await _delivered(answer, news["s1"].emitted_tokens)
    checks = [LeaseCheck(f"lease of {LEASE} of {WHOLE}: rests at", answer.tokens, LEASE)]
    for _ in range(2):
        await client.exchange(top_ups={"s1": LEASE + 30})
    await client.until(
        lambda news: _is(news, "s1", "parked") and news["s1"].emitted_tokens > LEASE, "it rests again"
    )
    await _delivered(answer, LEASE + 30)
    checks.append(LeaseCheck("topped up to 80 twice: rests at", answer.tokens, LEASE + 30))
    await client.exchange(top_ups={"s1": WHOLE})
    await task
    checks.append(LeaseCheck("topped up to all: ends at", (answer.tokens, answer.finish), (WHOLE, "length")))
    checks.append(LeaseCheck("text equal to that without a lease", answer.text == whole.text, True))
    return checks


async def nothing_more(client: LeaseClient) -> list[LeaseCheck]:
    """The gateway has nothing more for a sequence that rests."""
    answer = StreamedAnswer()
    task = asyncio.create_task(client.stream(PROMPT, WHOLE, client.signed("s2", LEASE), answer))
    await client.until(lambda news: _is(news, "s2", "parked"), "s2 is parked")
    await client.exchange(cancels={"s2": "budget"})
    await task
    news = await client.until(lambda news: _is(news, "s2", "ended"), "s2 ended")
    outcome = news["s2"].outcome
    assert outcome is not None
    ended = (answer.tokens, answer.finish, outcome.finish, outcome.emitted_tokens)
    wanted = (LEASE, "length", "budget", LEASE)
    return [LeaseCheck("nothing more: tokens, finish, cause, reported", ended, wanted)]


async def forged(client: LeaseClient) -> list[LeaseCheck]:
    """Requests without a good signature, and a gateway with another key."""
    before = (await client.exchange()).refused_signatures
    good = client.signed("s3", 5)
    foreign = client.signed("s4", 5, key=secrets.token_bytes(32), weight=1000.0)
    old = client.signed("s5", 5, issued_at_s=time.time() - 120)
    await client.stream(PROMPT, 5, good)
    tries: list[str | None] = [good, foreign, old, good[:-6] + "AAAAAA", "nonsense", None]
    answers = [await client.stream(PROMPT, 20, signature) for signature in tries]
    report = await client.exchange()
    refused = {
        reason: count - before.get(reason, 0)
        for reason, count in report.refused_signatures.items()
        if count > before.get(reason, 0)
    }
    reported = sorted(name for name in report.sequences if name in ("s4", "s5"))
    foreign_gateway = LeaseClient(client.http, secrets.token_bytes(32), "foreign")
    try:
        await foreign_gateway.exchange(cancels={"s3": "failed"})
        code = "heard"
    except ChannelRefused as error:
        code = error.code
    expected = {"replayed": 1, "foreign": 2, "time": 1, "malformed": 1, "missing": 1}
    return [
        LeaseCheck("signatures that are not good, by reason", refused, expected),
        LeaseCheck(
            "answered as the default tenant", [answer.tokens for answer in answers], [20] * len(tries)
        ),
        LeaseCheck("reported for them to the gateway", reported, []),
        LeaseCheck("a gateway with another key", code, "signature"),
    ]


async def killed_client(client: LeaseClient) -> list[LeaseCheck]:
    """A client dies with `kill -9` while its sequence runs, another while it rests."""
    script = (
        "import sys, urllib.request as u\n"
        "r = u.urlopen(u.Request(sys.argv[1], sys.argv[2].encode(), {'Content-Type': 'application/json'}))\n"
        "for line in r: print(line, flush=True)\n"
    )
    processes = []
    for name, lease in (("s7", 20), ("s6", 2000)):
        body = {
            "model": MODEL, "prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True, "stream": True,
            "vllm_xargs": {"fairgate": client.signed(name, lease)},
        }  # fmt: skip
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, f"{client.http.base_url}/v1/completions", json.dumps(body),
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        processes.append(process)
        assert process.stdout is not None
        # Each event is a line and an empty one.
        for _ in range(2 * 20):
            await process.stdout.readline()
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
    news = await client.until(
        lambda news: _is(news, "s6", "ended") and _is(news, "s7", "ended"), "both ended"
    )
    ran, rested = news["s6"].outcome, news["s7"].outcome
    assert ran is not None
    assert rested is not None
    return [
        LeaseCheck("kill -9 of clients: outcomes", [ran.finish, rested.finish], ["cancelled"] * 2),
        LeaseCheck("reported of the one that rested", rested.emitted_tokens, 20),
        LeaseCheck("the one that ran was stopped", 20 <= ran.emitted_tokens < 1900, True),
    ]


async def silent_gateway(client: LeaseClient) -> list[LeaseCheck]:
    """A gateway falls silent with one sequence that rests and one that runs; the next one adopts them."""
    dead = LeaseClient(client.http, client.key, "dead")
    answers = [StreamedAnswer(), StreamedAnswer()]
    tasks = [
        asyncio.create_task(dead.stream(PROMPT, WHOLE, dead.signed(name, lease), answer))
        for name, lease, answer in (("s8", 20, answers[0]), ("s9", 150, answers[1]))
    ]
    await asyncio.gather(*tasks)
    heir = LeaseClient(client.http, client.key, "heir")
    news = (await heir.exchange(adopt=True)).sequences
    reported = {name: state.emitted_tokens for name, state in news.items() if name in ("s8", "s9")}
    cleared = (await heir.exchange(acknowledges=list(news))).sequences
    return [
        LeaseCheck(
            "silent gateway: tokens that clients had", [answer.tokens for answer in answers], [20, 150]
        ),
        LeaseCheck("reported to the one that adopts", reported, {"s8": 20, "s9": 150}),
        LeaseCheck("left after it was acknowledged", cleared, {}),
    ]


async def short_memory(client: LeaseClient) -> list[LeaseCheck]:
    """Many sequences, each with a lease of a quarter, where the KV memory does not hold all of them."""
    prompts = [f"{PROMPT} request {number}, and" for number in range(MANY)]
    whole = [(await client.stream(prompt, MANY_WHOLE)).text for prompt in prompts[:8]]
    answers = [StreamedAnswer() for _ in prompts]
    names = [f"m{number}" for number in range(MANY)]
    tasks = [
        asyncio.create_task(
            client.stream(prompt, MANY_WHOLE, client.signed(name, MANY_LEASE, tenant_id=name[:2]), answer)
        )
        for prompt, name, answer in zip(prompts, names, answers, strict=True)
    ]
    news = await client.until(
        lambda news: all(_is(news, name, "parked") for name in names), "all of them are parked"
    )
    for answer in answers:
        await _delivered(answer, MANY_LEASE)
    emitted = {state.emitted_tokens for state in news.values()}
    checks = [
        LeaseCheck(f"{MANY} leases of {MANY_LEASE}, {SHORT_KV_BLOCKS} blocks: tokens", emitted, {MANY_LEASE}),
        LeaseCheck("what their clients have", {answer.tokens for answer in answers}, {MANY_LEASE}),
    ]
    await client.exchange(top_ups=dict.fromkeys(names, MANY_WHOLE))
    await asyncio.gather(*tasks)
    news = await client.until(lambda news: all(_is(news, name, "ended") for name in names), "all ended")
    outcomes = [state.outcome for state in news.values() if state.outcome is not None]
    evictions = sum(state.preemptions for state in outcomes)
    return [
        *checks,
        LeaseCheck("topped up: tokens", {state.emitted_tokens for state in outcomes}, {MANY_WHOLE}),
        LeaseCheck("evictions took place", evictions > 0, True),
        LeaseCheck("texts equal", [answer.text for answer in answers[:8]] == whole, True),
    ]


def _is(news: Mapping[str, SequenceNews], name: str, state: str) -> bool:
    return name in news and news[name].state == state


async def _delivered(answer: StreamedAnswer, tokens: int) -> None:
    """Waits, at most 20 s, until the client has all tokens that the server states as emitted."""
    async with asyncio.timeout(20):
        while answer.tokens < tokens:  # noqa: ASYNC110 (another process sends)
            await asyncio.sleep(0.01)


Checks = Callable[[LeaseClient], Awaitable[list[LeaseCheck]]]
WITH_ROOM: tuple[Checks, ...] = (rest_and_go_on, nothing_more, forged, killed_client, silent_gateway)


async def leases(bench: VllmBench, rounds: int) -> list[Row]:
    plugin = PluginOptions(SLOTS, bench.key_file(), gateway_timeout_s=GATEWAY_TIMEOUT_S)
    key = bench.key_file().read_bytes().strip()
    rows: list[Row] = []
    for blocks, checks in ((None, WITH_ROOM), (SHORT_KV_BLOCKS, (short_memory,))):
        options = VllmOptions(PLACES, plugin, blocks, BLOCKS)
        limits = httpx.Limits(max_connections=256)
        async with (
            vllm_server(bench.home, bench.directory / f"leases-{blocks}", options) as server,
            httpx.AsyncClient(base_url=server.url, timeout=WAIT_S, limits=limits) as http,
        ):
            client = LeaseClient(http, key)
            for check in checks:
                rows += [figure.row() for figure in await check(client)]
            is_in_log = key in await asyncio.to_thread(server.log.read_bytes)
            rows.append(LeaseCheck("the key is in the server's log", is_in_log, False).row())
    return rows
