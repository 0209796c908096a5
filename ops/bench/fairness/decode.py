"""Token-fair decoding of a running server, counted from its log of steps.

- `turns`: decode tokens of weights 1 and 3, 64 sequences, by default and with half as many slots as places;
  the control is `decode-first`: 1:1.
- `prompts`: prompts of 1,500 tokens without end beside short chats, equal weights.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from ops.bench.common.load import Bench, BenchTenant, LoadClient, admin_call, fresh_bench, load_clients
from ops.reporting import Check, Report, quantile
from ops.sandbox import step_shares
from ops.sandbox.server import ServerFailed, until
from ops.sandbox.step_shares import Step

LIGHT, HEAVY, LONG, SHORT = "light", "heavy", "long", "short"
HEAVY_WEIGHT = 3.0
SEQUENCES = 64
SLOTS = SEQUENCES // 2
WINDOW_STEPS = 1_000
SETTLE_STEPS = 100
CONTROL_STEPS = 1_200
"""Without turns an answer ends after as many steps as it has tokens."""
TOLERANCE, DEFAULT_TOLERANCE = 0.01, 0.03
LEAST_KEPT = 0.88
"""Of the throughput with a token for each sequence in each step."""
ANSWER_TOKENS = 1_900
"""More than a sequence gets while it is measured."""
KV_BLOCKS = 9_000
LONG_PROMPT_TOKENS = 1_500
LONG_CONNECTIONS, SHORT_CONNECTIONS = 4, 4
MEASURED_S = 20.0
READ_S = 0.5
LIMIT_S = 300.0
LOGGED_STEPS = 4_096

Figures = dict[str, Any]


async def run(
    *, steps: int = 2_000, model: str | None = None, progress: Callable[[str], None] = lambda name: None
) -> Figures:
    """Both scenarios, with at least `steps` steps measured of token-fair turns. Raises `ServerFailed`."""
    parties = [BenchTenant(name, HEAVY_WEIGHT if name == HEAVY else 1.0, 1) for name in _BODIES]
    arguments = ["--engine-max-sequences", str(SEQUENCES), "--engine-kv-blocks", str(KV_BLOCKS)]
    # Of long requests only half as many as there are places may run.
    arguments += ["--gateway-long-tokens", str(ANSWER_TOKENS + LONG_PROMPT_TOKENS)]
    async with fresh_bench(parties, model, arguments) as bench:
        bodies = {name: make(bench.server.model) for name, make in _BODIES.items()}
        async with (
            load_clients(bench, "/v1/completions", bodies) as clients,
            bench.server.operator() as operator,
        ):
            shares = _Shares(bench, clients, operator)
            progress("turns by weight")
            fair = await shares.turns({"slots": SLOTS}, steps)
            progress("the control: decode-first")
            control = await shares.turns({"compose": "decode-first"}, CONTROL_STEPS)
            progress("turns by weight, by default")
            default = await shares.turns({}, CONTROL_STEPS)
            progress("long prompts beside short chats")
            alone = await shares.prompts({}, beside=False)
            beside = await shares.prompts({}, beside=True)
    return _report(default, fair, control, alone, beside)


def _bodies(
    model: str, seed: int, count: int, prompt: tuple[int, int], answer: tuple[int, int], **more: Any
) -> list[dict[str, Any]]:
    """Prompts of random ids, and answers that do not end before; lengths from and to."""
    rng = random.Random(seed)
    return [
        {
            "model": model,
            "prompt": [rng.randint(10, 600) for _ in range(rng.randint(*prompt))],
            "max_tokens": rng.randint(*answer),
            "ignore_eos": True,
            **more,
        }
        for _ in range(count)
    ]


def _endless(model: str) -> list[dict[str, Any]]:
    return _bodies(model, 29, SEQUENCES, (8, 20), (ANSWER_TOKENS, ANSWER_TOKENS))


def _long(model: str) -> list[dict[str, Any]]:
    return _bodies(model, 30, 200, (LONG_PROMPT_TOKENS, LONG_PROMPT_TOKENS), (4, 4))


def _short(model: str) -> list[dict[str, Any]]:
    return _bodies(model, 31, 400, (8, 24), (16, 48), stream=True, stream_options={"include_usage": True})


_BODIES: Mapping[str, Callable[[str], list[dict[str, Any]]]] = {
    **dict.fromkeys((LIGHT, HEAVY), _endless),
    LONG: _long,
    SHORT: _short,
}


class _Shares:
    def __init__(self, bench: Bench, clients: Mapping[str, LoadClient], operator: httpx.AsyncClient) -> None:
        self._bench = bench
        self._clients = clients
        self._operator = operator
        self._cpu_shares: dict[str, float] = {}

    async def turns(self, options: Mapping[str, Any], steps: int) -> Figures:
        """Decode tokens by tenant with all sequences running. Raises `ServerFailed`."""
        await self._set(options)
        ids = self._bench.ids
        for name in (LIGHT, HEAVY):
            await self._clients[name].closed(SEQUENCES // 2)
        seen: list[Step] = []
        async with asyncio.timeout(LIMIT_S):
            while len(step_shares.after_prompts(seen, SETTLE_STEPS)) < steps or not _all_run(seen[-1], ids):
                await asyncio.sleep(READ_S)
                seen = step_shares.merged(seen, await self._steps())
        await self._stop(LIGHT, HEAVY)
        measured = step_shares.after_prompts(seen, SETTLE_STEPS)
        tokens = {
            name: sum(step["decodes"].get(ids[name], 0) for step in measured) for name in (LIGHT, HEAVY)
        }
        gaps = {name: step_shares.longest_gap(measured, ids[name]) for name in (LIGHT, HEAVY)}
        return {
            "steps": len(measured),
            "lost_steps": step_shares.lost_steps(measured),
            "slots": sorted({min(step["slots"], SEQUENCES) for step in measured}),
            "decode_tokens": tokens,
            "tokens_per_s": sum(tokens.values()) / (measured[-1]["at_s"] - measured[0]["at_s"]),
            "off_max_min": step_shares.worst_ratio(
                measured,
                ids[LIGHT],
                ids[HEAVY],
                step_shares.max_min(measured, SEQUENCES // 2, HEAVY_WEIGHT),
                WINDOW_STEPS,
            ),
            "off_1_to_3": step_shares.worst_ratio(
                measured, ids[LIGHT], ids[HEAVY], HEAVY_WEIGHT, WINDOW_STEPS
            ),
            "off_1_to_1": step_shares.worst_ratio(measured, ids[LIGHT], ids[HEAVY], 1.0, WINDOW_STEPS),
            "longest_gap_steps": gaps,
        }

    async def prompts(self, options: Mapping[str, Any], *, beside: bool) -> Figures:
        """Short chats, alone or beside long prompts without end. Raises `ServerFailed`."""
        await self._set(options)
        ids = self._bench.ids
        if beside:
            await self._clients[LONG].closed(LONG_CONNECTIONS)
        await self._clients[SHORT].closed(SHORT_CONNECTIONS)
        await asyncio.sleep(READ_S)
        await self._clients[SHORT].take()
        seen, begun_s = await self._steps(1), asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() - begun_s < MEASURED_S:
            await asyncio.sleep(READ_S)
            seen = step_shares.merged(seen, await self._steps())
        observed = await self._clients[SHORT].take()
        await self._stop(SHORT, *([LONG] if beside else []))
        tpots_s = [
            account["actual"]["tpot_s"] for account in observed.accounts if account["actual"]["tpot_s"]
        ]
        figures: Figures = {
            "requests": observed.finished,
            "ttft_s": _spread(observed.ttfts_s),
            "tpot_s": _spread(tpots_s),
        }
        if beside:
            both = step_shares.both_work(seen, ids[LONG], ids[SHORT])
            figures |= {
                "steps": len(both),
                "lost_steps": step_shares.lost_steps(seen),
                "least_surplus_tokens": step_shares.least_surplus(both, ids[LONG], 0.5),
                "largest_chunk_tokens": max((step["prompts"].get(ids[LONG], 0) for step in both), default=0),
                "idle_tokens": step_shares.idle_tokens(seen, ids[LONG]),
                "short_without_token": step_shares.without_token(seen, ids[SHORT]),
                "short_not_begun": step_shares.not_begun(seen, ids[SHORT]),
            }
        return figures

    async def _set(self, options: Mapping[str, Any]) -> None:
        await admin_call(self._operator, "POST", "policy", {"policy": "hybrid", "options": dict(options)})

    async def _steps(self, number: int = LOGGED_STEPS) -> list[Step]:
        shown = await admin_call(self._operator, "GET", f"policy?decisions=0&steps={number}")
        if "steps" not in shown["engines"][0]:
            raise ServerFailed("the engine is down")
        steps: list[Step] = shown["engines"][0]["steps"]
        return steps

    async def _stop(self, *names: str) -> None:
        for name in names:
            observed = await self._clients[name].stop()
            self._cpu_shares[name] = max(self._cpu_shares.get(name, 0.0), observed.cpu_share)
        if not await until(self._is_idle, LIMIT_S):
            raise ServerFailed(f"requests still ran {LIMIT_S:g} s after their clients had left")

    async def _is_idle(self) -> bool:
        return not (await admin_call(self._operator, "GET", "status"))["running"]


def _all_run(step: Step, ids: Mapping[str, str]) -> bool:
    return all(
        step["decodes"].get(ids[name], 0) + step["waiting_decodes"].get(ids[name], 0) == SEQUENCES // 2
        for name in (LIGHT, HEAVY)
    )


def _spread(values: list[float]) -> Figures | None:
    if not values:
        return None
    return {f"p{round(100 * share)}": round(quantile(values, share), 5) for share in (0.05, 0.5, 0.95)}


def _report(default: Figures, fair: Figures, control: Figures, alone: Figures, beside: Figures) -> Figures:
    checks = _checks(default, fair, control, beside)
    return {
        "default": default,
        "turns": fair,
        "decode_first": control,
        "short_alone": alone,
        "short_beside_long": beside,
        "checks": [check.as_json() for check in checks],
        "ok": all(check.ok for check in checks),
    }


def _checks(default: Figures, fair: Figures, control: Figures, beside: Figures) -> list[Check]:
    rounds = {
        name: step_shares.most_rounds(SEQUENCES // 2, SLOTS, weight, 1 + HEAVY_WEIGHT)
        for name, weight in ((LIGHT, 1.0), (HEAVY, HEAVY_WEIGHT))
    }
    lost = default["lost_steps"] + fair["lost_steps"] + control["lost_steps"] + beside["lost_steps"]
    return [
        Check("steps that were not seen", lost, 0),
        Check(
            "default: off max-min of its slots in any 1,000 steps", default["off_max_min"], DEFAULT_TOLERANCE
        ),
        Check(
            "default: tokens/s over those of all rows",
            default["tokens_per_s"] / control["tokens_per_s"],
            LEAST_KEPT,
            at_most=False,
        ),
        Check("half of the places: off 1:3 in any 1,000 steps", fair["off_1_to_3"], TOLERANCE),
        *(
            Check(f"half of the places: longest gap of {name}, steps", fair["longest_gap_steps"][name], most)
            for name, most in rounds.items()
        ),
        Check("decode-first: off 1:1 in any 1,000 steps", control["off_1_to_1"], TOLERANCE),
        Check(
            "long prompts: tokens below their half, at most a chunk",
            -beside["least_surplus_tokens"],
            beside["largest_chunk_tokens"],
        ),
        Check("long prompts: tokens left over while one was unfinished", beside["idle_tokens"], 0),
        Check("short chats: decodes without a token in a step", beside["short_without_token"], 0),
        Check("short chats: not begun in the step after they came", beside["short_not_begun"], 0),
    ]


def show(report: Figures) -> None:
    Report(
        f"decode tokens, weights 1:3, {SEQUENCES} sequences",
        (
            ("compose", "options"),
            ("slots", "slots a step"),
            ("tokens_per_s", "tokens/s", ",.0f"),
            ("steps", "steps"),
            (LIGHT, "light"),
            (HEAVY, "heavy"),
            ("off_max_min", "off max-min", ".2%"),
            ("off_1_to_3", f"off 1:3, any {WINDOW_STEPS:,} steps", ".2%"),
            ("off_1_to_1", "off 1:1", ".2%"),
            ("gaps", "longest gap, steps (light, heavy)"),
        ),
        [
            part
            | {"compose": name, "slots": " ".join(map(str, part["slots"]))}
            | {"gaps": "{light}, {heavy}".format(**part["longest_gap_steps"])}
            | part["decode_tokens"]
            for name, part in (
                ("default", report["default"]),
                (f"slots={SLOTS}", report["turns"]),
                ("decode-first", report["decode_first"]),
            )
        ],
    ).show()
    Report(
        f"short chats, alone and beside prompts of {LONG_PROMPT_TOKENS:,} tokens without end (5th, 50th, 95th"
        " percentile)",
        (("beside", "beside"), ("requests", "requests"), ("ttft", "TTFT, s"), ("tpot", "TPOT, s")),
        [
            {"beside": name, "requests": part["requests"]}
            | {
                figure: " ".join(f"{value:.4f}" for value in (part[f"{figure}_s"] or {}).values())
                for figure in ("ttft", "tpot")
            }
            for name, part in (("nothing", report["short_alone"]), ("long", report["short_beside_long"]))
        ],
    ).show()
    checks = _checks(report["default"], report["turns"], report["decode_first"], report["short_beside_long"])
    for check in checks:
        print(f"  {check}")
