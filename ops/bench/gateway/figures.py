"""What do a gateway's runs say: beside no gateway, beside its peers, beside what is promised?

Pure arithmetic. A figure that compares two targets compares runs of the same round, which lie next to one
another in time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ops.bench.engine.metrics import spread
from ops.bench.gateway.peers import DIRECT, OURS

Runs = Mapping[str, Sequence[Mapping[str, Any]]]
"""By target, one entry a round."""

LATENCY_FIGURES = ("latency_p50_s", "latency_p99_s", "first_token_p50_s")
OWN_FIGURES = (
    "requests_per_s",
    "tokens_per_s",
    "cpu_s_per_request",
    "cpu_s_per_token",
    "peak_bytes",
)


def one_run(
    phases: Mapping[str, Mapping[str, Any]], *, peak_bytes: int, quiet_cores: float
) -> dict[str, Any]:
    """One target's round: its figures, and who used how many cores while they were taken."""
    single, many = phases["single"], phases["throughput"]
    first, streams = phases["first_token"], phases["streams"]
    others = max(phase["others_cores"] for phase in phases.values())
    return {
        "latency_p50_s": single["latency_s"]["p50"],
        "latency_p99_s": single["latency_s"]["p99"],
        "first_token_p50_s": first["first_token_s"]["p50"],
        "requests_per_s": many["requests_in_time"] / many["seconds"],
        "tokens_per_s": streams["tokens_in_time"] / streams["seconds"],
        "cpu_s_per_request": many["gateway_cpu_s"] / many["requests"],
        "cpu_s_per_token": streams["gateway_cpu_s"] / streams["tokens"],
        "tokens_per_event": streams["tokens"] / streams["events"],
        "peak_bytes": peak_bytes,
        "cores": {
            name: {
                **{
                    who: phase[f"{who}_cpu_s"] / phase["wall_s"] for who in ("gateway", "upstream", "clients")
                },
                "others": phase["others_cores"],
            }
            for name, phase in phases.items()
        },
        "others_cores": others,
        "disturbed": others > quiet_cores,
    }


def figures(runs: Runs) -> dict[str, dict[str, Any]]:
    """By target: median, extremes and values of each figure; latencies also as what the target adds to
    them."""
    found: dict[str, dict[str, Any]] = {}
    for name, rounds in runs.items():
        found[name] = {
            figure: spread([each[figure] for each in rounds]) for figure in (*LATENCY_FIGURES, *OWN_FIGURES)
        }
        for figure in LATENCY_FIGURES:
            found[name][f"added_{figure}"] = spread(added(runs, name, figure))
    return found


def added(runs: Runs, name: str, figure: str) -> list[float]:
    """By round: what the target adds to a latency of the upstream alone."""
    return [mine[figure] - bare[figure] for mine, bare in zip(runs[name], runs[DIRECT], strict=True)]


@dataclass(frozen=True, slots=True)
class Goal:
    """What ours must reach, in the median of the rounds or pairs."""

    what: str
    bound: float
    is_least: bool
    """`bound` is the least that is good; else the most."""
    values: Sequence[float]

    def as_json(self) -> dict[str, Any]:
        """A row of the report."""
        found = spread(self.values)
        ok = found["median"] >= self.bound if self.is_least else found["median"] <= self.bound
        return {"what": self.what, "at_least" if self.is_least else "at_most": self.bound, **found, "ok": ok}


def promises(runs: Runs, pairs: Sequence[float] = ()) -> list[Goal]:
    """Those that can be judged with the targets that ran. `pairs`: requests a second with estimates over
    those without."""
    ours = runs[OURS]
    first_ms = [1000 * value for value in added(runs, OURS, "first_token_p50_s")]
    found = [Goal("added time to the first token, ms", 1.0, False, first_ms)]
    if (litellm := runs.get("litellm")) is not None:
        latency = [
            mine / theirs
            for mine, theirs in zip(
                added(runs, OURS, "latency_p50_s"), added(runs, "litellm", "latency_p50_s"), strict=True
            )
        ]
        found += [
            Goal("requests/s over LiteLLM's", 12.0, True, _ratios(ours, litellm, "requests_per_s")),
            Goal("added p50 latency over LiteLLM's", 1 / 8, False, latency),
            Goal("streamed tokens/s over LiteLLM's", 12.0, True, _ratios(ours, litellm, "tokens_per_s")),
        ]
    if (portkey := runs.get("portkey")) is not None:
        found.append(Goal("requests/s over Portkey's", 1.0, True, _ratios(ours, portkey, "requests_per_s")))
    if pairs:
        found.append(Goal("requests/s over ours without estimates", 0.95, True, pairs))
    return found


def _ratios(
    ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]], figure: str
) -> list[float]:
    return [mine[figure] / other[figure] for mine, other in zip(ours, theirs, strict=True)]
