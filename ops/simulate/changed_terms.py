"""Other terms for recorded traffic: weights of tenants, and limits out of a configuration file. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from msgspec.structs import replace as with_fields

from ops.simulate.recorded import Recorded, RecordedAnswer
from ops.simulate.traffic.requests import BadTrace
from tenants.config_file.base import ConfigInvalid, Place
from tenants.config_file.document import ConfigLimit
from tenants.config_file.plan_limits import LimitName, described, limit_in_file, name_in_file, name_of
from tenants.config_file.state import PLATFORM_LIMIT, TENANT_LIMIT, SubjectName
from tenants.config_file.yaml_reader import ConfigFileText, read_file
from tenants.errors import Invalid
from tenants.nouns.limit import rate_in_words
from tenants.nouns.limit_checks import narrowed_to
from tenants.nouns.tenant import MAX_WEIGHT, MIN_WEIGHT, checked_weight
from tenants.types import PLATFORM, Limit, Meter, RequestTraits, SubjectKind, Tier

ALL_TENANTS = ""
"""The platform, in place of a tenant's name."""
_SUBJECTS = {SubjectKind.TENANT: TENANT_LIMIT, SubjectKind.PLATFORM: PLATFORM_LIMIT}


@dataclass(frozen=True, slots=True)
class ChangedLimit:
    tenant: str
    """Its name; `ALL_TENANTS`: of the platform."""
    name: LimitName
    limit: Limit | None

    def concerns(self, tenant: str) -> bool:
        return self.tenant in (ALL_TENANTS, tenant)


def weights_asked(texts: Iterable[str]) -> dict[str, float]:
    """Weights by tenant, of texts such as `acme=2`. Raises ValueError."""
    weights: dict[str, float] = {}
    for text in texts:
        tenant, separator, value = text.rpartition("=")
        if not separator or not tenant.strip():
            raise ValueError(f"--weight {text!r} is not TENANT=WEIGHT")
        try:
            weights[tenant.strip()] = checked_weight(float(value))
        except (Invalid, ValueError):
            least, most = MIN_WEIGHT, MAX_WEIGHT
            raise ValueError(f"--weight {text!r}: a weight lies between {least:g} and {most:g}") from None
    return weights


def limits_in_file(content: bytes) -> list[ChangedLimit]:
    """The limits of a configuration file. Raises `BadFile`, with the line."""
    file = read_file(content)
    try:
        return _limits_of(file)
    except ConfigInvalid as error:
        raise file.bad(error) from None


def _limits_of(file: ConfigFileText) -> list[ChangedLimit]:
    wanted = file.wanted
    limits = [
        _changed(ALL_TENANTS, part, ("platform_limits", number))
        for number, part in enumerate(wanted.platform_limits)
    ]
    for place, tenant in enumerate(wanted.tenants):
        for number, part in enumerate(tenant.limits):
            limits.append(_changed(tenant.name, part, ("tenants", place, "limits", number)))
    return limits


def _changed(tenant: str, part: ConfigLimit, at: Place) -> ChangedLimit:
    if narrower := narrowed_to(part):
        raise ConfigInvalid(
            (*at, narrower[0]), "which of them sent a request is not recorded: leave this limit out"
        )
    if part.state == "present" and part.amount is None:
        raise ConfigInvalid((*at, "amount"), "is missing: say how much the limit allows")
    _, limit = limit_in_file(tenant, part, at, {})
    subject_id = tenant or PLATFORM
    # Counters are by subject: of a tenant its name does.
    limit = replace(limit, limit_id=str(at), tenant_id=subject_id, subject_id=subject_id)
    return ChangedLimit(tenant, name_in_file(tenant, part), limit if part.state == "present" else None)


def with_terms(
    recorded: Recorded, model: str, weights: Mapping[str, float], limits: Iterable[ChangedLimit]
) -> tuple[Recorded, list[str]]:
    """The traffic under these terms, and a line for each replaced one. Raises `BadTrace`."""
    changed = list({(limit.tenant, limit.name): limit for limit in limits}.values())
    recorded.of(list(weights))  # each of them sent something
    tenants = {answer.tenant for answer in recorded.served}
    if changed and not any(limit.concerns(tenant) for limit in changed for tenant in tenants):
        raise BadTrace("no limit of the file concerns a tenant that sent something in that time")
    served = tuple(_answer(answer, model, weights, changed) for answer in recorded.served)
    words = [
        f"weight of {tenant} {weight:g} (served:"
        f" {', '.join(f'{served_at:g}' for served_at in _served_weights(recorded, tenant))})"
        for tenant, weight in weights.items()
        if _served_weights(recorded, tenant) != [weight]
    ]
    words += [line for limit in changed if (line := _words(recorded, limit))]
    return replace(recorded, served=served), words


def _answer(
    answer: RecordedAnswer, model: str, weights: Mapping[str, float], changed: list[ChangedLimit]
) -> RecordedAnswer:
    terms = answer.terms
    own = [limit for limit in changed if limit.concerns(answer.tenant)]
    names = {limit.name for limit in own}
    most_output_tokens = answer.sequences * answer.max_tokens or answer.output_tokens
    traits = RequestTraits(
        tuple(Tier)[answer.tier], model, answer.input_tokens + max(most_output_tokens, answer.output_tokens)
    )
    added = [one.limit for one in own if one.limit is not None and one.limit.binds(traits)]
    if terms.price is None and any(limit.meter is Meter.COST_NANOUSD for limit in added):
        raise BadTrace(
            f"what tokens of {answer.tenant} cost then is not recorded: leave limits of cost_nanousd out"
        )
    kept = [limit for limit in terms.limits if _name(limit) not in names]
    weight = weights.get(answer.tenant, terms.weight)
    return replace(answer, terms=with_fields(terms, weight=weight, limits=(*kept, *added)))


def _name(limit: Limit) -> LimitName | None:
    """None: of a subject whose limits cannot be changed here."""
    subject = _SUBJECTS.get(limit.kind)
    return None if subject is None else name_of(SubjectName(subject), limit)


def _served_weights(recorded: Recorded, tenant: str) -> list[float]:
    return sorted({answer.terms.weight for answer in recorded.served if answer.tenant == tenant})


def _words(recorded: Recorded, changed: ChangedLimit) -> str:
    """What a limit replaces; empty: nothing changes, or it binds none of the tenants."""
    its = [answer for answer in recorded.served if changed.concerns(answer.tenant)]
    served = {_size(limit) for one in its for limit in one.terms.limits if _name(limit) == changed.name}
    now = "none" if changed.limit is None else _size(changed.limit)
    was = ", ".join(sorted(served)) or "none"
    if not its or now == was:
        return ""
    return f"{described(changed.tenant, changed.name)} {now} (served: {was})"


def _size(limit: Limit) -> str:
    rate = f" at {rate_in_words(limit)}" if limit.is_bucket else ""
    mode = "" if limit.mode == "hard" else f" {limit.mode.value}"
    return f"{limit.amount:,}{rate}{mode}"
