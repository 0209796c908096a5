"""The demo's report: tables on a terminal, and a page that stands alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ops.demo import forms, turns
from ops.demo.table import TIERS, percent, seconds
from ops.pages.charts import Bar, BarChart, Chart
from ops.pages.page import ReportPage, html
from ops.reporting import table_part

TIMES = ("TTFT p50", "TTFT p99", "E2E p50", "E2E p99")


def summary(report: Mapping[str, Any]) -> Group:
    return Group(*summary_parts(report))


def report_page(report: Mapping[str, Any]) -> str:
    parts = [part.plain if hasattr(part, "plain") else table_part(part) for part in summary_parts(report)]
    page = ReportPage("Fairgate demo: service, waits and the ledger", parts, _charts(report), exact=report)
    if report.get("failed"):
        page.warning = f"Not as it must be: {'; '.join(report['failed'])}"
    return html(page)


def _charts(report: Mapping[str, Any]) -> list[Chart]:
    shares = [
        Bar(f"{row['tenant']}, {row['tier']}", row["share_of_ideal"], f"{row['share_of_ideal']:.2f}")
        for row in report["tenants"]
        if row["share_of_ideal"] is not None
    ]
    told = [
        Bar(row["tier"], row["wait_s"]["under_told_p90"], f"{100 * row['wait_s']['under_told_p90']:.0f} %")
        for row in report["tiers"]
        if row["wait_s"]["under_told_p90"] is not None
    ]
    return [
        BarChart("Service over the fair share", shares, 1.0),
        BarChart("Waits under the told p90", told, 0.9),
    ]


def summary_parts(report: Mapping[str, Any]) -> list[Table | Text]:
    trace, requests = report["trace"], report["requests"]
    capacity, audit = report["capacity"], report["audit"]
    parts: list[Table | Text] = [
        Text(
            f"\n{requests['sent']} requests of {len(report['tenants'])} tenants in"
            f" {report['duration_s']:.0f} s: lengths x {trace['length_factor']}, time x"
            f" {trace['time_compression']:.1f}, {trace['passes']} pass(es) of"
            f" {100 * trace['kept_share']:.0f} % of the slice; offered load"
            f" {trace['offered_load']:.2f} x the measured capacity of {capacity['cost_tokens_per_s']:,.0f}"
            " cost tokens/s.\n"
            f"{requests['answered']} answered ({requests['ended_by_the_model']} ended by the model itself,"
            f" longest {requests['longest_answer_tokens']} tokens), {requests['refused']} refused."
        ),
        _tenant_table(report),
        _tier_table(report),
    ]
    waits = report["queue_wait_of_tenants_under_their_share"]
    simulated = ", ".join(f"{policy} {seconds(value)}" for policy, value in waits["simulated_p99_s"].items())
    fairness = report["fairness"]["service_over_fair_share_of_tenants_above_their_share"]
    parts.append(
        Text(
            f"Backlog: {report['backlog_s']:.0f} s. Dispatches: {audit['dispatches']}, {audit['compared']} of"
            f" them with another tenant waiting in the tier; inversions: {audit['inversions']}, unfair:"
            f" {audit['unfair_dispatches']}, unexplained ranks: {audit['untrue_ranks']}.\n"
            f"Tenants above their share got {percent(fairness['least'])} to {percent(fairness['most'])}"
            f" of their fair share.\n"
            f"p99 queue wait of tenants under their share: {seconds(waits['measured_p99_s'])} measured;"
            f" simulated on the same arrivals: {simulated or 'nothing'}.\n" + turns.line(report["turns"])
        )
    )
    if report["forms"]:
        parts.append(Text(forms.lines(report["forms"])))
    estimates = report["estimates"]
    wait, e2e, length = estimates["wait_s"], estimates["e2e_s"], estimates["output_tokens"]
    parts.append(
        Text(
            f"Estimates: wait within 2x for {percent(wait['share_within_2x'])} of requests, under p90 for"
            f" {percent(wait['p90_coverage'])}; latency {percent(e2e['share_within_2x'])},"
            f" {percent(e2e['p90_coverage'])}; length {percent(length['share_within_2x'])},"
            f" {percent(length['p90_coverage'])}; above the quoted maximum cost:"
            f" {estimates['cost_above_quoted_maximum']}."
        )
    )
    machine = report["machine"]
    if machine["too_busy_to_judge_times"]:
        parts.append(
            Text(
                "This machine was too busy to judge times: while the engine wanted a core, it waited for one"
                f" {percent(machine['engine_waited_for_a_core'])} of the time in its worst 5 s. Order, shares"
                " and the ledger are judged all the same."
            )
        )
    causes = ", ".join(f"{code} {count}" for code, count in report["refusals"].items()) or "none"
    ledger, pages = report["ledger"], report["ledger"]["pages"]
    shown = "exact" if not pages["differences"] else "NOT exact"
    state = "exact" if ledger["exact"] else f"NOT exact: {ledger['problems']}"
    parts.append(
        Text(
            f"Refusals: {causes}.\nLedger = counters: {state} ({ledger['settles']} settled requests)."
            f"\nPages of the console = ledger: {shown} over {pages['read']} pages."
        )
    )
    return parts


def _tenant_table(report: Mapping[str, Any]) -> Table:
    grid = Table(
        title="service against fair share",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    grid.add_column("tenant", no_wrap=True)
    grid.add_column("limit", no_wrap=True)
    for name in ("wt", "sent", "ref.", "service", "fair", "ratio", "TTFT p50", "p99"):
        grid.add_column(name, justify="right", no_wrap=True)
    for tier in TIERS:
        grid.add_row(Text(tier, style="italic"))
        rows = [row for row in report["tenants"] if row["tier"] == tier]
        for row in sorted(rows, key=lambda row: str(row["tenant"])):
            grid.add_row(
                row["tenant"] + (" *" if row["under_its_share"] else ""),
                row["limit"] or "",
                f"{row['weight']:g}",
                str(row["requests"]),
                str(row["refused"] or ""),
                f"{row['service_cost']:,.0f}",
                f"{row['fair_service_cost']:,.0f}",
                "" if row["share_of_ideal"] is None else f"{row['share_of_ideal']:.2f}",
                seconds(row["ttft_s"]["p50"]),
                seconds(row["ttft_s"]["p99"]),
            )
    grid.caption = (
        "* asked for less than its share. Service: input + 2 x output tokens, until the last arrival."
    )
    grid.caption_justify = "left"
    return grid


def _tier_table(report: Mapping[str, Any]) -> Table:
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    grid.add_column("tier")
    for name in ("requests", "answered", "quotes bind after", "wait p50", "p90", "under told p90", *TIMES):
        grid.add_column(name, justify="right")
    for row in report["tiers"]:
        wait, ttft, e2e = row["wait_s"], row["ttft_s"], row["e2e_s"]
        grid.add_row(
            row["tier"],
            str(row["requests"]),
            str(row["answered"]),
            "never" if row["quotes_bind_after"] is None else str(row["quotes_bind_after"]),
            seconds(wait["p50"]),
            seconds(wait["p90"]),
            percent(wait["under_told_p90"]),
            *(seconds(value) for value in (ttft["p50"], ttft["p99"], e2e["p50"], e2e["p99"])),
        )
    return grid
