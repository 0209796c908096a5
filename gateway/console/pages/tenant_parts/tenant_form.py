"""The form of a tenant: from a stored tenant, and to commands. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gateway.console.form_errors import FormProblem
from gateway.console.names import names_in
from tenants.errors import Invalid
from tenants.nouns.tenant import Tenant, TenantChange, TenantCreate
from tenants.typed import decimal_typed
from tenants.types import Tier

TIER_FIELDS = {tier: f"tier_{tier.value}" for tier in Tier}
FIELDS = (
    "name",
    "display_name",
    "weight",
    "default_tier",
    *TIER_FIELDS.values(),
    "models",
    "on_low_budget",
    "reserved_tokens_per_s",
    "reserved_tier",
    "labels",
)
NEW_TENANT = {
    "weight": "1",
    "default_tier": Tier.STANDARD.value,
    TIER_FIELDS[Tier.STANDARD]: "yes",
    TIER_FIELDS[Tier.BATCH]: "yes",
    "on_low_budget": "refuse",
    "reserved_tokens_per_s": "0",
    "reserved_tier": "all",
}
RESERVED_TIERS = [("all", "all tiers"), *((tier.value, tier.value) for tier in Tier)]
LABELS = {
    "display_name": "Display name",
    "weight": "Weight",
    "default_tier": "Default tier",
    "models": "Models",
    "on_low_budget": "When the budget runs low",
    "reserved_tokens_per_s": "Reserved cost tokens a second",
    "reserved_tier": "Reserved for the tier",
    "labels": "Labels",
} | {field: f"Tier {tier.value}" for tier, field in TIER_FIELDS.items()}


def stored_in_form(tenant: Tenant) -> dict[str, str]:
    return {
        "name": tenant.name,
        "display_name": tenant.display_name or "",
        "weight": f"{tenant.weight:g}",
        "default_tier": tenant.default_tier.value,
        **{field: "yes" if tier in tenant.tiers else "" for tier, field in TIER_FIELDS.items()},
        "models": ", ".join(sorted(tenant.models or ())),
        "on_low_budget": tenant.on_low_budget.value,
        "reserved_tokens_per_s": f"{tenant.reserved_tokens_per_s:g}",
        "reserved_tier": "all" if tenant.reserved_tier is None else tenant.reserved_tier.value,
        "labels": "\n".join(
            f"{key}={value}" for key, values in sorted(tenant.labels.items()) for value in values
        ),
    }


def differences(
    labels: Mapping[str, str], typed: Mapping[str, str], stored: Mapping[str, str]
) -> list[tuple[str, str, str]]:
    """Differences between the form and the store: label, stored, typed."""
    return [
        (label, stored[field] or "–", typed[field] or "–")
        for field, label in labels.items()
        if typed[field] != stored[field]
    ]


def create_of(form: Mapping[str, str]) -> TenantCreate:
    return TenantCreate(
        name=form.get("name", ""),
        weight=_number(form, "weight"),
        tier=form.get("default_tier", ""),
        tiers=_tiers(form),
        on_low_budget=form.get("on_low_budget", ""),
        reserved_tokens_per_s=_number(form, "reserved_tokens_per_s"),
        reserved_tier=form.get("reserved_tier", ""),
        display_name=form.get("display_name", ""),
    )


def change_of(form: Mapping[str, str], stored: Tenant) -> TenantChange:
    """Takes labels and models (whose names may have spaces) only where they differ. Raises `Invalid`."""
    before = stored_in_form(stored)
    return TenantChange(
        weight=_number(form, "weight"),
        tier=form.get("default_tier", ""),
        tiers=_tiers(form),
        models=None if form.get("models") == before["models"] else names_in(form.get("models", "")),
        on_low_budget=form.get("on_low_budget", ""),
        reserved_tokens_per_s=_number(form, "reserved_tokens_per_s"),
        reserved_tier=form.get("reserved_tier", ""),
        display_name=form.get("display_name", ""),
        labels=None if form.get("labels") == before["labels"] else _labels(form.get("labels", ""), stored),
    )


def _labels(text: str, stored: Tenant) -> dict[str, list[str]]:
    """Each label's values, none for a missing stored label. Raises `Invalid`, which names the line."""
    labels: dict[str, list[str]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        key, separator, value = line.strip().partition("=")
        if not separator or not key.strip() or not value.strip():
            raise Invalid("labels", f"line {number}: {line.strip()[:40]!r} is not LABEL=VALUE")
        labels.setdefault(key.strip(), []).append(value.strip())
    return {key: [] for key in stored.labels if key not in labels} | labels


def errors_by_field(problem: FormProblem) -> FormProblem:
    """Moves errors of `tier` and `tiers` to the fields they were typed into."""
    moved = {"tier": "default_tier", "tiers": TIER_FIELDS[Tier.BATCH]}
    return replace(problem, errors={moved.get(field, field): text for field, text in problem.errors.items()})


def _tiers(form: Mapping[str, str]) -> list[str]:
    chosen = [tier.value for tier, field in TIER_FIELDS.items() if form.get(field)]
    if not chosen:
        raise Invalid("tiers", "choose at least one tier")
    return chosen


def _number(form: Mapping[str, str], field: str) -> float:
    return float(decimal_typed(field, form.get(field, "")))
