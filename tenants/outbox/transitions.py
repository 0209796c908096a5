"""Which incidents begin and end, by the conditions that hold now. Pure.

An alert fires once its condition has held for some time, and is resolved once that has been over for some
time (`kinds.py`). Conditions that could not be evaluated change nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tenants.instants import from_us
from tenants.outbox.kinds import BY_SUBJECT, AlertKind, Severity, runbook_path

MAX_ABOUT_CHARS = 160
MAX_SUMMARY_CHARS = 500
MAX_PAGE_CHARS = 300


@dataclass(frozen=True, slots=True)
class Condition:
    kind: AlertKind
    about: str
    """What it is about; unique among its kind."""
    summary: str
    tenant_id: str = ""
    """Whose it is; empty: the platform's."""
    page: str = "/console/alerts"
    """Of the console, with the evidence."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    severity: Severity | None = None
    """None: the kind's."""

    @property
    def key(self) -> str:
        return f"{self.kind.subject}:{self.about[:MAX_ABOUT_CHARS]}"


@dataclass(frozen=True, slots=True)
class ActiveSilence:
    until_us: int
    by: str
    reason: str


@dataclass(frozen=True, slots=True)
class Incident:
    incident_id: str
    key: str
    subject: str
    tenant_id: str
    severity: str
    summary: str
    evidence: Mapping[str, Any]
    page: str
    fired_us: int
    quiet_us: int | None = None
    """Since when it has been over, though not for long enough."""
    resolved_us: int | None = None
    acknowledged_us: int | None = None
    acknowledged_by: str | None = None
    silence: ActiveSilence | None = None
    """In force."""

    @property
    def problem(self) -> str:
        """The same for all alerts of one problem."""
        kind = BY_SUBJECT.get(self.subject)
        return self.key.rpartition(":")[0] if kind is not None and kind.has_levels else self.key

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.incident_id,
            "subject": self.subject,
            "state": "firing" if self.resolved_us is None else "resolved",
            "severity": self.severity,
            "tenant_id": self.tenant_id or None,
            "summary": self.summary,
            "evidence": dict(self.evidence),
            "page": self.page,
            "runbook": runbook_path(self.subject),
            "fired_at": from_us(self.fired_us).isoformat(),
            "resolved_at": _instant(self.resolved_us),
            "acknowledged_at": _instant(self.acknowledged_us),
            "acknowledged_by": self.acknowledged_by,
            "silenced_until": None if self.silence is None else _instant(self.silence.until_us),
            "silenced_by": None if self.silence is None else self.silence.by,
            "silence_reason": None if self.silence is None else self.silence.reason,
        }


def _instant(at_us: int | None) -> str | None:
    return None if at_us is None else from_us(at_us).isoformat()


@dataclass(frozen=True, slots=True)
class Transitions:
    fired: list[Condition] = field(default_factory=list)
    resolved: list[Incident] = field(default_factory=list)
    quiet: list[Incident] = field(default_factory=list)
    """Those that have just ended."""
    back: list[Incident] = field(default_factory=list)
    """Those that had ended, not for long enough, and hold again."""
    renewed: list[tuple[Incident, Condition]] = field(default_factory=list)
    """Those that go on and say something else by now."""

    def __bool__(self) -> bool:
        return bool(self.fired or self.resolved or self.quiet or self.back or self.renewed)


def ripe(
    conditions: Iterable[Condition], since_us: Mapping[str, int], now_us: int
) -> tuple[list[Condition], dict[str, int]]:
    """The conditions held for long enough, and since when each holds. `since_us`: the last result."""
    here = {condition.key: condition for condition in conditions}
    since = {key: since_us.get(key, now_us) for key in here}
    return [
        condition
        for key, condition in here.items()
        if now_us - since[key] >= condition.kind.after_s * 1_000_000
    ], since


def transitions(
    open_: Iterable[Incident], current: Iterable[Condition], looked_at: Collection[str], now_us: int
) -> Transitions:
    """`current`: all conditions that hold now of the subjects in `looked_at`."""
    conditions = {condition.key: condition for condition in current}
    changes = Transitions()
    for incident in open_:
        if (condition := conditions.pop(incident.key, None)) is not None:
            if incident.quiet_us is not None:
                changes.back.append(incident)
            if condition.summary[:MAX_SUMMARY_CHARS] != incident.summary:
                changes.renewed.append((incident, condition))
        elif incident.subject not in looked_at and incident.subject in BY_SUBJECT:
            continue
        elif now_us - (now_us if incident.quiet_us is None else incident.quiet_us) >= _quiet_us(incident):
            changes.resolved.append(incident)
        elif incident.quiet_us is None:
            changes.quiet.append(incident)
    changes.fired.extend(conditions.values())
    return changes


def _quiet_us(incident: Incident) -> int:
    """0: of a kind that this version does not know."""
    kind = BY_SUBJECT.get(incident.subject)
    return 0 if kind is None else kind.quiet_s * 1_000_000
