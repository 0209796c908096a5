"""Histories of a gateway and a vLLM plug-in whose channel loses messages in both directions."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.messages import SequenceOutcome
from engine.scheduling.counters import scaled
from tests.support.vllm_plugin import exchange, signed, stand_in

Act = tuple[str, int]
ACTS = st.lists(
    st.tuples(
        st.sampled_from(["add", "run", "top_up", "ask", "lost question", "lost answer", "end", "settle"]),
        st.integers(0, 9),
    ),
    max_size=60,
)
TENANTS = ("a", "b")


@given(ACTS)
@settings(deadline=None)
def test_no_token_is_lost_counted_twice_or_emitted_past_its_lease(acts: list[Act]) -> None:
    """Whatever arrives: service told = tokens emitted, each once; outcomes stay until they are settled; no
    sequence passes the lease that the gateway granted last."""
    server = stand_in()
    granted: dict[str, int] = {}
    told: Counter[str] = Counter()
    position = 0
    outcomes: dict[str, SequenceOutcome] = {}
    settled: set[str] = set()

    def ask(loss: str = "", **fields: Any) -> None:
        nonlocal position
        said = exchange(life="life", report_from=position, top_ups=granted, **fields)
        if loss == "question":
            return
        server.desk.ask_now()
        report = server.desk.exchange(said, server.now_s)
        if loss == "answer":
            return
        position = report.step
        for tenant_id, share in report.service.items():
            told[tenant_id] += share.emitted_tokens
            # What was told so far is what the serial holds: the gateway's counter and the server's agree.
            assert share.serials[1] == scaled(told[tenant_id], 1.0)
        for name, news in report.sequences.items():
            if news.outcome is not None and name not in settled:
                outcomes[name] = news.outcome

    for act, number in acts:
        names = sorted(granted)
        name = names[number % len(names)] if names else ""
        if act == "add":
            name = f"s{len(granted)}"
            granted[name] = number
            server.add(
                signed(name, number, tenant_id=TENANTS[number % 2]), name=f"cmpl-{name}", max_tokens=20
            )
        elif act == "run":
            server.run(number)
        elif act == "top_up" and name:
            granted[name] = min(20, granted[name] + number)
        elif act == "end" and name:
            ask(cancels={name: "budget"})
        elif act == "settle":
            done = [each for each in outcomes if each not in settled]
            settled.update(done)
            ask(acknowledges=done)
        elif act.startswith(("ask", "lost")):
            ask(act.partition(" ")[2])
        for sequence_id, each in server.live.items():
            assert each.emitted_tokens <= granted[sequence_id]
    ask()
    emitted: Counter[str] = Counter()
    for ended in server.ended:
        emitted[ended.tenant_id] += ended.emitted_tokens
        assert ended.emitted_tokens <= granted[ended.sequence_id]
        assert outcomes[ended.sequence_id].emitted_tokens == ended.emitted_tokens
    for each in server.live.values():
        emitted[each.terms.submit.tenant_id] += each.emitted_tokens
    assert +told == +emitted
    assert len(outcomes) == len(server.ended)
