"""What-ifs: recorded traffic simulated with changes.

The simulator belongs to `ops`, which hands a `WhatIf` to the gateway. A run is one of `fairgate whatif`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from itertools import groupby
from typing import Any, Protocol

from msgspec.structs import replace

from gateway.domain.server_description import ServerDescription, packed
from tenants.config_file.document import ConfigLimit, ConfigTenant, Configuration

INSTANT = "%Y-%m-%dT%H:%M:%S.%f"


class RunState(StrEnum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class WhatIfAsked:
    """The traffic of a span of time, and what to change."""

    since_us: int
    until_us: int
    """Exclusive; both in Unix microseconds."""
    policies: tuple[str, ...] = ()
    """None: the one that served."""
    options: Mapping[str, str] = field(default_factory=dict)
    replicas: int | None = None
    """None: as many as served."""
    weights: Mapping[str, float] = field(default_factory=dict)
    limits: Mapping[str, Sequence[ConfigLimit]] = field(default_factory=dict)
    """Both by tenant name."""
    model: str = ""
    """Requests of this model; empty: there is one."""
    gateway: str = ""
    """Traffic of this gateway; empty: all."""
    rows: int | None = None
    """Only the first requests; None: all."""

    def flags(self, limits_file: str = "limits.yaml") -> list[str]:
        """`fairgate whatif` flags, as `--name=value`, so that a value is never taken for a flag."""
        options = [f"--from={_instant(self.since_us)}", f"--to={_instant(self.until_us)}"]
        options += [f"--of-model={self.model}"] if self.model else []
        options += [f"--gateway={self.gateway}"] if self.gateway else []
        options += [f"--policy={','.join(self.policies)}"] if self.policies else []
        options += [f"--option={name}={value}" for name, value in self.options.items()]
        options += [f"--replicas={self.replicas}"] if self.replicas is not None else []
        options += [f"--weight={tenant}={weight:g}" for tenant, weight in self.weights.items()]
        options += [f"--limits={limits_file}"] if self.limits else []
        options += [f"--rows={self.rows}"] if self.rows is not None else []
        return options

    def file(self) -> Configuration:
        names = list(dict.fromkeys([*self.weights, *self.limits]))
        tenants = [
            ConfigTenant(name=name, weight=self.weights.get(name), limits=list(self.limits.get(name, ())))
            for name in names
        ]
        return Configuration(version=1, tenants=tenants)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Requests that one server ran while it did not change: what a what-if can replay."""

    since_us: int
    until_us: int
    """Exclusive; both are times of their ends."""
    requests: int
    server: ServerDescription
    """Its first one: gateways and step times differ within a stretch."""
    gateways: tuple[str, ...]
    has_step_time: bool

    @property
    def can_be_replayed(self) -> bool:
        """Its engines are ours, alike, and were timed."""
        return not self.server.is_foreign and len(set(self.server.engines)) == 1 and self.has_step_time

    @property
    def policy(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.server.options.items())
        return f"{self.server.policy} ({options})" if options else self.server.policy


def stretches_of(
    rows: Sequence[tuple[int, str | None]], servers: Mapping[str, ServerDescription]
) -> list[Stretch]:
    """By model, of each the oldest first. `rows`: end and id of its server, by end; those without a known
    server are left out."""
    known = [(ended_us, servers[name]) for ended_us, name in rows if name is not None and name in servers]
    common = {id(server): common_of(server) for server in servers.values()}
    stretches = []
    for model in sorted({server.model for _, server in known}):
        its = [row for row in known if row[1].model == model]
        for _, group in groupby(its, lambda row: common[id(row[1])]):
            ran = list(group)
            stretches.append(
                Stretch(
                    ran[0][0],
                    ran[-1][0] + 1,
                    len(ran),
                    ran[0][1],
                    tuple(sorted({server.gateway_id for _, server in ran})),
                    any(server.step_time and server.step_time.samples for _, server in ran),
                )
            )
    return stretches


def common_of(server: ServerDescription) -> bytes:
    """What all gateways in front of the same engines share, at any time."""
    return packed(replace(server, gateway_id="", step_time=None))


def _instant(at_us: int) -> str:
    return datetime.fromtimestamp(at_us / 1e6, UTC).strftime(INSTANT)


@dataclass(slots=True)
class WhatIfRun:
    """One run, written by its runner alone."""

    run_id: str
    asked: WhatIfAsked
    by: str
    started_us: int
    state: RunState = RunState.RUNNING
    ended_us: int | None = None
    policy: str = ""
    number: int = 0
    """Of that simulation, from 1; 1 is the baseline."""
    part: float = 0.0
    """Progress, 0 to 1."""
    report: Mapping[str, Any] = field(default_factory=dict)
    """As of `fairgate whatif --json`."""
    error: str = ""


class WhatIfBusy(Exception):
    """Another run is in progress."""


class WhatIf(Protocol):
    """Runs what-ifs one at a time and keeps the last ones in memory."""

    def runs(self) -> Sequence[WhatIfRun]:
        """Newest first."""
        ...

    def run(self, run_id: str) -> WhatIfRun | None:
        """None: it is not kept."""
        ...

    async def start(self, asked: WhatIfAsked, by: str) -> WhatIfRun:
        """Raises `WhatIfBusy`."""
        ...

    async def cancel(self, run_id: str) -> None:
        """Does nothing if the run has ended."""
        ...
