"""A tenant below its share begins soon, whatever others run: also one that comes for the first time.

The flow controller in front of a real engine core on virtual time, full of another tenant's long streams.
"""

from __future__ import annotations

import pytest

from gateway.flow.dispatch_log import LogRecord
from tests.support.virtual_gateway import Done, Job, VirtualGateway

PLACES = 16
STREAM_TOKENS = 1200
SHORT_TOKENS = 5
REQUESTS = 50
MOST_STEPS = 3
"""From the engine's receipt of a request to its first prompt token, at most."""


class House:
    """A server whose places are full of one tenant's streams, 40 more waiting, and short requests of
    others."""

    def __init__(self, policy: str, num_blocks: int = 4096) -> None:
        self.begun_step: dict[str, int] = {}
        self.gateway = VirtualGateway(
            policy=policy, max_sequences=PLACES, num_blocks=num_blocks, on_end=self._ended, log_records=4096
        )
        self.ended = 0
        for _ in range(PLACES + 40):
            self.gateway.arrive(Job("flood", 20, STREAM_TOKENS, max_tokens=STREAM_TOKENS))
        self.steps(30)

    def _ended(self, done: Done) -> None:
        self.ended += done.job.tenant_id == "flood"

    def steps(self, number: int) -> None:
        """Lets the engine compute as many steps."""
        last = self.gateway.steps + number
        self.gateway.run(while_=lambda: self.gateway.steps < last)

    def short(self, tenant: str) -> tuple[LogRecord | None, int]:
        """A request of `tenant` arrives; its dispatch, and the steps until its first token."""
        before, ended = self.gateway.flow.log.next_index, self.ended
        done = self.gateway.arrive(Job(tenant, SHORT_TOKENS, SHORT_TOKENS, max_tokens=SHORT_TOKENS))
        first = self.gateway.steps
        self.gateway.run(while_=lambda: done.first_token_s < 0 and self.gateway.steps < first + 200)
        assert self.ended == ended, "another's end made room: the test shows nothing"
        records = self.gateway.flow.log.since(before, 100)
        dispatch = next((each for each in records if each.event == "dispatch"), None)
        return dispatch, self.gateway.steps - first


@pytest.mark.parametrize("policy", ["vtc", "hybrid"])
def test_short_requests_of_others_begin_within_three_steps_beside_a_flood(policy: str) -> None:
    """Half of them of tenants that come for the first time, half of one that comes back."""
    house = House(policy)
    for number in range(REQUESTS):
        tenant = f"new {number}" if number % 2 else "regular"
        dispatch, steps = house.short(tenant)
        assert dispatch is not None, (number, "it waited")
        assert dispatch.tenant_id == tenant, (number, "another went first")
        assert dispatch.at_s == dispatch.arrived_s, (number, "it waited")
        assert steps <= MOST_STEPS, (number, steps)
        house.steps(3)


@pytest.mark.parametrize("policy", ["drr", "dlpm"])
def test_by_rounds_one_goes_once_the_flood_has_spent_its_quantum(policy: str) -> None:
    """Not immediately, and yet before any of the flood's answers ends."""
    house = House(policy)
    waits = 0
    for number in range(8):
        dispatch, steps = house.short(f"new {number}")
        assert dispatch is not None, number
        waits += steps > MOST_STEPS
    assert waits <= 1


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_without_turns_between_tenants_they_wait(policy: str) -> None:
    """The control: these orders promise nothing between the tenants of a tier."""
    dispatch, _ = House(policy).short("new")
    assert dispatch is None


@pytest.mark.parametrize("policy", ["vtc", "hybrid"])
def test_a_flood_that_fills_the_cache_by_its_predictions_keeps_none_out(policy: str) -> None:
    """Room for little more than what the flood's streams are predicted to need."""
    house = House(policy, num_blocks=PLACES * (20 + 512) // 16)
    for number in range(8):
        dispatch, steps = house.short(f"new {number}")
        assert dispatch is not None, number
        assert steps <= MOST_STEPS, number
