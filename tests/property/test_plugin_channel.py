"""The gateway's state of the channel against the plug-in's desk, over exchanges that get lost either way.

Whatever is lost, no token is emitted that the gateway has not covered, a lease arrives with the next exchange
that does, every outcome is told until it is acknowledged, and each token of service is told once.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.messages import Submit
from engine.vllm_plugin.signature import sign
from gateway.upstream.vllm_plugin.channel_state import ChannelState
from tests.support.vllm_plugin import KEY, WALL_S, stand_in

MOST = 40
TENANTS = ("acme", "beta")


class LossyChannel(RuleBasedStateMachine):
    """One gateway and one server."""

    def __init__(self) -> None:
        super().__init__()
        self.server = stand_in()
        self.state = ChannelState("gw", "life-1")
        self.nonces = 0
        self.covered: dict[str, int] = {}
        self.open: set[str] = set()
        """Read here."""
        self.told = dict.fromkeys(TENANTS, 0)

    @rule(lease=st.integers(1, MOST), tenant=st.sampled_from(TENANTS))
    def begin(self, lease: int, tenant: str) -> None:
        name = f"s{len(self.covered)}"
        submit = Submit(name, f"r-{name}", tenant, [1] * 5, MOST, lease)
        self.covered[name] = lease
        self.open.add(name)
        self.server.add(sign(self.state.begin(submit, WALL_S), KEY), max_tokens=MOST)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), more=st.integers(1, MOST))
    def top_up(self, data: st.DataObject, more: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        self.covered[name] = max(self.covered[name], min(MOST, self.covered[name] + more))
        self.state.top_up(name, self.covered[name])

    @precondition(lambda self: self.open)
    @rule(data=st.data(), cause=st.sampled_from(("budget", "cancelled")))
    def cancel(self, data: st.DataObject, cause: str) -> None:
        self.state.cancel(data.draw(st.sampled_from(sorted(self.open))), cause)

    @rule(steps=st.integers(1, 20))
    def steps(self, steps: int) -> None:
        self.server.run(steps)

    @rule(lost=st.sampled_from(("", "on the way there", "on the way back")))
    def exchange(self, lost: str) -> None:
        self.nonces += 1
        said = self.state.exchange(f"{self.nonces:016}", WALL_S)
        if lost == "on the way there":
            return
        self.server.desk.ask_now()
        report = self.server.desk.exchange(said, self.server.now_s)
        if lost:
            return
        for tenant, share in report.service.items():
            self.told[tenant] += share.emitted_tokens
        self.state.heard(said, report)

    @rule(is_settled=st.booleans())
    def read_to_the_end(self, is_settled: bool) -> None:
        """The streams of what has ended are read, and settled or not."""
        for name in sorted(self.open - self.server.live.keys()):
            self.open.discard(name)
            self.state.over(name, has_outcome=True)
            if is_settled:
                self.state.acknowledge([name])

    @invariant()
    def nothing_is_emitted_that_is_not_covered(self) -> None:
        for name, each in self.server.live.items():
            assert each.emitted_tokens <= each.lease_tokens <= self.covered[name]
        for ended in self.server.ended:
            assert ended.emitted_tokens <= self.covered[ended.sequence_id]

    def teardown(self) -> None:
        """With a channel that works all is told, settled and forgotten."""
        for _ in range(3):
            self.exchange("")
            self.server.run(1)
        self.exchange("")
        for name, each in self.server.live.items():
            assert each.lease_tokens == self.covered[name]
        emitted = dict.fromkeys(TENANTS, 0)
        for ended in self.server.ended:
            emitted[ended.tenant_id] += ended.emitted_tokens
        for each in self.server.live.values():
            emitted[each.terms.submit.tenant_id] += each.emitted_tokens
        self.exchange("")
        assert self.told == emitted
        self.read_to_the_end(is_settled=True)
        left = [each.sequence_id for each in self.state.inventory("vllm-a", []).outcomes]
        assert set(left) <= {ended.sequence_id for ended in self.server.ended}
        self.state.acknowledge(left)
        for _ in range(2):
            self.exchange("")
        assert self.state.inventory("vllm-a", []).outcomes == []
        assert not any(gateway.outcomes for gateway in self.server.desk._gateways)


TestLossyChannel = LossyChannel.TestCase
TestLossyChannel.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
