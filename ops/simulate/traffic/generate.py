"""Generates tenants and their requests from a `SPEC` (`docs/simulating.md`).

Lengths are those of real requests (a trace that ships with the product), or drawn from a stated law; tenants
and instants are drawn from a seed. Tenants that are not ordinary send an even part of the rate, beside it.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path

from ops.simulate.traffic.requests import MOST_REQUESTS, PREFIX_BLOCK_TOKENS, SimulatedRequest
from ops.simulate.traffic.trace import TraceFile

DATA = Path(__file__).parents[1] / "data"
AZURE = DATA / "azure2023_conv.csv.gz"
SERVEGEN = DATA / "servegen_hour.csv.gz"
ARENA = Path(__file__).parents[2] / "demo" / "data" / "arena_slice.csv"
TRACES = {"azure": AZURE, "arena": ARENA, "servegen": SERVEGEN}
SILENT_S = 30.0
LONG_FACTOR = 8
LONGEST_CONTEXT = 32_768
SHARED_BLOCKS = 4
MOST_TENANTS = 10_000
_BOUNDS = {"tenants": (1, MOST_TENANTS), "skew": (0, 10), "rate": (1e-3, 1e5), "seconds": (1, 1e6)}
_BOUNDS |= dict.fromkeys(("onoff", "flooder", "long", "hot", "cold"), (0, 1000))
Draw = Callable[[random.Random], tuple[int, int]]


@cache
def _real(path: Path) -> list[tuple[int, int]]:
    return [(request.input_tokens, request.output_tokens) for request in TraceFile(path)]


def _lognormal(rng: random.Random, median: float, sigma: float, most: int) -> int:
    return min(most, max(1, round(median * rng.lognormvariate(0.0, sigma))))


LENGTHS: dict[str, Draw] = {
    "azure": lambda rng: rng.choice(_real(AZURE)),
    "arena": lambda rng: rng.choice(_real(ARENA)),
    # Azure's code service of 2023 (AzurePublicDataset): input mean 2,048, p99 7,436; output p50 13, p99 252.
    "code": lambda rng: (_lognormal(rng, 1500, 0.75, 7436), _lognormal(rng, 13, 1.2, 1899)),
    "long-form": lambda rng: (_lognormal(rng, 200, 0.8, 4096), _lognormal(rng, 1200, 0.6, 8192)),
    "even": lambda rng: (rng.randint(50, 1000), rng.randint(50, 1000)),
}


@dataclass(frozen=True, slots=True)
class Spec:
    """See `docs/simulating.md`. Raises ValueError naming the field, its bounds and the value."""

    tenants: int = 8
    skew: float = 1.0
    rate: float = 4.0
    seconds: float = 300.0
    onoff: int = 0
    flooder: float = 0.0
    long: int = 0
    hot: int = 0
    cold: int = 0
    lengths: str = "azure"

    def __post_init__(self) -> None:
        for name, (least, most) in _BOUNDS.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise ValueError(f"{name} must be between {least:g} and {most:g}, not {value:g}")
        if self.lengths not in LENGTHS:
            raise ValueError(f"lengths must be one of {', '.join(LENGTHS)}, not {self.lengths!r}")
        expected = self.seconds * self.rate * (1 + self.flooder + self._others / max(1, self.tenants))
        if expected > MOST_REQUESTS:
            raise ValueError(
                f"that would be about {expected:,.0f} requests, at most {MOST_REQUESTS:,} are simulated: "
                "lower rate, seconds or flooder"
            )

    @property
    def _others(self) -> int:
        return self.onoff + self.long + self.hot + self.cold

    @staticmethod
    def of(text: str) -> Spec:
        """From `tenants=20,rate=8`. Raises ValueError."""
        names = [entry.name for entry in fields(Spec)]
        values: dict[str, int | float | str] = {}
        for part in filter(None, map(str.strip, text.split(","))):
            name, equals, value = part.partition("=")
            if not equals or name not in names:
                raise ValueError(f"{part!r} is not NAME=NUMBER; names are {', '.join(names)}")
            is_whole = name not in ("skew", "rate", "seconds", "flooder")
            try:
                values[name] = value if name == "lengths" else int(value) if is_whole else float(value)
            except ValueError:
                wanted = "a whole number" if is_whole else "a number"
                raise ValueError(f"{name} must be {wanted}, not {value!r}") from None
        return Spec(**values)  # type: ignore[arg-type]

    def __str__(self) -> str:
        values = [(entry.name, getattr(self, entry.name), entry.default) for entry in fields(self)]
        return ",".join(f"{name}={value}" for name, value, usual in values if value != usual) or "defaults"


@dataclass(frozen=True, slots=True)
class _Tenant:
    name: str
    rate: float
    kind: str = "ordinary"


@dataclass(frozen=True, slots=True)
class Generated:
    """Requests drawn from a spec; implements `Source`. The same seed draws the same ones."""

    spec: Spec
    seed: int = 0
    tier: int = field(default=1)

    @property
    def name(self) -> str:
        return f"generated ({self.spec}; seed {self.seed})"

    @property
    def has_prefixes(self) -> bool:
        return self.spec.hot + self.spec.cold > 0

    def __iter__(self) -> Iterator[SimulatedRequest]:
        return heapq.merge(
            *(self._stream(number, tenant) for number, tenant in enumerate(self._tenants())),
            key=lambda request: request.arrival_s,
        )

    def _tenants(self) -> list[_Tenant]:
        spec = self.spec
        shares = [1 / rank**spec.skew for rank in range(1, spec.tenants + 1)]
        tenants = [
            _Tenant(f"zipf-{rank}", spec.rate * share / sum(shares)) for rank, share in enumerate(shares, 1)
        ]
        if spec.flooder:
            tenants.append(_Tenant("flooder", spec.rate * spec.flooder))
        for kind in ("onoff", "long", "hot", "cold"):
            for number in range(1, getattr(spec, kind) + 1):
                tenants.append(_Tenant(f"{kind}-{number}", spec.rate / spec.tenants, kind))
        return tenants

    def _stream(self, number: int, tenant: _Tenant) -> Iterator[SimulatedRequest]:
        spec = self.spec
        rng = random.Random(f"{self.seed} {tenant.name}")
        draw = LENGTHS[spec.lengths]
        shared = SHARED_BLOCKS * PREFIX_BLOCK_TOKENS
        own_block = 1_000_000 * (number + 1)
        at_s = rng.expovariate(tenant.rate)
        while at_s < spec.seconds:
            input_tokens, output_tokens = draw(rng)
            blocks: tuple[int, ...] = ()
            if tenant.kind == "long":
                input_tokens = min(LONGEST_CONTEXT, LONG_FACTOR * input_tokens)
            elif tenant.kind in ("hot", "cold"):
                input_tokens = min(LONGEST_CONTEXT, shared + input_tokens)
            if tenant.kind == "hot":
                blocks = tuple(range(own_block, own_block + SHARED_BLOCKS))
            if tenant.kind != "onoff" or int(at_s / SILENT_S) % 2 == 0:
                yield SimulatedRequest(at_s, tenant.name, input_tokens, output_tokens, blocks, self.tier)
            at_s += rng.expovariate(tenant.rate)


@dataclass(frozen=True, slots=True)
class AllAtOnce:
    """The first `count` requests of a source, all waiting from the first instant; implements `Source`."""

    source: Generated
    count: int

    @property
    def name(self) -> str:
        return f"{self.count:,} at once of {self.source.name}"

    @property
    def has_prefixes(self) -> bool:
        return self.source.has_prefixes

    def __iter__(self) -> Iterator[SimulatedRequest]:
        for number, request in enumerate(self.source):
            if number == self.count:
                return
            yield replace(request, arrival_s=0.0)
