"""The panels of the Grafana dashboards: titles, what each is good for, and its queries.

In a query `<…>` are a selector's matchers beside that of the job, and `[R]` is Grafana's rate interval.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Panel:
    """One chart: queries by legend, and what it is good for."""

    title: str
    about: str
    queries: dict[str, str]
    unit: str = "short"


def quantiles(metric: str, by: str, *wanted: float) -> dict[str, str]:
    rate = f"sum by (le, {by}) (rate({metric}_bucket<>[R]))"
    return {f"p{q * 100:g} {{{{{by}}}}}": f"histogram_quantile({q:g}, {rate})" for q in wanted}


FAIRNESS = [
    Panel("Requests that wait", "By tier.", {"{{tier}}": "sum by (tier) (fairgate_queued<>)"}),
    Panel("Requests that run", "Dispatched and not finished.", {"running": "sum(fairgate_running<>)"}),
    Panel(
        "Wait in the queue",
        "Arrival to dispatch.",
        quantiles("fairgate_wait_seconds", "tier", 0.5, 0.99),
        "s",
    ),
    Panel(
        "Time before the line",
        "Reading, tokenising and reserving: high where stores or the gateway are slow.",
        quantiles("fairgate_before_line_seconds", "tier", 0.5, 0.99),
        "s",
    ),
    Panel(
        "Furthest behind its fair share",
        "Cost tokens that the tenant furthest behind lacks. One that is served late catches up; a lag that"
        " grows and stays is unfair.",
        {"{{model}} {{tier}}": "max by (model, tier) (fairgate_fair_share_lag_tokens<>)"},
    ),
    Panel(
        "Who had the steps of those that sat out",
        "Decoding sequences without a token in a step, by who had it.",
        {"{{cause}} {{tier}}": "sum by (cause, tier) (rate(fairgate_decode_sat_out_steps_total<>[R]))"},
        "cps",
    ),
    Panel(
        "Refused requests",
        "By error code.",
        {"{{code}}": "sum by (code) (rate(fairgate_refusals_total<>[R]))"},
        "reqps",
    ),
    Panel(
        "Ended requests",
        "By outcome.",
        {"{{outcome}}": "sum by (outcome) (rate(fairgate_requests_total<>[R]))"},
        "reqps",
    ),
]
SLO = [
    Panel(
        "Burn rate of error budgets, 1 hour",
        "At 1 the budget of 30 days lasts 30 days; 14.4 pages.",
        {
            "{{tier}} {{metric}}": 'sum by (tier, metric) (rate(fairgate_slo_requests_total<met="no">[1h]))'
            " / sum by (tier, metric) (rate(fairgate_slo_allowed_misses_total<>[1h]))"
        },
    ),
    Panel(
        "Targets met",
        "Share of the requests that a target binds.",
        {
            "{{tier}} {{metric}}": 'sum by (tier, metric) (rate(fairgate_slo_requests_total<met="yes">[R]))'
            " / sum by (tier, metric) (rate(fairgate_slo_requests_total<>[R]))"
        },
        "percentunit",
    ),
    Panel(
        "Missed targets by cause",
        "docs/explaining.md says what to do about each cause.",
        {"{{cause}}": "sum by (cause) (rate(fairgate_slo_misses_total<>[R]))"},
        "reqps",
    ),
    Panel("Time to first token", "", quantiles("fairgate_ttft_seconds", "tier", 0.5, 0.99), "s"),
    Panel("Arrival to end", "", quantiles("fairgate_e2e_seconds", "tier", 0.5, 0.99), "s"),
    Panel(
        "Time per output token",
        "By the model that was asked for.",
        quantiles("gen_ai_server_time_per_output_token_seconds", "gen_ai_request_model", 0.5, 0.99),
        "s",
    ),
    Panel(
        "Requests without an answer",
        "By OpenTelemetry's error type: an outcome or an error code.",
        {
            "{{error_type}}": "sum by (error_type)"
            ' (rate(gen_ai_server_request_duration_seconds_count<error_type!="">[R]))'
        },
        "reqps",
    ),
]
ENGINES = [
    Panel("Replicas", "1: serves.", {"{{replica}}": "max by (replica) (fairgate_engine_up<>)"}),
    Panel(
        "Sequences",
        "In the engines, by state.",
        {"{{replica}} {{state}}": "max by (replica, state) (fairgate_engine_sequences<>)"},
    ),
    Panel(
        "KV cache in use",
        "Referenced blocks of all.",
        {
            "{{replica}}": 'max by (replica) (fairgate_engine_kv_blocks<state="referenced">)'
            " / sum by (replica) (max by (replica, state) (fairgate_engine_kv_blocks<>))"
        },
        "percentunit",
    ),
    Panel("Steps", "", {"{{replica}}": "max by (replica) (rate(fairgate_engine_steps_total<>[R]))"}, "cps"),
    Panel(
        "Preemptions",
        "",
        {"{{replica}}": "max by (replica) (rate(fairgate_engine_preemptions_total<>[R]))"},
        "cps",
    ),
    Panel(
        "Output tokens by how they came",
        "floor: one each step; turn: in turns by weight.",
        {"{{way}} {{tier}}": "sum by (way, tier) (rate(fairgate_decode_tokens_total<>[R]))"},
        "cps",
    ),
]
MONEY = [
    Panel(
        "Charged, dollars an hour",
        "By tier.",
        {"{{tier}}": "sum by (tier) (rate(fairgate_cost_nanousd_total<>[R])) * 3600 / 1e9"},
        "currencyUSD",
    ),
    Panel(
        "Charged tokens",
        "Input and output.",
        {"{{kind}} {{tier}}": "sum by (kind, tier) (rate(fairgate_tokens_total<>[R]))"},
        "cps",
    ),
    Panel(
        "Told figures that were kept",
        "It should be near its level: 0.9 of what was told as p90.",
        {
            "{{figure}} {{kind}} {{level}}": "avg by (figure, kind, level) (fairgate_estimate_coverage<>)",
        },
        "percentunit",
    ),
    Panel(
        "Told figures compared",
        "With few of them the share that was kept says little.",
        {"{{kind}}": 'sum by (kind) (rate(fairgate_estimates_judged_total<figure="e2e",level="0.9">[R]))'},
        "reqps",
    ),
    Panel(
        "Settlements that are not durable",
        "They grow while the database is away.",
        {"pending": "sum(fairgate_settlements_pending<>)"},
    ),
    Panel(
        "Age of the oldest charge without a sum",
        "Sums of usage are folded in the background.",
        {"fold lag": "max(fairgate_usage_fold_lag_seconds<>)"},
        "s",
    ),
]
HEALTH = [
    Panel("Versions", "", {"{{version}} {{instance}}": "fairgate_build_info<>"}),
    Panel(
        "Event loop lag",
        "How late a gateway wakes: every request waits for it.",
        quantiles("fairgate_event_loop_lag_seconds", "instance", 0.5, 0.99),
        "s",
    ),
    Panel(
        "Database",
        "Time of a transaction.",
        quantiles("fairgate_database_seconds", "operation", 0.5, 0.99),
        "s",
    ),
    Panel("Connections", "Of clients.", {"{{instance}}": "fairgate_connections<>"}),
    Panel(
        "Overdue holds",
        "Older than their lease: of gateways that are dead or stalled.",
        {"{{instance}}": "fairgate_holds_overdue<>"},
    ),
    Panel(
        "Quota store away",
        "1: slices of the limits are given out without it.",
        {"{{instance}}": "fairgate_quota_store_local<>"},
    ),
    Panel(
        "History that could not be written",
        "Timelines and service by minute.",
        {
            "timelines": "sum(rate(fairgate_timelines_dropped_total<>[R]))",
            "service by minute": "sum(rate(fairgate_flow_rows_dropped_total<>[R]))",
        },
        "cps",
    ),
]
DASHBOARDS = {
    "fairness": ("Fairgate: fairness and queue", FAIRNESS),
    "slo": ("Fairgate: targets and causes", SLO),
    "engines": ("Fairgate: engines", ENGINES),
    "money": ("Fairgate: money and quotes", MONEY),
    "health": ("Fairgate: health", HEALTH),
}
"""Title and panels, by file name."""
