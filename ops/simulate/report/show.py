"""Shows a simulation's figures in a terminal and on a page of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ops.reporting import cell, number, table
from ops.simulate.run import Report

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]


def _seconds(name: str, quantile: str) -> Callable[[Row], str]:
    return lambda row: _number(row[name][quantile])


def _number(value: float | None) -> str:
    return "never" if value is None else number(value)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _policy(row: Row) -> str:
    return f"baseline: {row['policy']}" if row.get("is_baseline") else str(row["policy"])


def _times(*points: str) -> list[Column]:
    """These quantiles of TTFT, TPOT and E2E; each time's first column names it."""
    return [
        (f"{time} {point}, s" if point == points[0] else point, _seconds(f"{time.lower()}_s", point))
        for time in ("TTFT", "TPOT", "E2E")
        for point in points
    ]


LATENCY: list[Column] = [("policy", _policy), *_times("p50", "p90", "p95", "p99")]
SERVICE: list[Column] = [
    ("policy", _policy),
    ("met SLO", lambda row: _share(row["attainment"])),
    ("missed", lambda row: _share(row["violation_rate"])),
    ("goodput/s", lambda row: _number(row["goodput_per_s"])),
    ("requests/s", lambda row: _number(row["requests_per_s"])),
    ("output tok/s", lambda row: _number(row["output_tokens_per_s"])),
    ("Jain", lambda row: cell(row["jain_index"], ".4f")),
    ("gap/2U", lambda row: cell(row["service_gap_over_bound"])),
    ("refused", lambda row: f"{row['refused']:,}"),
    ("preempted", lambda row: f"{row['preemptions']:,}"),
]
DEVICES: list[Column] = [
    ("policy", _policy),
    ("busy", lambda row: _share(row["busy_share"])),
    ("idle gaps", lambda row: f"{row['idle_gaps']:,}"),
    ("longest, s", lambda row: _number(row["longest_idle_s"])),
    ("KV used", lambda row: _share(row["kv_use"])),
    ("at most", lambda row: _share(row["kv_use_most"])),
    ("prefix hits", lambda row: _share(row["prefix_hit_rate"])),
    ("padding", lambda row: _share(row["padding_share"])),
    ("recomputed", lambda row: f"{row['recomputed_tokens']:,}"),
    ("J/output token", lambda row: _energy(row)),
    ("span, s", lambda row: _number(row["span_s"])),
]
TENANT: list[Column] = [
    ("policy", _policy),
    ("tenant", lambda row: str(row["tenant"])),
    ("requests", lambda row: f"{row['requests']:,}"),
    *_times("p50", "p99"),
    ("met SLO", lambda row: _share(row["attainment"])),
]
TENANTS_SHOWN = 8


def _energy(row: Row) -> str:
    energy = row["energy"]
    return "-" if energy is None else _number(energy["joules_per_output_token"])


def heading(report: Report) -> str:
    replicas = f"{report['replicas']} replica{'s' if report['replicas'] != 1 else ''}"
    return f"{report['source']} on {replicas} of {report['machine']}; SLO {report['slo']}"


def sections(report: Report, tenants: int = TENANTS_SHOWN) -> list[tuple[str, list[str], list[list[str]]]]:
    simulated = report["policies"]
    rows = [report["recorded"], *simulated] if "recorded" in report else simulated
    tables = [("latency", LATENCY, rows), ("service", SERVICE, rows), ("devices", DEVICES, simulated)]
    by_tenant = [
        {"policy": _policy(row), "tenant": tenant, **its}
        for row in rows
        for tenant, its in list(row["tenants"].items())[:tenants]
    ]
    if any(len(row["tenants"]) > 1 for row in rows):
        title = f"tenants with the most requests (at most {tenants}; all in --json)"
        tables.append((title, TENANT, by_tenant))
    return [
        (title, [name for name, _ in columns], [[text(row) for _, text in columns] for row in its])
        for title, columns, its in tables
    ]


def published(report: Report) -> list[tuple[str, str, str]]:
    return [
        (
            row["policy"],
            row["published"],
            f"{row['output_tokens_per_s']:,.0f} output tokens/s, "
            f"mean latency {_number(row['e2e_s']['mean'])} s, {100 * row['busy_share']:.0f} % busy",
        )
        for row in report["policies"]
        if "published" in row
    ]


def notes(report: Report) -> list[str]:
    said = [
        "Virtual time: nothing was measured. Misses count all submitted requests; a refused one is a miss.",
        f"Each replica: {report['kv_tokens']:,} tokens of KV, at most {report['max_sequences']} sequences, "
        f"{report['max_batched_tokens']:,} tokens a step; lengths forecast: {report['predictions']}.",
    ]
    if "recorded" in report:
        said.append(
            f"Recorded: the times that clients had, of answers that began; {report['unserved']:,} requests "
            "ended without a token and are left out. What was found in a prefix cache is not computed again."
        )
    if report.get("baseline"):
        said.append(f"Baseline against what clients had: {'; '.join(map(_compared, report['baseline']))}.")
        whole, part = report["policies"][0]["requests"], report["recorded"]["requests"]
        if whole != part:
            said.append(f"The baseline is of all {whole:,} requests, what is beside it of {part:,} of them.")
    elif "recorded" in report:
        said.append("No baseline: the recording does not name one server, so how true this is is not known.")
    if report.get("overrides"):
        said.append(f"Instead of what served: {'; '.join(report['overrides'])}.")
    if report["compared_requests"] is not None:
        said.append(
            "Simulated times hold what a simulation of the policy that served fell short of, drawn at random "
            f"from {report['compared_requests']:,} requests."
        )
    bases = {row["energy"]["basis"] for row in report["policies"] if row["energy"]}
    said += [f"Energy is an upper estimate: {basis}." for basis in sorted(bases)]
    return said


def _compared(figure: Row) -> str:
    name = figure["figure"].replace("_", " ").replace("ttft", "TTFT").replace("e2e", "E2E")
    error = (
        "not known of so few" if figure["stated_error"] is None else f"{100 * figure['stated_error']:.1f} %"
    )
    off = "never ends" if figure["off"] is None else f"{100 * figure['off']:+.1f} %"
    alone = _number(figure["simulated_alone_s"])
    return f"{name} {off} (stated error {error}; {alone} s of {_number(figure['served_s'])} s are simulated)"


def show(report: Report) -> None:
    if report.get("warning"):
        print(report["warning"])
    print(heading(report))
    for title, columns, rows in sections(report):
        print()
        table(title, columns, rows)
    claims = published(report)
    if claims:
        print()
        table("what was published of such a scenario, and ours", ("policy", "published", "ours"), claims)
    print()
    for note in notes(report):
        print(note)
