"""Our plug-in in a real vLLM, through the gateway: shares, limits through kills, caches, texts, speed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.scheduling.compose.auto_slots import fair_pair
from ops.bench.common.attempts import ClientAttempt, ClientRequest, StreamsUnderWay, ask_once, persist
from ops.bench.common.http_client import LoadHttpClient
from ops.bench.common.load import CHATS, LoadClient, load_client
from ops.bench.common.report import Progress
from ops.bench.versus.ours import OurGateway, plugin_upstream, stock_upstream
from ops.bench.versus.phases import PATIENCE_S, Row, chat, delivered_tokens
from ops.bench.versus.stack import ServedStack, TenantTerms
from ops.bench.versus.vllm_server import PluginOptions, VllmOptions, VllmServer, vllm_server
from ops.sandbox.free_port import free_port

HEAVY_WEIGHT = 3.0
WINDOW_STEPS = 1_000
TOLERANCE = 0.01
SAMPLE_S = 0.1
LONG_TOKENS, SHORT_TOKENS = 1_900, 60
LIMITED = 1_600
LIMIT_CLIENTS = 50
LIMIT_TOKENS = 64
BLOCK_SIZE = ("--block-size", "32")
STREAMS_BEFORE_KILL = 6
RETRY_S = 20.0
FEW_BLOCKS = 120
LIMITS = ((None, ""), (FEW_BLOCKS, ""), (None, "gateway"), (None, "vllm"), (FEW_BLOCKS, "gateway"))
"""Blocks of KV memory (None: all), and what is killed."""
CACHED_WORDS = 400
TEXTS, TEXT_TOKENS = 24, 200
SCHEMA: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {
        "name": "item",
        "schema": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer"}},
            "required": ["name", "count"],
        },
    },
}
SPEED_S = 8.0


@dataclass(frozen=True, slots=True)
class SharesCase:
    """Two tenants of weights 1 and 3 that always have so many streams."""

    name: str
    light_streams: int
    heavy_streams: int
    slots: int
    places: int
    answer_tokens: int
    steps: int
    is_stock: bool = False
    tolerance: float | None = None
    """None: printed, not judged."""


SHARES = (
    SharesCase("32 + 32, long answers", 32, 32, 16, 96, LONG_TOKENS, 2_000, tolerance=TOLERANCE),
    SharesCase("64 + 64, long answers", 64, 64, 16, 160, LONG_TOKENS, 2_000, tolerance=TOLERANCE),
    SharesCase("32 + 32, short answers", 32, 32, 16, 96, SHORT_TOKENS, 2_000),
    SharesCase("32 + 8, short answers", 32, 8, 16, 96, SHORT_TOKENS, 2_000),
    SharesCase("stock, 32 + 32, long answers", 32, 32, 16, 16, LONG_TOKENS, 1_200, is_stock=True),
    SharesCase("stock, 32 + 32, short answers", 32, 32, 16, 16, SHORT_TOKENS, 1_200, is_stock=True),
)


@dataclass(frozen=True, slots=True)
class VllmBench:
    home: Path
    directory: Path
    progress: Progress

    def key_file(self) -> Path:
        path = self.directory / "plugin.key"
        if not path.exists():
            path.write_text(secrets.token_hex(32) + "\n", encoding="ascii")
            path.chmod(0o600)
        return path

    @contextlib.asynccontextmanager
    async def served(
        self, name: str, options: VllmOptions, *, most_sent: int, port: int | None = None
    ) -> AsyncIterator[tuple[VllmServer, ServedStack]]:
        """A server with our gateway before it; at most `most_sent` requests are sent to it at one time."""
        directory = self.directory / name
        async with vllm_server(self.home, directory, options, port=port) as server:
            upstream = stock_upstream(server.url)
            if options.plugin is not None:
                upstream = plugin_upstream(server.url, options.plugin.key_file)
            gateway = OurGateway(name, upstream | {"max_concurrent": most_sent})
            async with gateway.open(directory) as stack:
                yield server, stack

    def plugin(self, slots: int) -> PluginOptions:
        return PluginOptions(slots, self.key_file())


def endless(number: int, tokens: int) -> dict[str, Any]:
    """A chat of exactly so many tokens, whatever they are."""
    asked = [{"role": "user", "content": f"w{number} and on and on"}]
    return chat(asked, tokens) | {"ignore_eos": True}


async def shares(bench: VllmBench, rounds: int) -> list[Row]:
    """Tokens that arrive at two tenants through the gateway, in windows of a thousand steps."""
    rows = []
    for case in SHARES:
        bench.progress(case.name)
        rows.append(await _shares(bench, case))
        bench.progress(f"  {rows[-1]['ratio']:.3f}, furthest off {rows[-1]['furthest_off']:.2%}")
    return rows


async def _shares(bench: VllmBench, case: SharesCase) -> Row:
    options = VllmOptions(case.places, None if case.is_stock else bench.plugin(case.slots))
    name = "".join(letter if letter.isalnum() else "-" for letter in case.name)
    sent = case.slots if case.is_stock else case.places
    async with bench.served(name, options, most_sent=sent) as (_, stack):
        keys = [
            await stack.enrol(TenantTerms("light")),
            await stack.enrol(TenantTerms("heavy", HEAVY_WEIGHT)),
        ]
        bodies = [endless(number, case.answer_tokens) for number in range(case.light_streams)]
        url = f"{stack.url}{CHATS}"
        async with (
            load_client("light", url, keys[0], bodies, counts_tokens=True) as light,
            load_client("heavy", url, keys[1], bodies, counts_tokens=True) as heavy,
        ):
            return await _counted(case, light, heavy)


async def _counted(case: SharesCase, light: LoadClient, heavy: LoadClient) -> Row:
    busy, begun_s = 0.0, time.monotonic()
    await asyncio.gather(light.closed(case.light_streams), heavy.closed(case.heavy_streams))
    samples: list[tuple[int, int]] = []
    first_s: list[float] = []
    tokens = [0, 0]
    # The prompts, and a hundred steps after the last one.
    settled = case.slots * (100 + case.light_streams + case.heavy_streams)
    async with asyncio.timeout(600):
        while sum(tokens) < settled + case.steps * case.slots:
            await asyncio.sleep(SAMPLE_S)
            seen = await asyncio.gather(light.take(), heavy.take())
            tokens = [had + tenant.tokens for had, tenant in zip(tokens, seen, strict=True)]
            first_s += seen[0].ttfts_s + seen[1].ttfts_s
            if sum(tokens) >= settled:
                samples.append((tokens[0], tokens[1]))
                busy = max(busy, *(tenant.cpu_share for tenant in seen))
    took_s = time.monotonic() - begun_s
    await asyncio.gather(light.stop(), heavy.stop())
    ratio = (samples[-1][1] - samples[0][1]) / max(1, samples[-1][0] - samples[0][0])
    wanted = fluid_ratio(case.light_streams, case.heavy_streams, HEAVY_WEIGHT, case.slots)
    off = furthest_off(window_ratios(samples, WINDOW_STEPS * case.slots), wanted)
    return {
        "case": case.name,
        "tokens": list(samples[-1]),
        "ratio": ratio,
        "fluid_ratio": wanted,
        "furthest_off": off,
        "longest_first_token_s": max(first_s, default=0.0),
        "tokens_per_s": round(sum(tokens) / took_s),
        "client_cpu_share": busy,
        "ok": None if case.tolerance is None else off <= case.tolerance,
    }


Sample = tuple[int, int]
"""Tokens of the lighter and of the heavier tenant so far."""


def window_ratios(samples: Sequence[Sample], window_tokens: int) -> list[float]:
    """Heavier over lighter in each shortest run of samples with `window_tokens`; infinite over nothing."""
    ratios: list[float] = []
    last = 0
    for first, (light, heavy) in enumerate(samples):
        last = max(last, first)
        while last < len(samples) and sum(samples[last]) - light - heavy < window_tokens:
            last += 1
        if last == len(samples):
            break
        lighter = samples[last][0] - light
        ratios.append((samples[last][1] - heavy) / lighter if lighter else float("inf"))
    return ratios


def furthest_off(ratios: Sequence[float], wanted: float) -> float:
    """Largest deviation from `wanted`, as a part of it. Raises `ValueError` for no window."""
    if not ratios:
        raise ValueError("the measurement was shorter than one window")
    return max(abs(ratio / wanted - 1.0) for ratio in ratios)


def fluid_ratio(light_streams: int, heavy_streams: int, weight: float, slots: int) -> float:
    """Heavier over lighter by the fluid share: each stream takes one slot at most."""
    light, heavy = fair_pair(light_streams, heavy_streams, weight, slots)
    return heavy / light


async def limits(bench: VllmBench, rounds: int) -> list[Row]:
    """50 requests in one instant on a limit for two fifths of them, with kills in the middle."""
    rows = []
    for kv_blocks, killed in LIMITS:
        bench.progress(f"a hard limit: {kv_blocks or 'all'} blocks, kill -9 of {killed or 'nothing'}")
        rows.append(await _limit(bench, kv_blocks, killed))
        bench.progress(f"  {rows[-1]['delivered_tokens']} delivered, {rows[-1]['charged_tokens']} charged")
    return rows


async def _limit(bench: VllmBench, kv_blocks: int | None, killed: str) -> Row:
    """After the kill, if there is one, all ask (again) until they have an answer or the time is over."""
    name = f"limit-{kv_blocks or 'all'}-{killed or 'nothing'}"
    port = free_port()
    options = VllmOptions(96, bench.plugin(16), kv_blocks, BLOCK_SIZE)
    async with contextlib.AsyncExitStack() as closing:
        serving = contextlib.AsyncExitStack()
        await closing.enter_async_context(serving)
        server = await serving.enter_async_context(
            vllm_server(bench.home, bench.directory / name, options, port=port)
        )
        gateway = OurGateway(name, plugin_upstream(server.url, bench.key_file()))
        stack = await closing.enter_async_context(gateway.open(bench.directory / name))
        key = await stack.enrol(TenantTerms("limited", limit_tokens=LIMITED))
        client = LoadHttpClient(timeout_s=PATIENCE_S)
        closing.callback(client.close)
        asks = [ClientRequest("", key, endless(number, LIMIT_TOKENS)) for number in range(LIMIT_CLIENTS)]
        answers: list[ClientAttempt] = []
        if killed:
            streams = StreamsUnderWay(STREAMS_BEFORE_KILL)
            tasks = [asyncio.create_task(ask_once(client, stack.url, ask, streams.on_token)) for ask in asks]
            await streams.wait(PATIENCE_S)
            if killed == "gateway":
                await stack.kill()
                await stack.charged_tokens("limited")
            else:
                await server.kill()
                await serving.aclose()
                await closing.enter_async_context(
                    vllm_server(bench.home, bench.directory / name, options, port=port)
                )
            answers += await asyncio.gather(*tasks)
        until_s = time.monotonic() + RETRY_S
        await asyncio.gather(*(persist(client, [stack.url], ask, answers, until_s=until_s) for ask in asks))
        charged = await stack.charged_tokens("limited")
    used = delivered_tokens(answers)
    return {
        "case": f"{kv_blocks or 'all'} blocks, kill -9 of {killed or 'nothing'}",
        "limit": LIMITED,
        "delivered_tokens": used,
        "charged_tokens": charged,
        "overshoot_tokens": max(0, used - LIMITED, charged - LIMITED),
        "not_charged_tokens": max(0, used - charged),
        "ok": used <= LIMITED and charged <= LIMITED,
    }


async def caches(bench: VllmBench, rounds: int) -> list[Row]:
    """Cached tokens of a long prompt: its tenant's again, and another tenant's first."""
    bench.progress("prefix caches")
    options = VllmOptions(96, bench.plugin(16), arguments=("--enable-prompt-tokens-details",))
    async with bench.served("caches", options, most_sent=96) as (_, stack):
        keys = {name: await stack.enrol(TenantTerms(name)) for name in ("alpha", "beta")}
        words = " ".join(f"w{number}" for number in range(CACHED_WORDS))
        body = chat([{"role": "user", "content": words}], 1) | {"stream": False, "logprobs": False}
        del body["stream_options"]
        cached = {}
        client = LoadHttpClient(timeout_s=PATIENCE_S)
        try:
            asks = ("first", "alpha"), ("again", "alpha"), ("another", "beta"), ("its", "beta")
            for what, tenant in asks:
                headers = {"authorization": f"Bearer {keys[tenant]}"}
                async with client.post(f"{stack.url}{CHATS}", json.dumps(body).encode(), headers) as reply:
                    usage = json.loads(await reply.read())["usage"]
                cached[what] = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        finally:
            client.close()
    ok = cached["first"] == cached["another"] == 0 < min(cached["again"], cached["its"])
    return [{"prompt_tokens": usage["prompt_tokens"], "cached_tokens": cached, "ok": ok}]


async def texts(bench: VllmBench, rounds: int) -> list[Row]:
    """Greedy answers of stock vLLM with room, and with the plug-in where sequences are evicted: the same."""
    bench.progress("texts")
    asks = [
        endless(number, TEXT_TOKENS)
        if number % 2
        else chat([{"role": "user", "content": f"w{number}"}], TEXT_TOKENS) | {"response_format": SCHEMA}
        for number in range(TEXTS)
    ]
    plugin = bench.plugin(8)
    answers = {}
    for name, options in (
        ("stock", VllmOptions(TEXTS, None, None, BLOCK_SIZE)),
        ("plugin", VllmOptions(TEXTS, plugin, FEW_BLOCKS, BLOCK_SIZE)),
    ):
        async with bench.served(f"texts-{name}", options, most_sent=TEXTS) as (_, stack):
            key = await stack.enrol(TenantTerms("texts"))
            client = LoadHttpClient(timeout_s=PATIENCE_S)
            try:
                tasks = [ask_once(client, stack.url, ClientRequest("", key, ask)) for ask in asks]
                answers[name] = await asyncio.gather(*tasks)
            finally:
                client.close()
    equal = sum(
        ours.is_whole and ours.text == stock.text
        for ours, stock in zip(answers["plugin"], answers["stock"], strict=True)
    )
    return [{"case": f"{FEW_BLOCKS} blocks, half of the answers by a schema", "equal": equal, "of": TEXTS,
             "ok": equal == TEXTS}]  # fmt: skip


async def speed(bench: VllmBench, rounds: int) -> list[Row]:
    """Tokens a second without a gateway, stock and with the plug-in in turn: nothing scarce, and rotating."""
    speeds: dict[str, dict[str, list[float]]] = {}
    async with (
        vllm_server(bench.home, bench.directory / "speed-stock-16", VllmOptions(16)) as narrow,
        vllm_server(bench.home, bench.directory / "speed-plugin", VllmOptions(96, bench.plugin(16))) as ours,
    ):
        servers = {"stock": narrow.url, "plugin": ours.url}
        for number in range(rounds):
            order = list(servers) if number % 2 == 0 else list(reversed(servers))
            for what, streams in (("nothing scarce, 16 streams", 16), ("64 streams, 16 a step", 64)):
                for name in order:
                    per_s = await _speed(servers[name], streams)
                    speeds.setdefault(what, {}).setdefault(name, []).append(per_s)
            bench.progress(f"speed: round {number + 1} of {rounds}")
    return [
        {
            "case": what,
            "stock_tokens_per_s": statistics.median(by_name["stock"]),
            "plugin_tokens_per_s": statistics.median(by_name["plugin"]),
            "ratios": [
                round(ours / stock, 2)
                for ours, stock in zip(by_name["plugin"], by_name["stock"], strict=True)
            ],
        }
        for what, by_name in speeds.items()
    ]


async def _speed(url: str, streams: int) -> float:
    bodies = [endless(number, 400) for number in range(64)]
    async with load_client("speed", f"{url}{CHATS}", "none", bodies, counts_tokens=True) as client:
        await client.closed(streams)
        await asyncio.sleep(SPEED_S / 4)
        await client.take()
        begun_s = time.monotonic()
        await asyncio.sleep(SPEED_S)
        seen = await client.take()
        per_s = seen.tokens / (time.monotonic() - begun_s)
        await client.stop()
    return per_s
