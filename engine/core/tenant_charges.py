"""`TenantCharges`: what the engine adds to the counters of tenants.

The queue goes by what is charged: the gateway's value replaces it, and nothing is added while the gateway
keeps it. Steps go by what was had (`engine/scheduling/step_counters.py`): every computed token counts.
Without a gateway prompts are charged at the start, emitted tokens as they come.
"""

from __future__ import annotations

from engine.entry import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST
from engine.messages import Submit
from engine.scheduling.counters import MAX_TENANTS, ServiceCounters, scaled
from engine.scheduling.step_counters import StepCounters
from engine.sequence import Sequence


def prompt_charge(sequence: Sequence, tokens: int) -> int:
    """What computed prompt tokens add to the counter of a sequence's tenant."""
    return scaled(tokens * INPUT_TOKEN_COST, sequence.submit.weight)


class TenantCharges:
    """The counters of an engine's tenants; one owner, its sequence table."""

    def __init__(self, counters: ServiceCounters) -> None:
        self.counters = counters
        self.standings = StepCounters()
        self._told: set[str] = set()

    def hear(self, submit: Submit) -> bool:
        """Takes the counters that a sequence brings; False: it brings none."""
        if not submit.counter:
            return False
        self.set(submit.tenant_id, submit.counter)
        self.standings.hear(submit.tier, submit.tenant_id, submit.had, submit.heard)
        return True

    def set(self, tenant_id: str, value: int) -> None:
        """Replaces the queue's counter by its owner's."""
        if len(self._told) >= MAX_TENANTS and tenant_id not in self._told:
            self._told.clear()
        self._told.add(tenant_id)
        self.counters.set(tenant_id, value)

    def charge_prompt(self, sequence: Sequence, tokens: int) -> None:
        """Charges (or refunds) prompt tokens to the queue's counter."""
        cost = tokens * INPUT_TOKEN_COST
        if sequence.tenant_id in self._told:
            self.counters.charge_all((), cost)
        else:
            self.counters.charge(sequence.tenant_id, sequence.submit.weight, cost)

    def emitted(self, amounts: dict[str, int], num_tokens: int, beyond: dict[str, int] | None = None) -> None:
        """Charges `num_tokens` emitted tokens in one go, given by tenant as scaled cost; `beyond`: those past
        their sequence's prediction, which no owner of the counters charged ahead."""
        self.standings.serve_all(amounts)
        own = [(tenant_id, amount) for tenant_id, amount in amounts.items() if tenant_id not in self._told]
        own += [
            (tenant_id, amount) for tenant_id, amount in (beyond or {}).items() if tenant_id in self._told
        ]
        self.counters.charge_all(own, num_tokens * OUTPUT_TOKEN_COST)

    def forced(self, sequence: Sequence, tokens: int) -> None:
        """Charges output tokens that no step chose: they cost what input does."""
        amounts = {sequence.tenant_id: prompt_charge(sequence, tokens)}
        self.standings.serve_all(amounts)
        own = [] if sequence.tenant_id in self._told else list(amounts.items())
        self.counters.charge_all(own, tokens * INPUT_TOKEN_COST)

    def take_back(self, sequence: Sequence, first_time: int, emitted: int, beyond: int) -> None:
        """Undoes the charges of what steps in flight would have given a sequence: prompt tokens computed
        `first_time`, tokens `emitted`, and of those the ones `beyond` its prediction."""
        tenant_id, own = sequence.tenant_id, emitted
        if tenant_id in self._told:
            own = beyond
        amount = prompt_charge(sequence, first_time) + emitted * sequence.token_charge
        self.standings.take_back(tenant_id, amount)
        self.counters.set(tenant_id, self.counters.value(tenant_id) - own * sequence.token_charge)
        self.counters.charge_all((), -emitted * OUTPUT_TOKEN_COST)
