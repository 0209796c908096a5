"""Recorded traffic served otherwise: what is asked for, a run of it, and who runs it.

The simulator belongs to `ops`, which hands a `WhatIf` to the gateway. A run is `fairgate whatif` with the
flags that stand here, so its report is that of the command line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Protocol

from tenants.config_file.document import ConfigLimit, ConfigTenant, Configuration

INSTANT = "%Y-%m-%dT%H:%M:%S.%f"


class RunState(StrEnum):
    """What became of a run."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class WhatIfAsked:
    """Traffic that ended in a time, and what is to be otherwise."""

    since_us: int
    until_us: int
    """Exclusive; both in microseconds since 1970."""
    policies: tuple[str, ...] = ()
    """None: the one that served."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Of the policies."""
    replicas: int | None = None
    """None: as many as served."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """By the names of tenants."""
    limits: Mapping[str, Sequence[ConfigLimit]] = field(default_factory=dict)
    """By the names of tenants."""
    model: str = ""
    """Requests of this model; empty: there is one."""
    gateway: str = ""
    """What this gateway served; empty: all."""
    rows: int | None = None
    """The first requests alone; None: all."""

    def flags(self, limits_file: str = "limits.yaml") -> list[str]:
        """Flags of `fairgate whatif`. A value is never taken for a flag: it stands behind `=`."""
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
        """Weights and limits as a configuration file."""
        names = list(dict.fromkeys([*self.weights, *self.limits]))
        tenants = [
            ConfigTenant(
                name=name,
                weight=self.weights.get(name),
                limits=list(self.limits.get(name, ())),
            )
            for name in names
        ]
        return Configuration(version=1, tenants=tenants)


def _instant(at_us: int) -> str:
    return datetime.fromtimestamp(at_us / 1e6, UTC).strftime(INSTANT)


@dataclass(slots=True)
class WhatIfRun:
    """One run. Its runner alone writes it."""

    run_id: str
    asked: WhatIfAsked
    by: str
    """The actor that asked."""
    started_us: int
    state: RunState = RunState.RUNNING
    ended_us: int | None = None
    policy: str = ""
    """The one that is being simulated."""
    number: int = 0
    """Of that simulation, from 1; the first one is the baseline."""
    part: float = 0.0
    """How much of it is done."""
    report: Mapping[str, Any] = field(default_factory=dict)
    """As of `fairgate whatif --json`, once it is done."""
    error: str = ""
    """Why it failed."""


class WhatIfBusy(Exception):
    """One run at a time: another one is under way."""


class WhatIf(Protocol):
    """Runs what-ifs, one at a time, and keeps the last ones in memory."""

    def runs(self) -> Sequence[WhatIfRun]:
        """The newest first."""
        ...

    def run(self, run_id: str) -> WhatIfRun | None:
        """One of them; None: it is not kept."""
        ...

    async def start(self, asked: WhatIfAsked, by: str) -> WhatIfRun:
        """Begins a run. Raises `WhatIfBusy`."""
        ...

    async def cancel(self, run_id: str) -> None:
        """Ends a run that is under way; of others it does nothing."""
        ...
