"""Actions on the running requests of this gateway, for its own routes and for other gateways."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway import errors
from gateway.background import Site
from gateway.domain.tiers import TIER_NAMES
from gateway.domain.timeline import FIELDS, TimelineKind
from gateway.error_mapping import as_api_error
from gateway.errors import ApiError
from gateway.metrics.registry import Metrics
from gateway.pools.live_counters import counters_of
from gateway.pools.pool import Pools
from gateway.pools.waiting import waiting_here
from gateway.requests.run import Run
from gateway.requests.tier_change import Offer
from tenants.ledger.rows import LedgerRow
from tenants.types import Principal, Tier

MAX_LISTED = 1_000
"""Each gateway lists one more, so that a cut list is recognised."""
STATUSES = ("limited", "waiting", "running")
"""Of requests that have not ended; see `Run.status`."""
SHOW, LIST, CANCEL, OFFER, MOVE, COUNT = "show", "list", "cancel", "offer", "move", "count"
COUNTERS, WAITING = "counters", "waiting"
"""Of the whole gateway, for watched pages: `GatewayNow`, `WaitingHere`."""


class RequestAction(msgspec.Struct, frozen=True, omit_defaults=True):
    """`tenant_id` None: any tenant's requests (an operator asks)."""

    act: str
    request_id: str = ""
    tenant_id: str | None = None
    tier: str = ""
    """For `offer` and `move`; a filter of `list` and `waiting`."""
    by: str = "tenant"
    number: int = 0
    reply_to: str = ""
    of_tenant: str = ""
    """Filter of `list` by operators."""
    status: str = ""
    """Filter of `list`."""
    project: str = ""
    """Filter of `list`, by id."""
    key: str = ""
    """Filter of `list`, by id."""
    model: str = ""
    """Filter of `list`: the requested name."""
    of_tenants: tuple[str, ...] | None = None
    """Filter of `waiting`, by id; None: all."""


class PeerRefusal(msgspec.Struct, frozen=True):
    """An `ApiError` on its way from one gateway to another."""

    status: int
    code: str
    message: str
    type: str
    param: str | None
    retry_after_s: float | None
    should_retry: bool | None
    headers: dict[str, str]

    @staticmethod
    def of(error: ApiError) -> PeerRefusal:
        return PeerRefusal(**{name: getattr(error, name) for name in PeerRefusal.__struct_fields__})

    def as_error(self) -> ApiError:
        return ApiError(**msgspec.structs.asdict(self))


class ActionResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """Not `is_found`: that gateway runs no such request."""

    is_found: bool
    value: Any = None
    """A JSON object; of `list` items; of `count` model, replica and number; of page actions their structs."""
    refused: PeerRefusal | None = None
    tenant_id: str = ""
    default_tier: str = ""
    tiers: tuple[str, ...] = ()
    number: int = 0

    def result(self) -> Any:
        """Raises `ApiError` if the act was refused."""
        if self.refused is not None:
            raise self.refused.as_error()
        return self.value


NOT_HERE = ActionResult(False)


class Unreachable(Exception):
    """Redis is unavailable, or too many questions are open."""


@dataclass(frozen=True, slots=True)
class PeerAnswers:
    """`missing` gateways did not answer in time."""

    answers: list[ActionResult] = field(default_factory=list)
    missing: int = 0

    @property
    def found(self) -> ActionResult | None:
        return next((answer for answer in self.answers if answer.is_found), None)


