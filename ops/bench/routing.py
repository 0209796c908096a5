"""Routing by predicted TTFT against round robin and least loaded: prefix cache hits of conversations.

Four virtual replicas behind the queue that serves, on a real trace of conversations with the blocks that
their prompts share (`data/ATTRIBUTION.md`). Compared: round robin, the least loaded, and the predicted TTFT
(`gateway/flow/routing.py`); and how many blocks one cache as large as all four would have had, in order of
arrival.

To simulate prompts of 100,000 tokens, one simulated prompt token stands for `INPUT_SCALE` of the trace (a
block of 512 is a block of 16) and one of the answer for `OUTPUT_SCALE`; the step-time model is scaled alike.
"""

from __future__ import annotations

import csv
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from engine.messages import StepTime
from engine.virtual.replica import VOCABULARY
from gateway.flow.placement import LeastLoaded, Score, Scorer
from gateway.flow.prefix_index import prefix_hashes
from gateway.flow.routing import PrefixRouter
from gateway.flow.types import InFlight, Ticket
from gateway.flow.window import Replica, ReplicaLoad
from ops.reporting import Report, quantile, verdict
from ops.simulate.machines.machines import profile_machine
from ops.simulate.pool import SimulatedPool
from ops.simulate.predictions import Exact
from ops.simulate.records import Records
from ops.simulate.traffic.requests import SimulatedRequest

TRACE_FILE = Path(__file__).parent / "data" / "conversations.csv"
TRACE_BLOCK_TOKENS = 512
INPUT_SCALE = 32
OUTPUT_SCALE = 8
BLOCK_TOKENS = TRACE_BLOCK_TOKENS // INPUT_SCALE
REPLICAS = 4
MACHINE = profile_machine(
    "a large model on eight GPUs",
    # 16,000 prompt tokens a second and decode steps of about 12 ms: a large model on a node of eight GPUs.
    StepTime(100e-3, INPUT_SCALE / 16_000, 0.0, 1e-3, samples=1000, relative_error=0.0),
    max_sequences=64,
    max_batched_tokens=8192 // INPUT_SCALE,
    kv_tokens=4096 * BLOCK_TOKENS,
    block_tokens=BLOCK_TOKENS,
    context_tokens=16_384,
)
LEAST_HITS = 0.9
"""Of the hits of one shared cache."""

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """One request of the trace."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """Ids of its prompt's blocks; two prompts share as much as their leading ids agree."""


class RoundRobin:
    """Implements `Scorer`: one replica after the other."""

    wants_prefixes = False
    prefix_weight = 0.0

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}
        """Replica id -> number of its last turn."""

    def scores(
        self, ticket: Ticket, rank: int, candidates: Sequence[tuple[Replica, ReplicaLoad]], now_s: float
    ) -> Sequence[Score]:
        return [(self._turns.get(replica.replica_id, 0),) for replica, _ in candidates]

    def dispatched(self, flight: InFlight, replica: Replica, now_s: float) -> None:
        self._turns[replica.replica_id] = max(self._turns.values(), default=0) + 1

    def first_token(self, entry_id: str) -> None:
        pass

    def foreseen(self, entry_id: str, left_tokens: int) -> None:
        pass

    def ended(self, entry_id: str) -> None:
        pass

    def forget(self, replica_id: str) -> None:
        pass


ROUTERS: dict[str, Callable[[], Scorer]] = {
    "round robin": RoundRobin,
    "least loaded": LeastLoaded,
    "predicted TTFT": lambda: PrefixRouter(block_tokens=BLOCK_TOKENS),
}


def run(*, requests: int = 2_000, progress: Callable[[str], None] = lambda name: None) -> Figures:
    """The first `requests` of the trace under every router."""
    trace = read_trace(requests)
    shared = shared_cache_hits(trace, REPLICAS * MACHINE.num_blocks)
    blocks = sum(len(each.blocks) for each in trace)
    report: Figures = {
        "requests": len(trace),
        "blocks": blocks,
        "shared_cache_hits": shared,
        "shared_cache_hit_rate": round(shared / blocks, 4),
        "routers": {},
    }
    arrivals = [_request(each) for each in trace]
    for name, make_router in ROUTERS.items():
        progress(name)
        report["routers"][name] = _row(serve(arrivals, make_router()), shared)
    routed, turns = report["routers"]["predicted TTFT"], report["routers"]["round robin"]
    report["least_hits_of_shared"] = LEAST_HITS
    report["ok"] = routed["hits_of_shared"] >= LEAST_HITS and routed["ttft_p99_s"] <= turns["ttft_p99_s"]
    return report


