"""Steps for limits. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tenants.config_file.base import ConfigInvalid, Place
from tenants.config_file.document import ConfigLimit
from tenants.config_file.state import EACH_END_USER, PLATFORM_LIMIT, TENANT_LIMIT, SubjectName
from tenants.config_file.steps import ConfigStep, NamedOnce, differences, standing_at
from tenants.nouns.limit import NARROWER, TERMS, LimitSet, limit_as_json, limit_from
from tenants.nouns.limit_checks import limit_columns, narrowed_to
from tenants.types import PLATFORM, Limit, SubjectKind

LimitName = tuple[SubjectName, str, str, str, str, int]
"""What tells limits apart: subject, meter, shape, tier, model and size of request."""


def name_of(subject: SubjectName, limit: Limit) -> LimitName:
    if limit.window is not None:
        shape = limit.window.value
    else:
        shape = "bucket" if limit.is_bucket else "concurrency"
    tier = limit.tier.value if limit.tier else ""
    return subject, limit.meter.value, shape, tier, limit.model or "", limit.above_tokens


def name_in_file(tenant: str, part: ConfigLimit) -> LimitName:
    shape = part.window or ("concurrency" if part.rate_per_s is None else "bucket")
    subject = _subject(tenant, part, ())
    return subject, part.meter, shape, part.tier or "", part.model or "", part.above_tokens


def limit_in_file(
    tenant: str, part: ConfigLimit, at: Place, keys: Mapping[str, str]
) -> tuple[LimitSet, Limit]:
    """The command and the limit, without ids. Raises `ConfigInvalid`."""
    subject = _subject(tenant, part, at)
    command = _command(tenant, subject, part, keys)
    with standing_at(at):
        columns = limit_columns(command)
    return command, _limit(subject, columns)


def described(tenant: str, name: LimitName) -> str:
    """`acme: limit total_tokens per day of project web`."""
    subject, meter, shape, tier, model, above_tokens = name
    words = [f"limit {meter}"]
    words += [{"bucket": "rate", "concurrency": ""}.get(shape, f"per {shape}")]
    words += [f"in tier {tier}" if tier else "", f"for model {model}" if model else ""]
    words += [f"above {above_tokens} tokens" if above_tokens else ""]
    words += [f"of {subject}" if subject.kind not in (PLATFORM_LIMIT, TENANT_LIMIT) else ""]
    return f"{tenant or PLATFORM_LIMIT}: {' '.join(filter(None, words))}"


def limit_steps(
    tenant: str,
    wanted: Sequence[ConfigLimit],
    there: Mapping[LimitName, Limit],
    keys: Mapping[str, str],
    projects: Iterable[str],
    place: Place,
) -> Iterator[ConfigStep]:
    """Steps for one tenant's limits, or (tenant '') the platform's. `keys`: ids by name; of a planned key its
    name, of an expired one none; `projects`: existing and planned names."""
    seen, known = NamedOnce(), frozenset(projects)
    for number, part in enumerate(wanted):
        at = (*place, number)
        subject = _subject(tenant, part, at)
        if part.state == "present" and part.amount is None:
            raise ConfigInvalid((*at, "amount"), "is missing: say how much the limit allows")
        if subject.kind == "project" and subject.name not in known:
            raise ConfigInvalid((*at, "project"), f"the tenant has no project {subject.name!r}")
        if subject.kind == "key" and part.state == "present" and subject.name not in keys:
            raise ConfigInvalid(
                (*at, "key"),
                f"the tenant has no key {subject.name!r} that alone has this name: name one in its `keys`",
            )
        command, after = limit_in_file(tenant, part, at, keys)
        name = name_of(subject, after)
        what = described(tenant, name)
        if subject.kind == "key" and keys.get(subject.name) == "":
            continue
        seen.add(name, f"the {what.partition(': ')[2]}", at)
        yield from _steps_of(tenant, what, part, there.get(name), after, command, at)


def _steps_of(
    tenant: str, what: str, part: ConfigLimit, old: Limit | None, after: Limit, command: LimitSet, at: Place
) -> Iterator[ConfigStep]:
    before = None if old is None else limit_as_json(old)
    if part.state == "absent":
        if old is not None:
            changes = differences(before, None)
            yield ConfigStep("limit.remove", what, at, None, changes, tenant, old.limit_id)
        return
    if old is not None and old.window is not None and old.time_zone != after.time_zone:
        # Windows of another time zone have usage of their own: the limit starts anew.
        yield ConfigStep("limit.remove", what, at, None, differences(before, None), tenant, old.limit_id)
        before = None
    changes = differences(before, limit_as_json(after))
    if changes:
        yield ConfigStep("limit.set", what, at, command, changes, tenant)


def _subject(tenant: str, part: ConfigLimit, at: Place) -> SubjectName:
    named = narrowed_to(part)
    if not tenant and named:
        raise ConfigInvalid((*at, named[0]), "a limit of the platform binds all tenants: move it to a tenant")
    if len(named) > 1:
        raise ConfigInvalid((*at, named[1]), f"a limit binds one subject: leave out {' or '.join(named)}")
    if not named:
        return SubjectName(TENANT_LIMIT if tenant else PLATFORM_LIMIT)
    return SubjectName(named[0], "" if part.each_end_user else str(getattr(part, named[0])))


def _command(tenant: str, subject: SubjectName, part: ConfigLimit, keys: Mapping[str, str]) -> LimitSet:
    given = {name: getattr(part, name) for name in (*TERMS, *NARROWER)}
    if part.amount is None:
        given["amount"] = 1  # of what is to be removed any amount will do
    if part.key is not None:
        given["key"] = keys.get(subject.name, part.key)
    return LimitSet(tenant=tenant or None, platform=not tenant, **given)


def _limit(subject: SubjectName, columns: Mapping[str, Any]) -> Limit:
    """The limit that the act's columns will be read as."""
    kind = SubjectKind.END_USER if subject.kind == EACH_END_USER else SubjectKind(subject.kind)
    row: Any = {
        "id": "",
        "tenant_id": PLATFORM,
        "kind": kind.value,
        "subject_id": "",
        "created_us": 0,
        **columns,
    }
    return limit_from(row)
