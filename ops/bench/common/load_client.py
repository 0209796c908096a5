"""Load client of one tenant, in a process of its own, so that no client waits for another's processor.

The first line on stdin says where to send what, each later one is an order; every order is answered on stdout
with what was seen since the order before, all of it JSON. Standard library only, for a quick start.

    {"url": "http://127.0.0.1:8000/v1/completions", "key": "fg-…", "bodies": ["{…}"], "seed": "1 day"}
    {"order": "closed", "connections": 40} -> {"finished": 0, "cpu_share": 0.0, …}
    {"order": "poisson", "per_s": 3.5, "count": 100, "most_open": 50}
    {"order": "finish"}, {"order": "take"}, {"order": "stop"}
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import sys
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ops.bench.common.http_client import HttpBroken, HttpResponse, LoadHttpClient

TIMEOUT_S = 300.0
RETRY_S = 0.2
TOKEN_MARK = '"logprob":'
"""Once in a chat's event for each of its tokens; quotes inside a token's text are escaped."""


@dataclass
class Observed:
    finished: int = 0
    refused: int = 0
    unsent: int = 0
    """Requests due while as many as may be open were open."""
    longest_prompt: int = 0
    ttfts_s: list[float] = field(default_factory=list)
    """Of streams, from sending to the first event; where tokens are counted, to the first that has one."""
    tokens: int = 0
    """Output tokens of streams as they arrive, where they are counted; else 0."""
    accounts: list[dict[str, Any]] = field(default_factory=list)
    cpu_share: float = 0.0


def poisson_instants(rng: random.Random, per_s: float) -> Iterator[float]:
    """Endless, in seconds after the start."""
    return itertools.accumulate(rng.expovariate(per_s) for _ in itertools.count())


class TenantLoad:
    def __init__(
        self, url: str, key: str, bodies: Sequence[str], seed: str, counts_tokens: bool = False
    ) -> None:
        """`counts_tokens`: by log probabilities, for a server may put several tokens into one event."""
        self._url = url
        self._counts_tokens = counts_tokens
        self._headers = {"authorization": f"Bearer {key}"}
        self._bodies = [body.encode() for body in bodies]
        self._next = itertools.count()
        self._rng = random.Random(seed)
        self._client = LoadHttpClient(timeout_s=TIMEOUT_S)
        self._tasks: list[asyncio.Task[None]] = []
        self._begin()

    def closed(self, connections: int) -> None:
        self._start(*(self._loop() for _ in range(connections)))

    def poisson(self, per_s: float, count: int | None, most_open: int) -> None:
        """Random instants; `count` None: until `stop`; no more than `most_open` are open."""
        self._start(self._stream(per_s, count, most_open))

    async def finish(self) -> None:
        await asyncio.gather(*self._tasks)

    async def stop(self) -> None:
        await _cancel(self._tasks)
        self._client.close()

    def take(self) -> Observed:
        observed = self._observed
        wall_s, cpu_s = time.perf_counter() - self._since[0], time.process_time() - self._since[1]
        observed.cpu_share = round(cpu_s / max(wall_s, 1e-9), 4)
        self._begin()
        return observed

    def _begin(self) -> None:
        self._observed = Observed()
        self._since = time.perf_counter(), time.process_time()

    def _start(self, *loads: Coroutine[Any, Any, None]) -> None:
        self._tasks = [asyncio.create_task(load) for load in loads]

    async def _loop(self) -> None:
        while True:
            if not await self._request():
                await asyncio.sleep(RETRY_S)

    async def _stream(self, per_s: float, count: int | None, most_open: int) -> None:
        loop = asyncio.get_running_loop()
        begun_s, sent = loop.time(), 0
        is_open: set[asyncio.Task[bool]] = set()
        try:
            for due_s in poisson_instants(self._rng, per_s):
                if count is not None and sent >= count:
                    break
                await asyncio.sleep(max(0.0, begun_s + due_s - loop.time()))
                if len(is_open) >= most_open:
                    self._observed.unsent += 1
                    continue
                sent += 1
                task = asyncio.create_task(self._request())
                is_open.add(task)
                task.add_done_callback(is_open.discard)
            await asyncio.gather(*is_open)
        finally:
            await _cancel(is_open)

    async def _request(self) -> bool:
        """One request; False: it was refused, or its connection broke."""
        body = self._bodies[next(self._next) % len(self._bodies)]
        sent_s, last = time.perf_counter(), ""
        try:
            async with self._client.post(self._url, body, self._headers) as response:
                if response.is_stream:
                    last = await self._read_stream(response, sent_s)
                else:
                    last = (await response.read()).decode()
                if response.status != 200:
                    self._observed.refused += 1
                    return False
        except HttpBroken:
            self._observed.refused += 1
            return False
        self._observed.finished += 1
        answer = json.loads(last or "{}")
        self._observed.longest_prompt = max(
            self._observed.longest_prompt, (answer.get("usage") or {}).get("prompt_tokens", 0)
        )
        if account := answer.get("fairgate"):
            self._observed.accounts.append(account)
        return True

    async def _read_stream(self, response: HttpResponse, sent_s: float) -> str:
        last, has_begun = "", False
        async for line in response.lines():
            if not line.startswith("data: {"):
                continue
            tokens = line.count(TOKEN_MARK) if self._counts_tokens else 0
            self._observed.tokens += tokens
            if not has_begun and (tokens or not self._counts_tokens):
                has_begun = True
                self._observed.ttfts_s.append(time.perf_counter() - sent_s)
            last = line
        return last.removeprefix("data: ")


async def _cancel(tasks: Any) -> None:
    for task in (cancelled := list(tasks)):
        task.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)


async def main() -> None:
    load = TenantLoad(**json.loads(sys.stdin.readline()))
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        done = getattr(load, order.pop("order"))(**order)
        if asyncio.iscoroutine(done):
            done = await done
        print(json.dumps(asdict(done if isinstance(done, Observed) else load.take())), flush=True)
    await load.stop()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
