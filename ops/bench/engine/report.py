"""Tables of a comparison of engines."""

from __future__ import annotations

from typing import Any

from ops.bench.common.report import DISTURBED, spread, spread_text
from ops.reporting import Report

_TIMES = ("ttft", "tpot", "itl", "e2e")


def show(report: dict[str, Any]) -> None:
    workload, model, machine = report["workload"], report["model"], report["machine"]
    print(
        f"{model['name']} {model['dtype']} on {machine['device']} ({machine['cpu']}, {machine['threads']} "
        f"threads); {workload['requests']} requests, {workload['prompt_tokens']:,} prompt and "
        f"{workload['output_tokens']:,} output tokens, "
        + (
            f"Poisson at {report['rate_per_s']:.3f} requests/s"
            if report["arrivals"] == "poisson"
            else "all at once"
        )
    )
    _show_engines(report)
    _show_ratios(report)
    for name, agreed in report["agreement"].items():
        print(
            f"tokens against {name}: {agreed['identical_requests']} of {agreed['requests']} requests"
            f" identical, {agreed['divergences']} divergences in {agreed['compared_tokens']:,} compared"
            f" tokens ({agreed['distinct_tokens']} distinct)"
        )
    if report["mask_s"] is not None:
        print(
            f"a grammar's mask: {1e6 * report['mask_s']:.0f} us of processor time a row; time between two"
            f" tokens: {_milliseconds(report['engines']['fairgate']['runs'], 'itl_s')} ms (p50 / p99)"
        )
    if "roofline" in report:
        _show_roofline(report["roofline"])
    if any(run["disturbed"] for engine in report["engines"].values() for run in engine["runs"]):
        print(DISTURBED)


def _show_engines(report: dict[str, Any]) -> None:
    rows = []
    for name, engine in report["engines"].items():
        runs = engine["runs"]
        peaks = [run["serving_peak_bytes"] or run["peak_bytes"] for run in runs]
        rows.append(
            {
                "engine": name + ("*" if any(run["disturbed"] for run in runs) else ""),
                "tokens/s": spread_text(engine["output_tokens_per_s"]),
                **{f"{time.upper()} ms p50/p99": _milliseconds(runs, f"{time}_s") for time in _TIMES},
                "MB serving": f"{max(peaks) / 1e6:,.0f}",
                "MB peak": f"{max(run['peak_bytes'] for run in runs) / 1e6:,.0f}",
                "cores": f"{spread([run['own_cores'] for run in runs])['median']:.2f}",
            }
        )
    Report("medians of the runs", [(heading, heading) for heading in rows[0]], rows).show()


def _milliseconds(runs: list[dict[str, Any]], latency: str) -> str:
    points = []
    for point in ("p50", "p99"):
        values = [run[latency][point] for run in runs if run[latency][point] is not None]
        points.append(f"{1000 * spread(values)['median']:.1f}" if values else "-")
    return " / ".join(points)


def _show_ratios(report: dict[str, Any]) -> None:
    rows = [
        {"peer": name, "metric": metric, "ratio": spread_text(ratio, ".3f")}
        for name, metrics in report["ratios"].items()
        for metric, ratio in metrics.items()
    ]
    if rows:
        Report("ours over the peer's, by repetition", [(key, key) for key in rows[0]], rows).show()


def _show_roofline(roofline: dict[str, Any]) -> None:
    if "unknown" in roofline:
        print(f"roofline: {roofline['unknown']}")
        return
    limits, best = roofline["limits"], roofline["ideal"]
    shares = ", ".join(f"{name} {100 * share:.1f} %" for name, share in roofline["share_of_ideal"].items())
    print(
        f"roofline: {limits['read_bytes_per_s'] / 1e9:.1f} GB/s read, {limits['flops_per_s'] / 1e9:.0f} "
        f"GFLOP/s; ideal {best['output_tokens_per_s']:,.0f} tokens/s, {best['memory_bound_steps']} of "
        f"{best['decode_steps']} decode steps memory-bound; reached: {shares}"
    )
