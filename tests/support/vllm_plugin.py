"""A scheduler with nothing but sequences and leases, behind the vLLM plug-in's desk."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from engine.core.step_service import ServiceShare
from engine.messages import RunningSequence, TenantService
from engine.scheduling.counters import scaled
from engine.scheduling.options import PolicyOptions
from engine.vllm_plugin.channel.desk import GatewayDesk
from engine.vllm_plugin.channel.setup import check_policy
from engine.vllm_plugin.protocol import ContractClaims, Exchange
from engine.vllm_plugin.seam import Ended, ServiceTerms, StepService
from engine.vllm_plugin.signature import sign

KEY, FOREIGN_KEY = b"k" * 32, b"f" * 32
WALL_S = 1_790_000_000.0


def request(
    signed: object = None, *, name: str = "cmpl-1", max_tokens: int = 200, prompt_tokens: int = 5
) -> Any:
    """A request as vLLM's scheduler gets it."""
    extra = None if signed is None else {"fairgate": signed}
    return SimpleNamespace(
        request_id=name,
        sampling_params=SimpleNamespace(extra_args=extra),
        max_tokens=max_tokens,
        num_prompt_tokens=prompt_tokens,
    )


def claims(sequence_id: str = "s1", lease_tokens: int = 50, **fields: Any) -> ContractClaims:
    """Claims of a gateway."""
    given = {"gateway_id": "gw", "request_id": "r1", "tenant_id": "acme", "issued_at_s": WALL_S} | fields
    return ContractClaims(sequence_id=sequence_id, lease_tokens=lease_tokens, **given)


_nonces = iter(range(10**15, 10**16))


def exchange(gateway_id: str = "gw", **fields: Any) -> Exchange:
    """An exchange, with a nonce of its own."""
    given: dict[str, Any] = {"nonce": str(next(_nonces)), "issued_at_s": WALL_S} | fields
    return Exchange(gateway_id=gateway_id, **given)


@dataclass
class StandInSequence:
    """One sequence of the stand-in."""

    terms: ServiceTerms
    max_tokens: int
    lease_tokens: int
    emitted_tokens: int = 0
    is_evicted: bool = False
    end_cause: str = ""


@dataclass
class StandInScheduler:
    """Implements `seam.Controls`: a step gives a token to each sequence whose lease covers one."""

    desk: GatewayDesk
    now_s: float = 1000.0
    live: dict[str, StandInSequence] = field(default_factory=dict)
    ended: list[Ended] = field(default_factory=list)
    policy: str = "hybrid"
    options: PolicyOptions = field(default_factory=PolicyOptions)
    words_begun: int = 0
    steps: int = 0
    serials: dict[str, int] = field(default_factory=dict)
    slots: int = 0
    """Sequences that have a token in a step, those with the fewest first; 0: all."""
    in_step: list[str] = field(default_factory=list)
    """Those of the last step."""

    def __post_init__(self) -> None:
        self.desk.before_step(self, self.now_s)

    def add(self, signed: object, *, max_tokens: int = 200, name: str = "cmpl-1") -> ServiceTerms:
        """A request arrives."""
        terms = self.desk.terms(request(signed, name=name, max_tokens=max_tokens), self.now_s)
        submit = terms.submit
        self.live[submit.sequence_id] = StandInSequence(terms, max_tokens, submit.lease_tokens)
        return terms

    def run(self, steps: int = 1, *, step_s: float = 0.01) -> None:
        """Computes steps."""
        for _ in range(steps):
            self.now_s += step_s
            self.desk.before_step(self, self.now_s)
            self._step()
            self.desk.before_step(self, self.now_s)
            for sequence_id, each in list(self.live.items()):
                if each.end_cause:
                    self.finish(sequence_id, each.end_cause)

    def finish(self, sequence_id: str, cause: str) -> None:
        """A sequence ends."""
        each = self.live.pop(sequence_id)
        submit = each.terms.submit
        ended = Ended(
            sequence_id, submit.request_id, submit.tenant_id, each.terms.gateway_id, cause, 5,
            each.emitted_tokens,
        )  # fmt: skip
        self.ended.append(ended)
        self.desk.ended(ended, self.now_s)

    def _step(self) -> None:
        self.steps += 1
        shares: dict[str, ServiceShare] = {}
        able = [
            (each.emitted_tokens, sequence_id)
            for sequence_id, each in self.live.items()
            if each.emitted_tokens < each.lease_tokens and not each.end_cause
        ]
        self.in_step = [sequence_id for _, sequence_id in sorted(able)[: self.slots or None]]
        for sequence_id in self.in_step:
            each = self.live[sequence_id]
            each.emitted_tokens += 1
            submit = each.terms.submit
            share = shares.setdefault(submit.tenant_id, ServiceShare())
            before = share.by_gateway.get(each.terms.gateway_id, TenantService(0, 0))
            share.by_gateway[each.terms.gateway_id] = TenantService(
                before.computed_tokens, before.emitted_tokens + 1
            )
            serial = self.serials.get(submit.tenant_id, 0) + scaled(1, submit.weight)
            self.serials[submit.tenant_id] = serial
            share.serials = dict.fromkeys((0, 1, 2), serial)
            if each.emitted_tokens >= each.max_tokens:
                self.finish(sequence_id, "length")
        self.desk.after_step(StepService(self.steps, shares), self.now_s)

    # ------------------------------------------------------------ Controls

    def top_up(self, sequence_id: str, lease_tokens: int) -> bool:
        each = self.live.get(sequence_id)
        if each is not None:
            each.lease_tokens = max(each.lease_tokens, lease_tokens)
        return each is not None

    def end(self, sequence_id: str, cause: str) -> bool:
        each = self.live.get(sequence_id)
        if each is not None:
            each.end_cause = each.end_cause or cause
        return each is not None

    def set_policy(self, name: str, options: PolicyOptions | None = None) -> None:
        if name == "edf":
            raise ValueError("edf does not go with this server")
        self.policy, self.options = name, options or self.options

    def begin_words(self) -> None:
        self.words_begun += 1

    def describe(self) -> dict[str, Any]:
        return {
            "policy": self.policy, "options": self.options.changed(), "slots": self.slots or 4, "places": 8,
            "step": self.steps, "kv_usage": 0.25,
            "vllm": "0.0.0", "version": "0.1.0", "not_supported": ["LoRA"],
        }  # fmt: skip

    def sequences(self) -> list[RunningSequence]:
        found = []
        for sequence_id, each in self.live.items():
            submit, is_parked = each.terms.submit, each.emitted_tokens >= each.lease_tokens
            waits = is_parked or (self.slots and sequence_id not in self.in_step)
            state = ("preempted" if each.is_evicted else "paused") if waits else "running"
            found.append(
                RunningSequence(
                    sequence_id, submit.request_id, submit.tenant_id, submit.tier, state, 5, 5,
                    each.emitted_tokens, each.max_tokens, 64, each.lease_tokens, each.terms.gateway_id,
                )
            )  # fmt: skip
        return found


def stand_in(key: bytes | None = KEY, *, timeout_s: float = 30.0, life: str = "life") -> StandInScheduler:
    """A stand-in with a desk of virtual time."""
    desk = GatewayDesk(
        key, timeout_s=timeout_s, life=life, version="0.1.0", wall_clock=lambda: WALL_S,
        check_policy=check_policy,
    )  # fmt: skip
    return StandInScheduler(desk)


def signed(sequence_id: str = "s1", lease_tokens: int = 50, key: bytes = KEY, **fields: Any) -> str:
    """A signature of a gateway."""
    return sign(claims(sequence_id, lease_tokens, **fields), key)
