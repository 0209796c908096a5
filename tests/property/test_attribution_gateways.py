"""Incidents whose requests are split over two gateways get their true cause.

One served engine, one shared queue, on virtual time; each gateway notes its own requests only, and hears of
the others through a real Redis. Each judges its own misses, no sooner and no later than it would in fact. The
incidents, and what they must be found to be, are those of `test_attribution_incidents.py`.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pytest
import redis.asyncio as redis_client

from engine.entry import QueueEntry
from gateway.dispatch.load_feed import TELL_EVERY_S, LoadFeed
from gateway.explain.attribution import Metric, RequestFacts, judge
from gateway.explain.ideal_share import FairTerms
from gateway.explain.load_log import LoadLog
from gateway.explain.minutes.flow_meter import FlowMeter
from gateway.explain.pool_load import KNOWN_AFTER_S, PoolLoadShare
from ops.simulate.traffic.requests import SimulatedRequest
from tenants.outcomes import Cause, RequestOutcome
from tests.property.test_attribution_incidents import INCIDENTS, MACHINE, SHARE, Incident
from tests.support.incident_pool import IncidentPool

GATEWAYS = ("east", "west")
CHOSEN = ("flooded by one", "flooded by many", "higher tier", "own backlog", "killed engine")
JUDGE_EVERY_S = 4.0
Verdict = tuple[RequestFacts, Metric, Cause, Cause]


class Deaf(PoolLoadShare):
    """Tells the others of its load, and learns nothing of theirs."""

    def hear(self, packed: bytes, told_s: float) -> None:
        pass


@dataclass
class SplitGateway:
    """What one gateway knows of the pool."""

    name: str
    url: str
    incident: Incident
    hears: bool
    log: LoadLog = field(default_factory=LoadLog)
    now_s: float = 0.0
    unjudged: list[RequestFacts] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.redis = redis_client.Redis.from_url(self.url)
        self.share = (PoolLoadShare if self.hears else Deaf)(self.name, "1", self.log, FlowMeter("pool"))
        self.feed = LoadFeed(self.redis, "fairgate-test-load", lambda: self.now_s, self.share)

    def judge(self, pool: IncidentPool, known_s: float) -> None:
        """The misses that had ended by `known_s`."""
        ripe = [facts for facts in self.unjudged if facts.ended_s <= known_s]
        self.unjudged = [facts for facts in self.unjudged if facts.ended_s > known_s]
        missed = [
            (facts, metric, target_s)
            for facts in ripe
            for metric, target_s in self.incident.targets.items()
            if facts.misses(metric, target_s)
        ]
        if not missed:
            return
        since_s = min(facts.job.arrived_s for facts, _, _ in missed)
        jobs = self.log.jobs(max(facts.ended_s for facts, _, _ in missed), since_s)
        found = judge(missed, jobs, pool.as_machine(), pool.log.serving_since())
        self.verdicts += [
            (facts, metric, verdict.cause, self.incident.expected(facts, metric))
            for (facts, metric, _), verdict in zip(missed, found, strict=True)
        ]


class SplitPool(IncidentPool):
    """An incident's pool, whose requests came to one gateway or the other."""

    def __init__(self, incident: Incident, gateways: list[SplitGateway], loop: asyncio.Runner) -> None:
        super().__init__(incident.policy, MACHINE, incident.readers, incident.limited_s)
        self.gateways = gateways
        self._loop = loop
        self._next_tell_s = TELL_EVERY_S
        self._next_judge_s = JUDGE_EVERY_S

    def run(self, requests: Iterable[SimulatedRequest], *, until_s: float = float("inf")) -> None:
        super().run(requests, until_s=until_s)
        if until_s >= self._next_tell_s:
            self._next_tell_s += TELL_EVERY_S
            self.tell(until_s)
        if until_s >= self._next_judge_s:
            self._next_judge_s += JUDGE_EVERY_S
            for gateway in self.gateways:
                gateway.judge(self, until_s - KNOWN_AFTER_S)

    def tell(self, now_s: float) -> None:
        """Everybody hears of everybody: the first one also what the second one tells."""
        for gateway in (*self.gateways, self.gateways[0]):
            gateway.now_s = now_s
            self._loop.run(gateway.feed.exchange())

    def _of(self, row: str) -> SplitGateway:
        """By the request, so that both have some of each tenant's."""
        return self.gateways[zlib.crc32(row.encode()) % len(self.gateways)]

    def arrive(self, request: SimulatedRequest) -> None:
        super().arrive(request)
        row = str(len(self.records) - 1)
        sizes = request.input_tokens, request.output_tokens
        at = self._of(row)
        at.log.arrived(row, request.tenant, request.tier, request.weight, self.now_s, *sizes)
        entry = QueueEntry(row, request.tenant, self.now_s, *sizes, request.tier, request.weight)
        at.share.arrived(entry, 1, FairTerms(request.weight))

    def _ended(self, entry_id: str, request: SimulatedRequest, outcome: RequestOutcome) -> None:
        super()._ended(entry_id, request, outcome)
        facts, at = self.facts[-1], self._of(entry_id)
        done = facts.is_complete
        at.log.ended(entry_id, self.now_s, request.input_tokens, 0, request.output_tokens, is_complete=done)
        at.share.ended(facts.job, self.now_s, 0, is_complete=done)
        at.unjudged.append(facts)


@pytest.fixture
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def split(name: str, redis_url: str, loop: asyncio.Runner, *, hears: bool = True) -> list[Verdict]:
    """Of every miss of an incident: what its gateway found, and what it was."""
    incident = INCIDENTS[name]
    gateways = [SplitGateway(each, redis_url, incident, hears) for each in GATEWAYS]
    pool = SplitPool(incident, gateways, loop)
    pool.live_through(incident.requests(), kill_s=incident.kill_s, down_s=incident.down_s)
    pool.tell(pool.now_s)
    for gateway in gateways:
        gateway.judge(pool, float("inf"))
        loop.run(gateway.redis.aclose())
        assert gateway.verdicts, f"{gateway.name} had no part in it"
    return [verdict for gateway in gateways for verdict in gateway.verdicts]


@pytest.mark.parametrize("name", CHOSEN)
def test_the_misses_of_a_split_incident_get_their_cause(
    name: str, redis_url: str, loop: asyncio.Runner
) -> None:
    found = split(name, redis_url, loop)
    right = sum(cause is expected for _, _, cause, expected in found)
    table = Counter(
        (facts.job.tenant_id.partition("-")[0], str(metric), str(cause), str(expected))
        for facts, metric, cause, expected in found
    )

    assert len(found) >= INCIDENTS[name].at_least, table
    assert right >= SHARE * len(found), table


def test_a_gateway_that_hears_nothing_of_others_blames_the_policy(
    redis_url: str, loop: asyncio.Runner
) -> None:
    found = split("flooded by many", redis_url, loop, hears=False)
    right = sum(cause is expected for _, _, cause, expected in found)

    assert right < 0.8 * len(found), "half of the load explains it as well: there was nothing to hear"
