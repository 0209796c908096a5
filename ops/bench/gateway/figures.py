"""Figures of a gateway's runs, beside no gateway and beside its peers, and its goals. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ops.bench.common.report import spread
from ops.bench.gateway.peers import DIRECT, ONE_WORKER, OURS, SCRAPED, TRACED, WATCHED, WORKERS

Runs = Mapping[str, Sequence[Mapping[str, Any]]]
"""By target, one entry a round."""

LATENCY_FIGURES = ("latency_p50_s", "latency_p99_s", "first_token_p50_s")
OWN_FIGURES = ("requests_per_s", "tokens_per_s", "cpu_s_per_request", "cpu_s_per_token", "peak_bytes")
BESIDE = {"watchers": WATCHED, "traces": TRACED, "scraper": SCRAPED}
COMPARED = {"requests_per_s": True, "tokens_per_s": True, "latency_p50_s": False, "first_token_p50_s": False}
"""Figures with a side load and without; True: more is better."""
FULL_CORE = 0.95
"""A process of one thread that uses more of a core is the bottleneck."""


def one_run(
    phases: Mapping[str, Mapping[str, Any]], *, peak_bytes: int, quiet_cores: float
) -> dict[str, Any]:
    single, many = phases["single"], phases["throughput"]
    first, streams = phases["first_token"], phases["streams"]
    others = max(phase["others_cores"] for phase in phases.values())
    cores = {
        name: {
            **{who: phase[f"{who}_cpu_s"] / phase["wall_s"] for who in ("gateway", "upstream", "side_load")},
            "clients": phase["cpu_share"],
            "others": phase["others_cores"],
        }
        for name, phase in phases.items()
    }
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
        "side_load": {
            "events_per_s": many["watched_events"] / many["wall_s"],
            "cores_throughput": cores["throughput"]["side_load"],
            "cores_streams": cores["streams"]["side_load"],
        },
        "cores": cores,
        "others_cores": others,
        "disturbed": others > quiet_cores,
        "invalid": _client_bound(cores),
    }


def _client_bound(cores: Mapping[str, Mapping[str, float]]) -> str | None:
    lines = [
        f"{name}: the clients used {100 * used['clients']:.0f} % of a core, the gateway"
        f" {100 * used['gateway']:.0f} %"
        for name, used in cores.items()
        if used["clients"] > FULL_CORE and 0 < used["gateway"] < FULL_CORE
    ]
    return "; ".join(lines) or None


def figures(runs: Runs) -> dict[str, dict[str, Any]]:
    return {
        name: {figure: spread([run[figure] for run in rounds]) for figure in (*LATENCY_FIGURES, *OWN_FIGURES)}
        | {f"added_{figure}": spread(added(runs, name, figure)) for figure in LATENCY_FIGURES}
        for name, rounds in runs.items()
    }


def added(runs: Runs, name: str, figure: str) -> list[float]:
    """By round: what the target adds to a latency of the upstream alone."""
    return [mine[figure] - bare[figure] for mine, bare in zip(runs[name], runs[DIRECT], strict=True)]


@dataclass(frozen=True, slots=True)
class Goal:
    """A requirement on our gateway, in the median of the rounds or pairs."""

    what: str
    bound: float
    is_least: bool
    """`bound` is the least that is good; else the most."""
    values: Sequence[float]

    def as_json(self) -> dict[str, Any]:
        figure = spread(self.values)
        ok = figure["median"] >= self.bound if self.is_least else figure["median"] <= self.bound
        return {"what": self.what, "at_least" if self.is_least else "at_most": self.bound, **figure, "ok": ok}


def promises(runs: Runs, pairs: Sequence[float] = ()) -> list[Goal]:
    """Those that can be judged with the targets that ran. `pairs`: requests/s with estimates over without."""
    goals: list[Goal] = []
    if (litellm := runs.get("litellm")) is not None:
        ours = runs[OURS]
        latencies = (added(runs, name, "latency_p50_s") for name in (OURS, "litellm"))
        latency = [mine / theirs for mine, theirs in zip(*latencies, strict=True)]
        goals += [
            Goal("requests/s over LiteLLM's", 10.0, True, _ratios(ours, litellm, "requests_per_s")),
            Goal("added p50 latency over LiteLLM's", 0.2, False, latency),
            Goal("streamed tokens/s over LiteLLM's", 10.0, True, _ratios(ours, litellm, "tokens_per_s")),
        ]
    if (several := runs.get(WORKERS)) is not None:
        for what, figure in (("request", "cpu_s_per_request"), ("streamed token", "cpu_s_per_token")):
            what = f"processor time of a {what} with several workers over one's"
            goals.append(Goal(what, 1.2, False, _ratios(several, runs[ONE_WORKER], figure)))
    if pairs:
        goals.append(Goal("requests/s over ours without estimates", 0.9, True, pairs))
    return goals


def beside(runs: Runs, name: str) -> dict[str, Any] | None:
    """Rounds with a side load beside those without; None: there were none."""
    if name not in runs:
        return None
    own = [run["side_load"] for run in runs[name]]
    return {figure: spread([row[figure] for row in own]) for figure in own[0]} | {
        "figures": compared(runs, name)
    }


def compared(runs: Runs, name: str) -> list[dict[str, Any]]:
    """Within the spread: the median with a side load is no worse than the worst round without."""
    rows = []
    for figure, is_more_better in COMPARED.items():
        bare, theirs = (spread([run[figure] for run in rounds]) for rounds in (runs[OURS], runs[name]))
        worst = bare["least"] if is_more_better else bare["most"]
        ok = theirs["median"] >= worst if is_more_better else theirs["median"] <= worst
        rows.append({"figure": figure, "without": bare, "with": theirs, "ok": ok})
    return rows


def invalid(runs: Runs) -> str | None:
    judged = [name for name in (OURS, ONE_WORKER, WORKERS, *BESIDE.values(), "litellm") if name in runs]
    lines = [
        f"{name}, round {number}: {run['invalid']}"
        for name in judged
        for number, run in enumerate(runs[name], 1)
        if run["invalid"]
    ]
    return "; ".join(lines) or None


def _ratios(
    ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]], figure: str
) -> list[float]:
    return [mine[figure] / other[figure] for mine, other in zip(ours, theirs, strict=True)]
