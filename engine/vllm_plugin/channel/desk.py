"""`GatewayDesk`: the gateway's side inside a vLLM server (implements `seam.Desk`).

The scheduler calls it on the engine core's thread, the channel on any: every public method takes the lock.
Times are seconds of a clock that only rises; signatures go by the wall clock that it is given.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from engine.scheduling.options import PolicyOptions
from engine.vllm_plugin.channel.claims_check import ClaimsCheck, NotAsked, SeenOnce
from engine.vllm_plugin.channel.gateways import (
    ChannelGateway,
    GatewayRefused,
    KnownGateways,
    LiveSequence,
    UntoldService,
)
from engine.vllm_plugin.channel.news import news_of_end, sequence_news, submit_of
from engine.vllm_plugin.channel.pending import PendingCommands
from engine.vllm_plugin.channel.server_state import ServerState
from engine.vllm_plugin.protocol import About, ContractClaims, Exchange, PluginReport, PolicyChoice
from engine.vllm_plugin.seam import Controls, Ended, ServiceTerms, StepService, VllmRequest, default_terms
from engine.vllm_plugin.signature import ChannelRefused, SignatureRefused

CAUSES = frozenset({"budget", "cancelled", "expired", "failed"})
SILENCE_CHECK_S = 0.25
LOG_EVERY_S = 60.0
"""The same complaint is logged at most so often."""

log = logging.getLogger("fairgate.vllm_plugin")


class GatewayDesk:
    """See the module; one for each engine core."""

    def __init__(
        self,
        key: bytes | None,
        *,
        timeout_s: float,
        life: str,
        version: str,
        wall_clock: Callable[[], float],
        check_policy: Callable[[str, dict[str, Any]], PolicyOptions],
    ) -> None:
        """`key` None: no signature is valid. A gateway silent for `timeout_s` is gone. `life` names this
        server's run, `version` the plug-in's. `check_policy` returns options, or raises ValueError."""
        self._life = life
        self._wall_clock = wall_clock
        self._check_policy = check_policy
        self._timeout_s = timeout_s
        # Reentrant: what it tells the scheduler may end a sequence at once.
        self._lock = threading.RLock()
        self._gateways = KnownGateways(timeout_s=timeout_s)
        self._live: dict[str, LiveSequence] = {}
        self._pending = PendingCommands()
        self._claims_check = ClaimsCheck(key, life)
        self._nonces_seen = SeenOnce()
        self._refused: Counter[str] = Counter()
        self._logged_s: dict[str, float] = {}
        self._server = ServerState(version)
        self._choice: PolicyChoice | None = None
        self._policy_refusal = ""
        self._controls: Controls | None = None
        self.answer: Callable[[bytes], bytes] | None = None
        self._position = 0
        self._silence_checked_s = 0.0
        self._is_asked = False
        self._refreshed = threading.Condition(self._lock)

    # ------------------------------------------------------------ the scheduler's calls

    def terms(self, request: VllmRequest, now_s: float) -> ServiceTerms:
        """Whose a request is: its verified claims, or the default tenant's. Never raises."""
        params = request.sampling_params
        extra = (params.extra_args if params is not None else None) or {}
        with self._lock:
            try:
                claims, gateway = self._verified(extra.get("fairgate"), now_s)
            except NotAsked:
                return default_terms(request)
            except (SignatureRefused, GatewayRefused) as error:
                self._refused[error.code] += 1
                self._complain(
                    f"request: {error.code}",
                    f"a request is of the default tenant ({error.code}): {error}",
                    now_s,
                )
                return default_terms(request)
            early = gateway.early.pop(claims.sequence_id, None)
            lease_tokens = claims.lease_tokens
            if early is not None:
                lease_tokens = max(lease_tokens, early.lease_tokens)
                if early.cause:
                    self._pending.end(claims.sequence_id, early.cause)
            sequence = LiveSequence(
                claims.sequence_id,
                claims.request_id,
                claims.tenant_id,
                claims.tier,
                request.num_prompt_tokens,
                lease_tokens,
                now_s,
                gateway,
                claims.index,
            )
            self._live[claims.sequence_id] = sequence
            gateway.own(sequence)
            return ServiceTerms(submit_of(claims, request.max_tokens, lease_tokens), gateway.gateway_id, True)

    def before_step(self, controls: Controls, now_s: float) -> None:
        """Applies gateways' commands since the last step; ends paused sequences of silent ones."""
        with self._lock:
            self._controls = controls
            self._apply()
            if now_s - self._silence_checked_s >= SILENCE_CHECK_S:
                self._silence_checked_s = now_s
                self._end_orphans(controls, now_s)
            if self._is_asked or not self._server.is_known:
                self._refresh(controls)

    def after_step(self, service: StepService, now_s: float) -> None:
        """Keeps the step's service for the gateways whose sequences had it."""
        with self._lock:
            lifted: set[str] = set()
            for gateway in self._gateways:
                for tenant_id, share in service.shares.items():
                    own = share.by_gateway.get(gateway.gateway_id)
                    if own is None and tenant_id not in gateway.tenants:
                        continue
                    lifts = {} if tenant_id in lifted else share.lifts
                    lifted.add(tenant_id)
                    computed, emitted = (own.computed_tokens, own.emitted_tokens) if own else (0, 0)
                    gateway.service.add(tenant_id, UntoldService(computed, emitted, share.serials, lifts))

    def ended(self, ended: Ended, now_s: float) -> None:
        """Keeps the outcome of a gateway's sequence until it is acknowledged."""
        with self._lock:
            sequence = self._live.pop(ended.sequence_id, None)
            if sequence is None:
                return
            gateway = sequence.gateway
            gateway.release(sequence)
            gateway.keep(ended.sequence_id, news_of_end(sequence, ended, now_s))

    # ------------------------------------------------------------ the channel's calls

    @property
    def about(self) -> About:
        """What runs here; the policy is the one in force from the next step on."""
        with self._lock:
            return self._server.about(self._pending.policy)

    def ask(self, wait_s: float) -> None:
        """Lets the next step read sequences' state; waits up to `wait_s`, not on the engine core's thread."""
        with self._refreshed:
            if self._live:
                self._is_asked = True
                self._refreshed.wait(wait_s)

    def ask_now(self) -> None:
        """Reads the state of sequences: on the engine core's thread only."""
        with self._lock:
            if self._controls is not None:
                self._refresh(self._controls)

    def exchange(self, said: Exchange, now_s: float) -> PluginReport:
        """Takes a gateway's authenticated exchange and answers it. Raises `ChannelRefused`."""
        with self._lock:
            if not self._nonces_seen.is_first(said.nonce, said.issued_at_s, self._wall_clock()):
                raise ChannelRefused("replayed", "this exchange was sent before: sign each anew")
            try:
                gateway = self._hear(said.gateway_id, said.session, now_s)
            except GatewayRefused as error:
                raise ChannelRefused(error.code, str(error)) from None
            for sequence_id in said.acknowledges:
                gateway.outcomes.pop(sequence_id, None)
            self._take_words(gateway, said, now_s)
            if said.adopt:
                for sequence in self._gateways.adopt(gateway, now_s):
                    self._pending.end(sequence.sequence_id, "cancelled")
            if said.policy is not None and said.policy != self._choice:
                self._choose(said.policy)
            heard = said.report_from if said.life == self._life else 0
            return self._report(gateway, said.nonce, heard, now_s)

    def _verified(self, signed: object, now_s: float) -> tuple[ContractClaims, ChannelGateway]:
        claims = self._claims_check.verified(signed, self._wall_clock())
        gateway = self._hear(claims.gateway_id, claims.session, now_s)
        if claims.sequence_id in self._live:
            raise SignatureRefused("running", f"sequence {claims.sequence_id} runs already")
        return claims, gateway

    def _hear(self, gateway_id: str, session: str, now_s: float) -> ChannelGateway:
        gateway, is_new = self._gateways.hear(gateway_id, session, now_s)
        if is_new:
            log.info("gateway %s is connected", gateway_id)
            self._pending.begin_words()
            for sequence_id in gateway.live:
                self._pending.end(sequence_id, "cancelled")
        return gateway

    def _take_words(self, gateway: ChannelGateway, said: Exchange, now_s: float) -> None:
        """Takes the top-ups and cancels of the sender's own sequences."""
        for sequence_id, lease_tokens in said.top_ups.items():
            sequence = gateway.live.get(sequence_id)
            if sequence is not None:
                sequence.lease_tokens = max(sequence.lease_tokens, lease_tokens)
                self._pending.top_up(sequence_id, lease_tokens)
            elif sequence_id not in gateway.outcomes:
                gateway.say_early(sequence_id, now_s, lease_tokens=lease_tokens)
        for sequence_id, cause in said.cancels.items():
            cause = cause if cause in CAUSES else "cancelled"
            if sequence_id in gateway.live:
                self._pending.end(sequence_id, cause)
            elif sequence_id not in gateway.outcomes:
                gateway.say_early(sequence_id, now_s, cause=cause)

    def _choose(self, choice: PolicyChoice) -> None:
        self._choice, self._policy_refusal = choice, ""
        try:
            self._pending.set_policy(choice, self._check_policy(choice.name, choice.options))
        except ValueError as error:
            self._policy_refusal = str(error)[:1000]

    def _apply(self) -> None:
        assert self._controls is not None
        # With another policy the description is another.
        self._is_asked |= self._pending.policy is not None
        try:
            self._pending.apply(self._controls)
        except ValueError as error:
            # It exists, and does not go with this server's sizes.
            self._policy_refusal = str(error)[:1000]

    def _end_orphans(self, controls: Controls, now_s: float) -> None:
        """Ends sequences of silent gateways whose leases are used up: no one will raise them."""
        silent = [
            gateway for gateway in self._gateways if gateway.live and self._gateways.is_silent(gateway, now_s)
        ]
        if not silent:
            return
        self._refresh(controls)
        for gateway in silent:
            for sequence in list(gateway.live.values()):
                if sequence.is_used_up:
                    controls.end(sequence.sequence_id, "budget")
            self._complain(
                f"silent: {gateway.gateway_id}",
                f"gateway {gateway.gateway_id} was silent for more than {self._timeout_s:g} s: its sequences"
                " end with their leases",
                now_s,
            )

    def _refresh(self, controls: Controls) -> None:
        self._server.read(controls, self._live)
        self._is_asked = False
        self._refreshed.notify_all()

    def _report(self, gateway: ChannelGateway, nonce: str, heard: int, now_s: float) -> PluginReport:
        self._position = position = self._position + 1
        return PluginReport(
            nonce=nonce,
            life=self._life,
            about=self._server.about(self._pending.policy, nonce),
            step=position,
            steps=self._server.steps,
            service=gateway.service.take(heard, position),
            sequences=sequence_news(gateway, heard, position),
            lost_outcomes=gateway.lost_outcomes,
            kv_usage=self._server.kv_usage,
            policy_refusal=self._policy_refusal,
            refused_signatures=dict(self._refused),
            gateways=self._gateways.heard_lately(now_s),
            **self._server.counts,
        )

    def _complain(self, about: str, message: str, now_s: float) -> None:
        if now_s - self._logged_s.get(about, float("-inf")) < LOG_EVERY_S:
            return
        if len(self._logged_s) >= 256:
            self._logged_s.clear()
        self._logged_s[about] = now_s
        log.warning("%s", message)
