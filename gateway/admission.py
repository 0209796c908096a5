"""Which requests are refused before they get in line?

Those that the forecast says would not be in time (`flow/early_refusal.py`): by what their client allows or
their tier does, always; by the targets of their tier and tenant only where the control loop says so, for many
a client would rather have a late answer than none. What a quote promised is never refused by a target; nor is
one in `TRIED_ONE_IN` of those that a target refuses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from gateway import errors
from gateway.account.estimate import Estimate
from gateway.flow.early_refusal import early_refusal
from gateway.flow.target_gate import TargetGate
from gateway.refusals import LONGEST_RETRY_S
from gateway.understand import Call
from tenants.types import Tier

Targets = Callable[[str, Tier], Mapping[str, float]]
"""Of a tenant's requests in a tier, in seconds by metric."""


METRICS = {"first token": "ttft", "answer": "e2e"}
"""Of what is late."""


def no_targets(tenant_id: str, tier: Tier) -> Mapping[str, float]:
    """Nobody has any."""
    return {}


def nobody(tenant_id: str, tier: Tier, metric: str) -> None:
    """Need be told."""


class Admission(TargetGate):
    """Of one pool. Use from one event loop."""

    def __init__(
        self, targets: Targets = no_targets, on_refused: Callable[[str, Tier, str], None] = nobody
    ) -> None:
        """`on_refused` is told whose target of which metric a request was refused for."""
        super().__init__()
        self._targets = targets
        self._on_refused = on_refused
        self.factor = 1.0
        """On the expected wait, where it is compared with a deadline; above 1 more is refused at once."""

    def check(self, call: Call, estimate: Estimate | None, now_s: float, expires_s: float = math.inf) -> None:
        """Raises `ApiError` for a request that is of no use in line. `expires_s`: when it leaves the line."""
        late = early_refusal(estimate, now_s=now_s, expires_s=expires_s, factor=self.factor)
        if late is not None:
            raise errors.deadline_unreachable(
                late.what, late.allowed_s, late.expected_s, min(late.retry_after_s, LONGEST_RETRY_S)
            )
        targets_s = self._targets(call.principal.tenant_id, call.tier)
        if call.binding is not None or estimate is None or not targets_s:
            return
        late = self.keeps_out(estimate, targets_s)
        if late is not None:
            self._on_refused(call.principal.tenant_id, call.tier, METRICS[late.what])
            raise errors.target_unreachable(
                late.what, late.allowed_s, late.expected_s, min(late.retry_after_s, LONGEST_RETRY_S)
            )

    def ended(self, call: Call, estimate: Estimate | None, *, missed: bool) -> None:
        """A request that was let in has ended, and has `missed` a target or kept all."""
        targets_s = self._targets(call.principal.tenant_id, call.tier)
        if targets_s and estimate is not None:
            self.learn(estimate, targets_s, missed=missed)
