"""The measurements of one stack in one round: a flood, weights, a hard limit, a killed gateway.

Clients are the same for all stacks, and count tokens from the log probabilities that come with them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from ops.bench.common.attempts import ClientAttempt, ClientRequest, StreamsUnderWay, ask_once
from ops.bench.common.errors import CannotBench
from ops.bench.common.http_client import LoadHttpClient
from ops.bench.common.load import CHATS, LoadClient, load_client
from ops.bench.common.load_client import Observed
from ops.bench.common.report import Progress
from ops.bench.gateway.process import cpu_s, process_tree
from ops.bench.versus.figures import busy_share
from ops.bench.versus.stack import SLOTS, Contestant, ServedStack, TenantTerms
from ops.bench.versus.vllm_server import MODEL
from ops.demo.prompts.prompts import chats_of
from ops.reporting import quantile
from ops.sandbox.core_use import core_use
from ops.settings.settings import SHIPPED_MODEL

FLOOD_STREAMS = 32
FLOOD_TOKENS = 200
"""Longer answers are full of tokens without text, which some gateways drop and which could not be counted."""
MOST_TOKENS = 320
QUIET_TOKENS = 8
PROMPT_TOKENS = 24
QUIET_PER_S = 5.0
MOST_OPEN = 200
FIRST_REQUESTS = 10
"""Of a fresh gateway: they are slow, and not counted."""
FILL_S = 4.0
"""Time for a flood to fill all places."""
HEAVY_WEIGHT = 3.0
WEIGHTS_STREAMS = 32
WEIGHTS_TOKENS = 200
WARM_UP_S = 8.0
LIMIT_CLIENTS = 50
LIMIT_TOKENS = 128
LIMITED = 1_600
"""About two fifths of what the burst asks for."""
KILL_STREAMS = 8
KILL_TOKENS = 290
TOKENS_BEFORE_KILL = 40
KILL_LIMIT = 100_000
PATIENCE_S = 60.0
BODIES = 64

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PhaseSizes:
    quiet_requests: int = 75
    weights_s: float = 20.0


def chat(messages: Sequence[dict[str, str]], max_tokens: int | None) -> dict[str, Any]:
    """A streamed chat whose tokens are counted as they come."""
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": messages,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
    }
    return body if max_tokens is None else body | {"max_tokens": max_tokens}


def bodies(seed: int, answer_tokens: int, count: int = BODIES) -> list[dict[str, Any]]:
    chats = chats_of(SHIPPED_MODEL, seed, [(PROMPT_TOKENS, answer_tokens)] * count)
    return [chat(messages, MOST_TOKENS) for messages in chats]


class StackPhases:
    def __init__(
        self, contestant: Contestant, stack: ServedStack, sizes: PhaseSizes, questions: Sequence[Any],
        progress: Progress,
    ) -> None:  # fmt: skip
        self._progress = progress
        self._contestant = contestant
        self._stack = stack
        self._sizes = sizes
        self._questions = questions
        self._busy: dict[str, float] = {}
        """By phase, the largest share of any client."""
        self._bodies = {
            "quiet": bodies(1, QUIET_TOKENS),
            "flood": bodies(2, FLOOD_TOKENS),
            "light": bodies(3, WEIGHTS_TOKENS),
            "heavy": bodies(4, WEIGHTS_TOKENS),
        }
        self._tokens_per_s = 0.0

    async def run(self, number: int) -> Row:
        """All phases; `number` of the round makes the tenants' names. Raises `CannotBench`."""
        row = await self.flood(f"{number}") | await self.weights(f"{number}")
        if not self._contestant.is_fair_by_itself:
            self._progress("with fixed limits")
            fixed = await self.flood(f"{number}f", most_parallel=SLOTS - 1, alone_s=row["alone_s"])
            fixed |= await self.weights(f"{number}f", is_fixed=True)
            row |= {f"fixed_{key}": value for key, value in fixed.items()}
        row |= await self.limit(number) | await self.kill(number)
        return row | {"client_busy": dict(self._busy)}

    async def flood(
        self, names: str, *, most_parallel: int | None = None, alone_s: dict[str, float] | None = None
    ) -> Row:
        """First tokens of a quiet tenant, alone and beside a flood; and whether one can be explained."""
        self._progress("a flood")
        quiet_key = await self._stack.enrol(TenantTerms(f"quiet{names}", most_parallel=most_parallel))
        flood_key = await self._stack.enrol(TenantTerms(f"flood{names}", most_parallel=most_parallel))
        url = f"{self._stack.url}{CHATS}"
        async with (
            load_client("quiet", url, quiet_key, self._bodies["quiet"], counts_tokens=True) as quiet,
            load_client("flood", url, flood_key, self._bodies["flood"], counts_tokens=True) as flood,
        ):
            await self._quiet(quiet, FIRST_REQUESTS)
            if alone_s is None:
                alone_s = _percentiles(await self._quiet(quiet, self._sizes.quiet_requests))
            await flood.closed(FLOOD_STREAMS)
            await asyncio.sleep(FILL_S)
            await flood.take()
            begun_s, gateway_s = time.monotonic(), cpu_s(process_tree(self._stack.pid))
            async with self._watched("flood", quiet, flood):
                beside = await self._quiet(quiet, self._sizes.quiet_requests)
            took_s = time.monotonic() - begun_s
            gateway_s = cpu_s(process_tree(self._stack.pid)) - gateway_s
            seen = await flood.take()
            why = await self._why(quiet_key)
            await flood.stop()
        # Prompts count as well, where limits are made of it.
        prompts = (seen.finished + beside.finished) * PROMPT_TOKENS
        self._tokens_per_s = (seen.tokens + beside.tokens + prompts) / took_s
        return {
            "flood_ratio": quantile(beside.ttfts_s, 0.99) / alone_s["p99"],
            "alone_s": alone_s,
            "beside_s": _percentiles(beside),
            "quiet_answers": len(beside.ttfts_s),
            "quiet_refused": beside.refused,
            "flood_refused": seen.refused,
            "flood_tokens_per_s": round((seen.tokens + beside.tokens) / took_s),
            "gateway_cores": round(gateway_s / took_s, 2),
            "why": why,
        }

    async def _quiet(self, client: LoadClient, count: int) -> Observed:
        await client.poisson(QUIET_PER_S, count=count, most_open=MOST_OPEN)
        seen = await client.finish()
        if not seen.ttfts_s:
            raise CannotBench(
                f"{self._contestant.name}: the quiet tenant had no answer ({seen.refused} refused)"
            )
        return seen

    async def _why(self, key: str) -> str | None:
        ask = chat([{"role": "user", "content": "Count from 3 to 9."}], MOST_TOKENS)
        about = {"authorization": f"Bearer {key}"}
        try:
            async with httpx.AsyncClient(timeout=PATIENCE_S, headers=about) as client:
                answer = await client.post(f"{self._stack.url}{CHATS}", json=ask)
        except httpx.HTTPError as error:
            raise CannotBench(f"{self._contestant.name}: no answer to explain: {error!r}") from None
        return await self._stack.why(answer.headers, key)

    async def weights(self, names: str, *, is_fixed: bool = False) -> Row:
        """Tokens delivered to weights 1 and 3. `is_fixed`: each key has a limit of tokens in that ratio."""
        self._progress("weights")
        url = f"{self._stack.url}{CHATS}"
        keys = {}
        for tenant, weight in (("light", 1.0), ("heavy", HEAVY_WEIGHT)):
            share, window_s = weight / (1 + HEAVY_WEIGHT), self._contestant.limit_window_s
            limit = fixed_share(self._tokens_per_s, share, window_s) if is_fixed else None
            keys[tenant] = await self._stack.enrol(TenantTerms(f"{tenant}{names}", weight, limit))
        async with (
            load_client("light", url, keys["light"], self._bodies["light"], counts_tokens=True) as light,
            load_client("heavy", url, keys["heavy"], self._bodies["heavy"], counts_tokens=True) as heavy,
        ):
            await asyncio.gather(light.closed(WEIGHTS_STREAMS), heavy.closed(WEIGHTS_STREAMS))
            await asyncio.sleep(WARM_UP_S)
            await asyncio.gather(light.take(), heavy.take())
            async with self._watched("weights", light, heavy):
                await asyncio.sleep(self._sizes.weights_s)
                seen = await asyncio.gather(light.take(), heavy.take())
            await asyncio.gather(light.stop(), heavy.stop())
        return {
            # A tenant that had nothing counts as one that had a token: the ratio is at least this.
            "weights_ratio": seen[1].tokens / max(1, seen[0].tokens),
            "weights_tokens": [tenant.tokens for tenant in seen],
            "weights_tokens_per_s": round(sum(tenant.tokens for tenant in seen) / self._sizes.weights_s),
            "weights_refused": sum(tenant.refused for tenant in seen),
        }

    async def limit(self, number: int) -> Row:
        """Tokens beyond a hard limit after 50 requests in one instant, with `max_tokens` and without."""
        self._progress("a hard limit")
        asked = [self._questions[place % len(self._questions)] for place in range(LIMIT_CLIENTS)]
        bounded = await self._burst(f"told{number}", [chat(messages, LIMIT_TOKENS) for messages in asked])
        unbounded = await self._burst(f"open{number}", [chat(messages, None) for messages in asked])
        return {
            "overshoot_tokens": bounded["over"] + unbounded["over"],
            "limit_bursts": {"max_tokens": bounded, "open": unbounded},
        }

    async def _burst(self, tenant: str, asks: Sequence[dict[str, Any]]) -> Row:
        key = await self._stack.enrol(TenantTerms(tenant, limit_tokens=LIMITED))
        client = LoadHttpClient(timeout_s=PATIENCE_S)
        try:
            answers = await asyncio.gather(
                *(ask_once(client, self._stack.url, ClientRequest(tenant, key, ask)) for ask in asks)
            )
        finally:
            client.close()
        used = delivered_tokens(answers)
        return {
            "over": max(0, used - LIMITED),
            "used_of_limit": round(used / LIMITED, 3),
            "served": sum(answer.status == 200 for answer in answers),
            "refused": sum(answer.status == 429 for answer in answers),
            "failed": sum(answer.status not in (200, 429) for answer in answers),
        }

    async def kill(self, number: int) -> Row:
        """Tokens that clients have and that are on no bill, after the gateway was killed under them."""
        self._progress("kill -9")
        tenant = f"killed{number}"
        key = await self._stack.enrol(TenantTerms(tenant, limit_tokens=KILL_LIMIT))
        client = LoadHttpClient(timeout_s=PATIENCE_S)
        streams = StreamsUnderWay(KILL_STREAMS, TOKENS_BEFORE_KILL)
        asks = [ClientRequest(tenant, key, body) for body in bodies(5, KILL_TOKENS, KILL_STREAMS)]
        asking = [
            asyncio.create_task(ask_once(client, self._stack.url, ask, streams.on_token)) for ask in asks
        ]
        try:
            await streams.wait(PATIENCE_S)
            await self._stack.kill()
            answers = await asyncio.gather(*asking)
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            client.close()
        delivered = delivered_tokens(answers)
        charged = await self._stack.charged_tokens(tenant)
        return {
            "kill_delivered_tokens": delivered,
            "kill_charged_tokens": charged,
            "uncharged_tokens": max(0, delivered - charged),
        }

    @asynccontextmanager
    async def _watched(self, phase: str, *clients: LoadClient) -> AsyncIterator[None]:
        before = [core_use(client.pid, time.monotonic()) for client in clients]
        yield
        for client, first in zip(clients, before, strict=True):
            last = core_use(client.pid, time.monotonic())
            if first is not None and last is not None:
                self._busy[phase] = max(self._busy.get(phase, 0.0), busy_share(first, last))


def _percentiles(seen: Observed) -> dict[str, float]:
    return {f"p{round(100 * share)}": quantile(seen.ttfts_s, share) for share in (0.5, 0.99)}


def delivered_tokens(answers: Sequence[ClientAttempt]) -> int:
    """Output tokens that arrived, and the prompts of whole answers."""
    served = [answer for answer in answers if answer.status == 200]
    return sum(answer.delivered_tokens + answer.prompt_tokens for answer in served)


def fixed_share(tokens_per_s: float, share: float, window_s: float) -> int:
    return max(1, int(tokens_per_s * share * window_s))