class RequestActions:
    """Use from one event loop."""

    def __init__(self, site: Site, pools: Pools, metrics: Metrics) -> None:
        self._site = site
        self._pools = pools
        self._metrics = metrics

    async def act(self, ask: RequestAction) -> ActionResult:
        """Never raises: a refusal is an answer, too."""
        if ask.act == LIST:
            return ActionResult(True, self._listed(ask))
        if ask.act == COUNT:
            return ActionResult(True, self._pools.in_flight() + self._pools.queued())
        if ask.act == COUNTERS:
            counters = counters_of(self._site, self._pools, self._metrics)
            return ActionResult(True, msgspec.to_builtins(counters))
        if ask.act == WAITING:
            waiting = waiting_here(self._site, self._pools, self._metrics.waits, ask.of_tenants, ask.tier)
            return ActionResult(True, msgspec.to_builtins(waiting))
        run = self._pools.find(ask.request_id)
        if run is None or ask.tenant_id not in (None, run.call.principal.tenant_id):
            return NOT_HERE
        value: Any = None
        refused: PeerRefusal | None = None
        try:
            value = await self._acted(run, ask)
        except Exception as error:
            refused = PeerRefusal.of(as_api_error(error, ask.request_id))
        principal = run.call.principal
        return ActionResult(
            True,
            value,
            refused,
            principal.tenant_id,
            principal.default_tier.value,
            tuple(tier.value for tier in Tier if tier in principal.tiers),
        )

    async def _acted(self, run: Run, ask: RequestAction) -> dict[str, Any]:
        match ask.act:
            case "show":
                return self._shown(run, ask) | {"lined_up": _lined_up(run)}
            case "cancel":
                return self._cancelled(run, ask)
            case "offer":
                lifecycle, tier = self._pools.lifecycle_of(run.call), Tier(ask.tier)
                offered = _offered(run, lifecycle.offer(run, tier), moved=False)
                offered["from"] |= lifecycle.outlook(run).as_json()
                offered["to"] |= lifecycle.outlook(run, tier).as_json()
                costs = lifecycle.displacement(run, tier)
                whose = {} if ask.tenant_id is not None else {"passed": costs.passed_as_json()}
                return offered | {"displaces": costs.as_json()} | whose
            case "move":
                tier = Tier(ask.tier)
                offer = await self._pools.lifecycle_of(run.call).move(run, tier, ask.by)
                return _offered(run, offer, moved=offer.before.tier is not tier)
        raise errors.internal(request_id=ask.request_id)

    def _listed(self, ask: RequestAction) -> list[dict[str, Any]]:
        tenant_id = ask.tenant_id if ask.tenant_id is not None else ask.of_tenant or None
        matching = (
            run
            for run in self._pools.runs_of(tenant_id)
            if ask.tier in ("", run.call.tier.value)
            and ask.status in ("", run.status)
            and ask.project in ("", run.call.principal.project_id)
            and ask.key in ("", run.call.principal.key_id)
            and ask.model in ("", run.call.model)
        )
        return [self._shown(run, ask) for run in itertools.islice(matching, MAX_LISTED + 1)]

    def _cancelled(self, run: Run, ask: RequestAction) -> dict[str, Any]:
        shown = self._shown(run, ask)
        if run.status != "ended":  # else it is only being settled
            self._pools.lifecycle_of(run.call).cancel(run)
            shown["status"] = "cancelled"
        return shown

    def _shown(self, run: Run, ask: RequestAction) -> dict[str, Any]:
        call = run.call
        chained = {} if call.chained is None else {"fallback": call.chained.fallback.as_json()}
        shown = chained | {
            "id": call.request_id,
            "object": "request",
            "status": run.status,
            "tier": call.tier.value,
            "service_tier": TIER_NAMES[call.tier],
            "model": call.model,
            "created": call.created,
            "elapsed_s": round(self._site.clock() - run.times.arrived_s, 3),
            "input_tokens": call.input_tokens,
            "output_tokens": run.output_tokens,
            "labels": call.labels,
        }
        return shown if ask.tenant_id is not None else shown | owner(call.principal)


def owner(of: Principal | LedgerRow) -> dict[str, str]:
    return {"tenant_id": of.tenant_id, "project_id": of.project_id, "key_id": of.key_id}


def _lined_up(run: Run) -> dict[str, int] | None:
    """The tokens ahead when it was queued, by whose they were; None: not queued yet."""
    numbers = next((numbers for kind, _, numbers in run.timeline.notes if kind == TimelineKind.QUEUED), None)
    fields = FIELDS[TimelineKind.QUEUED]
    return None if numbers is None else dict(zip(fields, numbers, strict=False))


def _offered(run: Run, offer: Offer, *, moved: bool) -> dict[str, Any]:
    return {
        "id": run.call.request_id,
        "object": "request.tier",
        "moved": moved,
        "tier": run.call.tier.value,
        "from": offer.before.as_json(),
        "to": offer.after.as_json(),
    }
