"""The server that recorded traffic names, for a simulation; a recording that names several is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from msgspec.structs import replace

from engine.scheduling.options import PolicyOptions
from engine.scheduling.policy import CHOICES, options_of
from engine.step_time.model import mean_of
from gateway.domain.server_description import (
    DescribedEngine,
    ServerDescription,
    UnreadableDescription,
    server_of,
)
from gateway.domain.what_if import Stretch, common_of, stretches_of
from gateway.flow.lanes import LaneRule, long_tokens_of
from gateway.flow.placement import Scorer
from gateway.flow.routing import PrefixRouter
from gateway.flow.window import WindowRule
from ops.simulate.machines.machines import Machine, profile_machine
from ops.simulate.traffic.requests import BadTrace
from tenants.ledger.timelines import RecordedTimeline

MOST_SHOWN = 5
INSTANT = "%Y-%m-%dT%H:%M:%S.%f"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
OTHER_MACHINE = "--gpu with --model, or --profile, and --policy"
"""Flags that replace everything a recording would give."""


class ServerUnknown(BadTrace):
    """The recording does not name one server that can be simulated; the message has reason and remedy."""


@dataclass(frozen=True, slots=True)
class ReplayedServer:
    described: ServerDescription
    """Without a gateway, and with the mean of the step times."""

    @property
    def policy(self) -> str:
        return self.described.policy

    def options(self, asked: Mapping[str, object]) -> PolicyOptions:
        """Options of that policy, `asked` ones first. Raises ValueError."""
        return options_of(dict(self.described.options) | dict(asked))

    def options_of_others(self, asked: Mapping[str, object]) -> PolicyOptions:
        """Options of another policy: its numbers, not the choices made for the first. Raises ValueError."""
        made_for_it = {*CHOICES, "table", "learned_table"}
        numbers = {name: value for name, value in self.described.options.items() if name not in made_for_it}
        return options_of(numbers | dict(asked))

    def machine(self) -> Machine:
        """One of its engines. Raises `ServerUnknown`."""
        described = self.described
        why = ""
        if described.is_foreign:
            why = "other servers ran it, whose sizes and steps are not known"
        elif not described.engines or described.step_time is None or not described.step_time.samples:
            why = "no engine had told its sizes and step times by then"
        elif len(set(described.engines)) > 1:
            why = f"its engines differ in size ({'; '.join(sorted(set(map(_sizes, described.engines))))})"
        if why or described.step_time is None:
            raise ServerUnknown(
                f"what served model {described.model} cannot be simulated: {why}",
                f"; name another machine with {OTHER_MACHINE}",
            )
        [engine] = set(described.engines)
        return profile_machine(
            f"{described.model} on {engine.device}, as it served",
            described.step_time,
            kv_tokens=engine.kv_tokens,
            context_tokens=engine.context_tokens,
            max_sequences=engine.max_sequences,
            max_batched_tokens=engine.max_batched_tokens,
            block_tokens=engine.block_tokens,
        )

    @property
    def replicas(self) -> int:
        return max(1, len(self.described.engines))

    def flow(self, machine: Machine, replicas: int) -> dict[str, Any]:
        """Settings of its queue in front of so many such machines, for one `SimulatedPool`."""
        queue = self.described.queue
        return {
            "window": WindowRule(queue.lookahead_sequences, queue.kv_window),
            "ageing_s": [seconds or math.inf for seconds in queue.ageing_s],
            "lanes": LaneRule(
                queue.long_tokens or long_tokens_of(machine.context_tokens),
                queue.long_share_sequences,
                queue.long_share_kv,
                queue.batch_share,
            ),
            "reservation_burst_s": queue.reservation_burst_s,
            "scorer": PrefixRouter() if replicas > 1 else Scorer(),
        }


def only_of(
    gateway: str, rows: Sequence[RecordedTimeline], described: Mapping[str, bytes]
) -> list[RecordedTimeline]:
    """The rows that one gateway served. Raises `BadTrace`, and `ServerUnknown` as `replayed_server`."""
    servers = _servers(rows, described)
    known = sorted({server.gateway_id for server in servers.values()})
    if gateway not in known:
        raise BadTrace(f"gateway {gateway!r} served nothing in that time; there are {', '.join(known)}")
    return [row for row in rows if row.server is not None and servers[row.server].gateway_id == gateway]


def replayed_server(rows: Sequence[RecordedTimeline], described: Mapping[str, bytes]) -> ReplayedServer:
    """The server that all `rows` (at least one) name. Raises `ServerUnknown`."""
    servers = _servers(rows, described)
    if len(set(map(common_of, servers.values()))) > 1:
        stretches = stretches_of([(row.ended_us, row.server) for row in rows], servers)
        shown = "".join(f"\n  {_flags(stretch)}" for stretch in stretches[:MOST_SHOWN])
        more = f"\n  and {len(stretches) - MOST_SHOWN} more" if len(stretches) > MOST_SHOWN else ""
        raise ServerUnknown(
            "the server changed in that time: replay one stretch of it",
            f", what one gateway served (--gateway), or name one with {OTHER_MACHINE}:{shown}{more}",
        )
    one = next(iter(servers.values()))
    pace = mean_of(servers[row.server].step_time for row in rows if row.server is not None)
    return ReplayedServer(replace(one, gateway_id="", step_time=pace))


def _servers(
    rows: Sequence[RecordedTimeline], described: Mapping[str, bytes]
) -> dict[str, ServerDescription]:
    missing = [row for row in rows if row.server is None or row.server not in described]
    if missing:
        last = _EPOCH + timedelta(microseconds=missing[-1].ended_us)
        some = "all" if len(missing) == len(rows) else f"{len(missing):,} of the {len(rows):,}"
        raise ServerUnknown(
            f"{some} requests of that time were recorded by a version of Fairgate that did not store what"
            f" served them, the last at {last:{INSTANT}}: take a later time",
            f" (--from), record anew, or name all that it would say with {OTHER_MACHINE}",
        )
    servers = {}
    for name in {row.server for row in rows if row.server is not None}:
        try:
            servers[name] = server_of(described[name])
        except UnreadableDescription as error:
            raise ServerUnknown(
                f"the description of the server that ran requests of that time cannot be read: {error}; take "
                "another time, or the version of Fairgate that recorded it",
                f", or name all that it would say with {OTHER_MACHINE}",
            ) from None
    return servers


def _flags(stretch: Stretch) -> str:
    since, until = (_EPOCH + timedelta(microseconds=at_us) for at_us in (stretch.since_us, stretch.until_us))
    engines = stretch.server.engines
    sizes = "; ".join(sorted(set(map(_sizes, engines))))
    return (
        f"--from {since:{INSTANT}} --to {until:{INSTANT}}: {stretch.requests:,} requests, {stretch.policy}, "
        f"{len(engines)} x {sizes}, gateway {', '.join(stretch.gateways)}"
    )


def _sizes(engine: DescribedEngine) -> str:
    sequences, tokens = engine.max_sequences, engine.max_batched_tokens
    return f"{sequences} sequences, {tokens} tokens a step, {engine.kv_tokens} of KV"