def show(report: Figures) -> None:
    """The table for people."""
    Report(
        f"{report['requests']:,} requests of conversations, {report['blocks']:,} blocks; one shared cache"
        f" would have {report['shared_cache_hits']:,} ({report['shared_cache_hit_rate']:.1%})",
        (
            ("name", "router"),
            ("block_hits", "block hits"),
            ("hits_of_shared", "of shared", ".1%"),
            ("ttft_p50_s", "TTFT p50, s", ".2f"),
            ("ttft_p99_s", "TTFT p99, s", ".2f"),
            ("requests_by_replica", "requests by replica"),
        ),
        [{"name": name} | row for name, row in report["routers"].items()],
    ).show()
    print(
        f"predicted TTFT: at least {LEAST_HITS:.0%} of the shared cache's hits and a p99 no worse than round"
        f" robin's: {verdict(report)}"
    )


def serve(arrivals: Sequence[SimulatedRequest], router: Scorer) -> Records:
    """What became of the requests."""
    pool = SimulatedPool(
        "vtc",
        MACHINE,
        replicas=REPLICAS,
        predictions=Exact(),
        stepwise=True,
        declared_tokens=0,
        flow={"scorer": router},
    )
    pool.run(arrivals)
    return pool.records


def read_trace(most: int, path: Path = TRACE_FILE) -> list[Conversation]:
    """The first requests, their blocks numbered anew. Raises ValueError naming a bad line."""
    trace: list[Conversation] = []
    named = 0
    with path.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(islice(csv.DictReader(file), most), 2):
            try:
                input_tokens = int(row["input_tokens"])
                shared = int(row["shared_blocks"] or 0)
                start = trace[int(row["prefix_of"])].blocks[:shared] if shared else ()
                own = -(-input_tokens // TRACE_BLOCK_TOKENS) - len(start)
                blocks = (*start, *range(named, named + own))
                trace.append(
                    Conversation(float(row["arrival_s"]), input_tokens, int(row["output_tokens"]), blocks)
                )
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
            named += own
    return trace


def shared_cache_hits(trace: Sequence[Conversation], num_blocks: int) -> int:
    """Blocks that one cache of `num_blocks` would have held when each request came, the least recently used
    leaving first. The last token of a prompt is always computed, so its block never counts."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for each in trace:
        full = each.blocks[: (each.input_tokens - 1) // TRACE_BLOCK_TOKENS]
        for block in full:
            if block not in held:
                break
            hits += 1
        for block in reversed(full):
            held[block] = None
            held.move_to_end(block)
        while len(held) > num_blocks:
            held.popitem(last=False)
    return hits


def _request(each: Conversation) -> SimulatedRequest:
    """With a prompt whose blocks are equal where the trace's are."""
    base = VOCABULARY - 1
    tokens = [
        1 + block // base**place % base
        for block in each.blocks
        for place in (*range(3), *([3] * (BLOCK_TOKENS - 3)))
    ]
    prompt = tuple(tokens[: max(1, each.input_tokens // INPUT_SCALE)])
    return SimulatedRequest(
        each.at_s,
        "chat",
        len(prompt),
        max(1, each.output_tokens // OUTPUT_SCALE),
        prompt=prompt,
        prefix_hashes=prefix_hashes(prompt, "chat", block_tokens=BLOCK_TOKENS),
    )


def _row(records: Records, shared: int) -> Figures:
    hits = sum(tokens // BLOCK_TOKENS for tokens in records.cached_tokens)
    ttfts = [records.ttft_s(row) for row in range(len(records))]
    return {
        "block_hits": hits,
        "hits_of_shared": round(hits / shared, 4) if shared else 0.0,
        "ttft_p50_s": round(quantile(ttfts, 0.5), 3),
        "ttft_p99_s": round(quantile(ttfts, 0.99), 3),
        "requests_by_replica": [records.replica.count(number) for number in sorted(set(records.replica))],
    }
