"""Admission control: refuses requests that would be late, or above their clients' bounds.

Always by its client's bounds and the client's or the tier's deadline (`flow/deadline_check.py`); by targets
only where the setting `admission` or the control loop says so, as many clients prefer a late answer to none.
A target never refuses a redeemed quote, nor one in `TRIED_ONE_IN` of the requests that would miss it
(`DOUBTED_ONE_IN` where the median keeps it).

Until its servers' steps are timed a forecast refuses nothing; a bound on the wait is then kept in the queue.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from decimal import Decimal

from gateway import errors
from gateway.domain.call import Call
from gateway.domain.estimate import Estimate
from gateway.domain.fallback import NoneTook
from gateway.flow.deadline_check import (
    DOUBTED_ONE_IN,
    TRIED_ONE_IN,
    TimesAhead,
    TooLate,
    early_refusal,
    is_doubtful,
    out_of_reach,
)
from gateway.statistics import FadingShare
from tenants.pricing.pricing import PriceBook
from tenants.types import Tier

WAIT_HEADER = "X-Fairgate-Max-Wait-S"
COST_HEADER = "X-Fairgate-Max-Cost-Usd"


MEMORY_S = 10.0
GOOD_TIME = 0.5


class NotInTime(Exception):
    """By the forecast the request would be late."""

    def __init__(self, late: TooLate) -> None:
        super().__init__(late.what)
        self.late = late


class DeadlineUnreachable(NotInTime):
    """For its client's deadline, or its tier's."""


class TargetUnreachable(NotInTime):
    """For a target of its tenant and tier."""


class EstimateExceeds(Exception):
    """The estimate is above what its client allows."""

    def __init__(self, header: str, allowed: str, told: str) -> None:
        super().__init__(f"{told}; {header} allows {allowed}")
        self.header = header
        self.allowed = allowed
        self.told = told


def require_bounds(call: Call, estimate: Estimate | None, prices: PriceBook) -> None:
    """Raises `EstimateExceeds`, `UnknownPrice`; `ApiError` (400) for a bounded wait without estimate."""
    if call.max_wait_s is not None:
        if estimate is None:
            raise errors.estimates_off(
                consequence=f"'{WAIT_HEADER}' cannot be kept: leave it out", param=WAIT_HEADER
            )
        expected_s = estimate.wait_s[1]
        if estimate.is_measured and expected_s > call.max_wait_s:
            least = "at least " if estimate.saturated else ""
            raise EstimateExceeds(
                WAIT_HEADER,
                f"{call.max_wait_s:g} s",
                f"The request may wait {least}{expected_s:.3f} s for its turn (p90)",
            )
    if call.max_cost_nanousd is not None:
        price = prices.entry(call.model, call.tier).cost_nanousd
        most_nanousd = price(call.input_tokens, 0, call.max_output_tokens)
        if most_nanousd > call.max_cost_nanousd:
            raise EstimateExceeds(
                COST_HEADER,
                f"{dollars(call.max_cost_nanousd)} USD",
                f"The request may cost {dollars(most_nanousd)} USD",
            )


def dollars(nanousd: int) -> str:
    """An exact decimal number."""
    return f"{Decimal(nanousd).scaleb(-9).normalize():f}"


class TargetGate:
    """Refuses requests that would miss a target; the control loop sets its strictness. Pure; one writer."""

    def __init__(self, strictness: float = 0.0) -> None:
        self.strictness = strictness
        """Factor on expected times compared with targets; 0: no request is refused for a target."""
        self.expected_late = FadingShare(MEMORY_S)
        """Of recent requests with a target, refused or not."""
        self.in_good_time = FadingShare(MEMORY_S)
        """Share that took at most `GOOD_TIME` of each target, of ended requests."""
        self._out_of_reach = 0
        self._doubted = 0

    def keeps_out(self, ahead: TimesAhead, targets_s: Mapping[str, float], now_s: float) -> TooLate | None:
        """None: it may be queued."""
        self.expected_late.note(float(out_of_reach(ahead, targets_s, 1.0) is not None), now_s)
        late = out_of_reach(ahead, targets_s, self.strictness)
        if late is None:
            return None
        if is_doubtful(ahead, targets_s):
            self._doubted += 1
            if self._doubted % DOUBTED_ONE_IN == 0:
                return None
        self._out_of_reach += 1
        return late if self._out_of_reach % TRIED_ONE_IN else None

    def learn(self, targets_s: Mapping[str, float], took_s: Mapping[str, float], now_s: float) -> None:
        """A request that was admitted has ended. `took_s`: seconds by metric, of those that are known."""
        used = [took_s[metric] / target_s for metric, target_s in targets_s.items() if metric in took_s]
        if used:
            self.in_good_time.note(float(max(used) <= GOOD_TIME), now_s)


Targets = Callable[[str, Tier], Mapping[str, float]]
"""Of a tenant's requests in a tier, in seconds by metric."""


METRICS = {"first token": "ttft", "answer": "e2e"}


def no_targets(tenant_id: str, tier: Tier) -> Mapping[str, float]:
    return {}


def ignore(tenant_id: str, tier: Tier, metric: str) -> None:
    """Does nothing."""


class Admission(TargetGate):
    """Of one pool. Use from one event loop."""

    def __init__(
        self,
        targets: Targets = no_targets,
        on_refused: Callable[[str, Tier, str], None] = ignore,
        strictness: float = 0.0,
    ) -> None:
        """`on_refused` is called with tenant, tier and metric of a target that refused a request."""
        super().__init__(strictness)
        self.targets_s = targets
        self._on_refused = on_refused
        self.factor = 1.0
        """On the expected wait compared with a deadline; above 1 more is refused."""

    def check(self, call: Call, estimate: Estimate | None, now_s: float, expires_s: float = math.inf) -> None:
        """Raises `NotInTime`. `expires_s`: when it leaves the queue."""
        if estimate is not None and not estimate.is_measured:
            estimate = None
        # What a quote promised, no knob takes back.
        factor = self.factor if call.binding is None else 1.0
        late = early_refusal(estimate, now_s=now_s, expires_s=expires_s, factor=factor)
        if late is not None:
            raise DeadlineUnreachable(late)
        targets_s = self.targets_s(call.principal.tenant_id, call.tier)
        if call.binding is not None or estimate is None or not targets_s:
            return
        late = self.keeps_out(estimate, targets_s, now_s)
        if late is not None:
            raise TargetUnreachable(late)

    def refused(self, call: Call, cause: BaseException) -> None:
        """The request is refused by all pools of its chain; for a target, that counts as a miss."""
        if isinstance(cause, NoneTook):
            cause = cause.first
        if isinstance(cause, TargetUnreachable):
            self._on_refused(call.principal.tenant_id, call.tier, METRICS[cause.late.what])

    def ended(self, call: Call, took_s: Mapping[str, float], now_s: float) -> None:
        self.learn(self.targets_s(call.principal.tenant_id, call.tier), took_s, now_s)
