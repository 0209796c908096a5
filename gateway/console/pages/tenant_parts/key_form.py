"""The form of a key: from a stored key, and to commands. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, date, datetime

from gateway.console.form_errors import FormProblem
from gateway.console.names import names_in
from gateway.console.pages.tenant_parts.tenant_form import TIER_FIELDS
from tenants.errors import Invalid
from tenants.nouns.key import ApiKey, KeyChange
from tenants.nouns.tenant import tier_names
from tenants.types import SCOPES, Tier

SCOPE_FIELDS = {scope: f"scope_{scope.replace(':', '_')}" for scope in sorted(SCOPES)}
OWNERS_SCOPES = frozenset({"admin:read", "admin:write"})
"""Scopes of the whole admin API, not of a tenant."""
LABELS = {
    "name": "Name",
    "display_name": "Display name",
    "default_tier": "Default tier",
    **{field: f"Tier {tier.value}" for tier, field in TIER_FIELDS.items()},
    "models": "Models",
    **{field: f"May {scope}" for scope, field in SCOPE_FIELDS.items()},
    "ends": "Ends",
    "allow_from": "Only from these networks",
}
CHANGED = tuple(LABELS)
"""Fields of the form that changes a key."""
MOVED = {"tiers": TIER_FIELDS[Tier.BATCH], "scopes": SCOPE_FIELDS["inference"], "expires": "ends"}
"""Form fields of command fields with other names."""


def stored_in_form(key: ApiKey) -> dict[str, str]:
    return {
        "name": key.name,
        "display_name": key.display_name or "",
        "default_tier": "" if key.default_tier is None else key.default_tier.value,
        **{field: "yes" if tier in (key.tiers or ()) else "" for tier, field in TIER_FIELDS.items()},
        "models": ", ".join(sorted(key.models or ())),
        **{field: "yes" if scope in key.scopes else "" for scope, field in SCOPE_FIELDS.items()},
        "ends": "" if key.expires_at is None else _end_words(key.expires_at),
        "allow_from": ", ".join(str(network) for network in key.allow_from),
    }


def change_of(form: Mapping[str, str], stored: ApiKey, *, is_owner: bool) -> KeyChange:
    """Only what differs from the stored key. Raises `Invalid`."""
    before, typed = stored_in_form(stored), {name: form.get(name, "") for name in CHANGED}
    check_scopes(stored.scopes, is_owner=is_owner)
    scopes = [scope for scope, field in SCOPE_FIELDS.items() if typed[field]]
    check_scopes(scopes, is_owner=is_owner)
    tiers = [tier.value for tier, field in TIER_FIELDS.items() if typed[field]]

    def is_same(*names: str) -> bool:
        return all(typed[name] == before[name] for name in names)

    return KeyChange(
        name=None if is_same("name") else typed["name"],
        display_name=None if is_same("display_name") else typed["display_name"],
        default_tier=None if is_same("default_tier") else typed["default_tier"],
        tiers=None if is_same(*TIER_FIELDS.values()) else tiers,
        models=None if is_same("models") else names_in(typed["models"]),
        scopes=None if is_same(*SCOPE_FIELDS.values()) else scopes,
        expires=None if is_same("ends") else end_typed("ends", typed["ends"]) or "",
        allow_from=None if is_same("allow_from") else names_in(typed["allow_from"]),
    )


def check_scopes(scopes: Iterable[str], *, is_owner: bool) -> None:
    """A member must not get a key with an owner's scopes. Raises `Invalid`."""
    if not is_owner and not OWNERS_SCOPES.isdisjoint(scopes):
        raise Invalid("scopes", "only an owner may change a key of the admin API, or see its secret")


def end_typed(field: str, text: str) -> str | None:
    """A date becomes the start of its day in UTC; an instant stays; None: no end. Raises `Invalid`."""
    text = text.strip()
    try:
        if len(text) == len("2027-01-31"):
            day = date.fromisoformat(text)
            return datetime(day.year, day.month, day.day, tzinfo=UTC).isoformat()
        if text and datetime.fromisoformat(text).tzinfo is None:
            raise ValueError
    except ValueError:
        raise Invalid(
            field, "give a date such as 2027-01-31, or an instant with a time zone, or leave it empty"
        ) from None
    return text or None


def tiers_shown(tiers: frozenset[Tier]) -> list[tuple[str, str]]:
    return [("", "as its tenant"), *((name, name) for name in tier_names(tiers))]


def errors_by_field(problem: FormProblem) -> FormProblem:
    """Moves errors of command fields to the fields they were typed into."""
    return replace(problem, errors={MOVED.get(field, field): text for field, text in problem.errors.items()})


def _end_words(end: datetime) -> str:
    end = end.astimezone(UTC)
    return (
        end.date().isoformat()
        if end == datetime(end.year, end.month, end.day, tzinfo=UTC)
        else end.isoformat()
    )
