"""State of a gateway's channel to the plug-in of one vLLM server. Pure.

Every exchange repeats what is unconfirmed: a lease until a report shows it, a cancel until its sequence ends,
acknowledgements and a policy until answered. Leases are absolute figures.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.messages import Inventory, RunningSequence, SequenceOutcome, Submit
from engine.vllm_plugin.protocol import (
    MAX_REPORTED_SEQUENCES,
    ContractClaims,
    Exchange,
    PluginReport,
    PolicyChoice,
    SequenceNews,
)

MAX_TOP_UPS = 16_384
"""Per exchange; the others follow in the next."""
MAX_CANCELS = 4096
MAX_ACKNOWLEDGES = 4096
MAX_KEPT = 65_536
"""Sequences and outcomes kept per server; older ones only the plug-in knows."""
CANCEL_TIMES = 50
"""Exchanges that repeat a cancel of a sequence which no report names: it never arrived."""
NEVER_REPORTED = SequenceNews("", 0, 0)


@dataclass(slots=True)
class _Begun:
    """A sequence that this gateway sent to the server and reads."""

    submit: Submit
    wire_id: str
    """Differs by attempt, as a signature is good once."""
    lease_tokens: int


class ChannelState:
    """Of one server, in one life of the gateway. Sequence ids are the gateway's own, but for the news."""

    def __init__(self, gateway_id: str, session: str) -> None:
        """`session`: random, of this life of the gateway."""
        self._gateway_id = gateway_id
        self._session = session
        self._begun: dict[str, _Begun] = {}
        self._attempts: OrderedDict[str, int] = OrderedDict()
        self._news: OrderedDict[str, SequenceNews] = OrderedDict()
        """By wire id: running sequences and unacknowledged outcomes."""
        self._read: OrderedDict[str, None] = OrderedDict()
        """Wire ids read to their outcome here, and not settled yet."""
        self._cancels: dict[str, tuple[str, int]] = {}
        """By wire id: the cause, and how often it may still be sent."""
        self._acknowledged: OrderedDict[str, None] = OrderedDict()
        """Wire ids whose outcomes are settled."""
        self._to_acknowledge: OrderedDict[str, None] = OrderedDict()
        self._policy: PolicyChoice | None = None
        self._is_policy_said = True
        self.policy_refusal = ""
        self.report: PluginReport | None = None

    @property
    def num_running(self) -> int:
        return len(self._begun)

    @property
    def life(self) -> str:
        """Of the server; empty: unknown."""
        return "" if self.report is None else self.report.life

    @property
    def has_to_say(self) -> bool:
        """Whether something unconfirmed must not be lost when the gateway stops."""
        return bool(self._to_acknowledge or self._cancels)

    @property
    def has_more(self) -> bool:
        """Whether there is more than one exchange holds."""
        return len(self._to_acknowledge) > MAX_ACKNOWLEDGES or len(self._cancels) > MAX_CANCELS

    # ------------------------------------------------------------ what is to be said

    def begin(self, submit: Submit, now_s: float) -> ContractClaims:
        """Notes a sequence about to be sent; returns the claims of its request. `now_s`: wall clock."""
        sequence_id = submit.sequence_id
        attempt = self._attempts.pop(sequence_id, 0)
        self._attempts[sequence_id] = attempt + 1
        _bound(self._attempts)
        earlier = self._begun.get(sequence_id)
        if earlier is not None:
            self._cancel(earlier.wire_id, "failed")
        wire_id = f"{sequence_id}~{attempt}" if attempt else sequence_id
        self._begun[sequence_id] = _Begun(submit, wire_id, submit.lease_tokens)
        return ContractClaims(
            gateway_id=self._gateway_id,
            request_id=submit.request_id,
            sequence_id=wire_id,
            tenant_id=submit.tenant_id,
            lease_tokens=submit.lease_tokens,
            issued_at_s=now_s,
            session=self._session,
            life=self.life,
            weight=submit.weight,
            tier=submit.tier,
            ttft_target_s=submit.ttft_target_s,
            tpot_target_s=submit.tpot_target_s,
            deadline_in_s=submit.deadline_in_s,
            own_deadline_in_s=submit.own_deadline_in_s,
            predicted_output_tokens=submit.predicted_output_tokens,
            predicted_high_tokens=submit.predicted_high_tokens,
            counter=submit.counter,
            had=submit.had,
            heard=submit.heard,
            is_owed=submit.is_owed,
            index=submit.index,
        )

    def top_up(self, sequence_id: str, lease_tokens: int) -> bool:
        """Covers `lease_tokens` in all; False if that is nothing new."""
        begun = self._begun.get(sequence_id)
        if begun is None or lease_tokens <= begun.lease_tokens:
            return False
        begun.lease_tokens = lease_tokens
        return True

    def cancel(self, sequence_id: str, cause: str) -> None:
        """Ends a sequence of this gateway or, by its wire id, one that an earlier one left."""
        begun = self._begun.get(sequence_id)
        self._cancel(sequence_id if begun is None else begun.wire_id, cause)

    def over(self, sequence_id: str, *, has_outcome: bool) -> None:
        """This gateway no longer reads the sequence. Without an outcome, recovery looks at the plug-in's."""
        begun = self._begun.pop(sequence_id, None)
        if begun is None:
            return
        if has_outcome:
            self._cancels.pop(begun.wire_id, None)
            self._read[begun.wire_id] = None
            _bound(self._read)
        else:
            self._cancel(begun.wire_id, "cancelled")

    def acknowledge(self, sequence_ids: Iterable[str]) -> None:
        """Their outcomes are settled. Skips what was never there and ran on another replica."""
        for sequence_id in sequence_ids:
            attempts = self._attempts.get(sequence_id, 0)
            if not attempts and sequence_id not in self._news:
                continue
            for attempt in range(max(1, attempts)):
                wire_id = f"{sequence_id}~{attempt}" if attempt else sequence_id
                self._acknowledged[wire_id] = None
                self._to_acknowledge[wire_id] = None
                self._news.pop(wire_id, None)
                self._read.pop(wire_id, None)
        _bound(self._acknowledged)
        _bound(self._to_acknowledge)  # the plug-in reports the others again

    def set_policy(self, policy: PolicyChoice) -> None:
        """From the next exchange on, and again after every restart of the server."""
        if policy != self._policy:
            self._policy, self._is_policy_said = policy, False

    def exchange(self, nonce: str, now_s: float, *, adopt: bool = False) -> Exchange:
        """The next exchange. `now_s`: wall clock."""
        top_ups: dict[str, int] = {}
        for begun in self._begun.values():
            if len(top_ups) == MAX_TOP_UPS:
                break
            known = self._news.get(begun.wire_id, NEVER_REPORTED)
            if begun.lease_tokens > max(begun.submit.lease_tokens, known.lease_tokens):
                top_ups[begun.wire_id] = begun.lease_tokens
        cancels = dict(list(self._cancels.items())[:MAX_CANCELS])
        return Exchange(
            gateway_id=self._gateway_id,
            session=self._session,
            nonce=nonce,
            issued_at_s=now_s,
            top_ups=top_ups,
            cancels={wire_id: cause for wire_id, (cause, _) in cancels.items()},
            acknowledges=list(self._to_acknowledge)[:MAX_ACKNOWLEDGES],
            policy=None if self._is_policy_said else self._policy,
            adopt=adopt,
            life=self.life,
            report_from=0 if self.report is None else self.report.step,
        )

    # ------------------------------------------------------------ what was heard

    def heard(self, exchange: Exchange, report: PluginReport) -> None:
        if self.life not in ("", report.life):
            # Another life: of what was there nothing is left, and it has a policy of its own.
            self._news.clear()
            self._cancels.clear()
            self._is_policy_said = self._policy is None or exchange.policy == self._policy
        self.report, self.policy_refusal = report, report.policy_refusal
        if exchange.policy is not None and exchange.policy == self._policy:
            self._is_policy_said = True
        for wire_id in exchange.acknowledges:
            self._to_acknowledge.pop(wire_id, None)
        for wire_id, news in report.sequences.items():
            if news.state == "ended":
                self._cancels.pop(wire_id, None)
            if wire_id in self._acknowledged:
                # Of before the acknowledgement, or it ended after that had arrived there: not kept, as the
                # plug-in may never speak of it again.
                if news.outcome is not None:
                    self._to_acknowledge[wire_id] = None
                continue
            self._news[wire_id] = news
            if news.state == "ended" and news.outcome is None:
                del self._news[wire_id]
        for wire_id in exchange.cancels:
            if wire_id in self._cancels:
                cause, left = self._cancels[wire_id]
                if left <= 1 and wire_id not in self._news:
                    del self._cancels[wire_id]
                else:
                    self._cancels[wire_id] = cause, left - 1
        _bound(self._news)

    def news(self, sequence_id: str) -> SequenceNews:
        begun = self._begun.get(sequence_id)
        return NEVER_REPORTED if begun is None else self._news.get(begun.wire_id, NEVER_REPORTED)

    def resting(self) -> dict[str, int]:
        """Emitted tokens of this gateway's sequences that have used up their leases."""
        news = {sequence_id: self.news(sequence_id) for sequence_id in self._begun}
        return {name: state.emitted_tokens for name, state in news.items() if state.state == "parked"}

    def orphans(self) -> list[SequenceOutcome]:
        """Outcomes that nothing here reads: of an earlier life, of other gateways, and of lost answers."""
        mine = {begun.wire_id for begun in self._begun.values()}
        return [
            outcome for outcome in self._outcomes() if outcome.sequence_id not in mine | self._read.keys()
        ]

    def inventory(self, replica_id: str, own: Sequence[RunningSequence]) -> Inventory:
        """Everything unaccounted for. `own`: this gateway's sequences there."""
        mine = {begun.wire_id for begun in self._begun.values()}
        left = [
            _running(wire_id, news)
            for wire_id, news in self._news.items()
            if news.outcome is None and wire_id not in mine and wire_id not in self._acknowledged
        ]
        gateways = [] if self.report is None else self.report.gateways
        is_partial = self.report is not None and len(self.report.sequences) >= MAX_REPORTED_SEQUENCES
        return Inventory(replica_id, [*own, *left], self._outcomes(), gateways, is_partial)

    def _outcomes(self) -> list[SequenceOutcome]:
        return [news.outcome for news in self._news.values() if news.outcome is not None]

    def _cancel(self, wire_id: str, cause: str) -> None:
        self._cancels.setdefault(wire_id, (cause, CANCEL_TIMES))


def _running(wire_id: str, news: SequenceNews) -> RunningSequence:
    """A sequence that another life of a gateway started; only the plug-in knows its prompt."""
    return RunningSequence(
        sequence_id=wire_id,
        request_id=news.request_id,
        tenant_id=news.tenant_id,
        tier=news.tier,
        state=news.state,
        prompt_tokens=0,
        computed_tokens=0,
        emitted_tokens=news.emitted_tokens,
        max_tokens=news.lease_tokens,
        predicted_output_tokens=news.lease_tokens,
        lease_tokens=news.lease_tokens,
    )


def _bound(kept: OrderedDict[str, Any]) -> None:
    while len(kept) > MAX_KEPT:
        kept.popitem(last=False)
