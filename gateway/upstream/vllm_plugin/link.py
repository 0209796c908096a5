"""The gateway's side of the channel to Fairgate's plug-in in one vLLM server.

One exchange at a time: immediately when there is something to send (all of one loop turn together), every 0.1
s while sequences of this gateway run there, otherwise every second. A server whose plug-in does not answer,
or is incompatible, is not used; `refusal` says why and what to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from engine.messages import EngineKnobs, Explained, Inventory, Ready, RunningSequence, Submit
from engine.scheduling.knobs import turned_options
from engine.scheduling.options import parsed_options
from engine.scheduling.policy import make_policy, options_of
from engine.vllm_plugin.protocol import PROTOCOL_VERSION, About, Exchange, PluginReport, PolicyChoice
from engine.vllm_plugin.signature import ChannelRefused, decode_report, encode_exchange, sign
from gateway.upstream.base import UpstreamLost
from gateway.upstream.vllm_plugin.channel_state import ChannelState
from gateway.upstream.vllm_plugin.server_link import ServerLink
from gateway.upstream.vllm_plugin.transport import ChannelFailed, NoPlugin, Transport
from tenants.storage.task_stop import stop

BUSY_EVERY_S = 0.1
IDLE_EVERY_S = 1.0
ANSWER_S = 20.0
"""The server answers between two steps, and a long prompt is a long step."""
REPLY_S = 45.0
"""Longest wait for an exchange that begins now, after the one before it."""
ORPHANS_EVERY_S = 2.0
NO_PLUGIN = (
    "it has no Fairgate plug-in: start it with --scheduler-cls fairgate_vllm.FairScheduler, or set"
    ' priority = "vllm"'
)
REASONS = {
    "signature": "its plug-in has another key: plugin_key_file and its FAIRGATE_VLLM_KEY_FILE must be copies",
    "time": "its clock and this one's differ by more than a minute: set both by NTP",
    "superseded": "another process uses this gateway's id there",
    "too_many_gateways": "more gateways use its plug-in than it takes",
}
"""By refusal code; the plug-in's own words are logged."""

log = logging.getLogger("fairgate.gateway.upstream")


class PluginLink(ServerLink):
    """Use from one event loop."""

    has_plugin = True

    def __init__(
        self,
        replica_id: str,
        gateway_id: str,
        key: bytes,
        transport: Transport,
        *,
        on_change: Callable[[], None],
    ) -> None:
        """`key` is shared with the plug-in. `on_change`: it came up, was lost, or holds unread outcomes."""
        super().__init__(replica_id)
        self._key = key
        self._transport = transport
        self._on_change = on_change
        self.state = ChannelState(gateway_id, secrets.token_hex(8))
        self.is_up = False
        self.refusal = "its plug-in was not asked yet"
        self._on_rest: dict[str, Callable[[int], None]] = {}
        self._ready: tuple[Ready, About, Ready] | None = None
        """The last answer of `ready`, with what it was made of."""
        self._policy: PolicyChoice | None = None
        """As requested, without the knobs."""
        self._knobs = EngineKnobs()
        self._own_slots = 0
        """Of the server, before a knob changed them; 0: unknown."""
        self._wake = asyncio.Event()
        self._exchanging = asyncio.Lock()
        self._orphans_told_s = float("-inf")
        self._task: asyncio.Task[None] | None = None

    # ------------------------------------------------------------ state

    @property
    def about(self) -> About | None:
        return None if self.state.report is None else self.state.report.about

    def ready(self, ready: Ready) -> Ready:
        about = self.about
        if about is None:
            return ready
        if self._ready is None or self._ready[0] is not ready or self._ready[1] is not about:
            self._ready = ready, about, replace(ready, policy=about.policy, life=self.state.life)
        return self._ready[2]

    def describe(self) -> dict[str, Any]:
        report = self.state.report
        if report is None:
            return {"is_up": self.is_up, "refusal": self.refusal}
        about = report.about
        return {
            "is_up": self.is_up,
            "refusal": self.refusal,
            "version": about.version,
            "vllm_version": about.vllm_version,
            "policy": about.policy,
            "policy_refusal": self.state.policy_refusal,
            "slots": about.slots,
            "places": about.places,
            "not_supported": list(about.not_supported),
            "running": report.running,
            "held": report.held,
            "parked": report.parked,
            "waiting": report.waiting,
            "kv_usage": report.kv_usage,
            "lost_outcomes": report.lost_outcomes,
            "refused_signatures": dict(report.refused_signatures),
        }

    def waits_there(self, sequence_id: str) -> bool:
        return self.is_up and self.state.news(sequence_id).state in ("held", "parked", "waiting")

    # ------------------------------------------------------------ sequences

    def begin(self, submit: Submit, on_rest: Callable[[int], None]) -> str:
        if not self.state.num_running:
            self._wake.set()  # the next exchange is due earlier than it was
        self._on_rest[submit.sequence_id] = on_rest
        return sign(self.state.begin(submit, time.time()), self._key)

    def top_up(self, sequence_id: str, lease_tokens: int) -> None:
        if self.state.top_up(sequence_id, lease_tokens):
            self._wake.set()

    def cancel(self, sequence_id: str, cause: str) -> bool:
        self.state.cancel(sequence_id, cause)
        self._wake.set()
        return self.is_up

    def over(self, sequence_id: str, *, has_outcome: bool) -> None:
        self._on_rest.pop(sequence_id, None)
        self.state.over(sequence_id, has_outcome=has_outcome)

    def acknowledge(self, sequence_ids: Sequence[str]) -> None:
        """With the next regular exchange: nothing waits for it."""
        self.state.acknowledge(sequence_ids)

    # ------------------------------------------------------------ the server

    async def start(self) -> None:
        """Asks once, then regularly."""
        await self.probe()
        self._task = asyncio.create_task(self._keep_talking(), name=f"plug-in of {self.replica_id}")

    async def close(self) -> None:
        """Sends what is left and ends the channel."""
        if self._task is not None:
            await stop([self._task])
        if self.is_up and self.state.has_to_say:
            await self.probe()
        self._transport.close()

    async def probe(self) -> None:
        await self._exchange()

    async def set_policy(self, policy: PolicyChoice) -> None:
        """Sets it, also after restarts. Raises `UpstreamLost` (set later) and ValueError with the reason."""
        self._policy = policy
        self.state.set_policy(self._turned(policy))
        await self._answered()
        # What goes wrong when a step takes it over is in a later report only.
        await asyncio.sleep(BUSY_EVERY_S)
        await self._answered()
        if self.state.policy_refusal:
            raise ValueError(self.state.policy_refusal)

    def set_knobs(self, knobs: EngineKnobs) -> None:
        """By options of the requested policy; a step's tokens are vLLM's."""
        self._knobs = knobs
        if self._policy is not None:
            self.state.set_policy(self._turned(self._policy))
            self._wake.set()

    def _turned(self, policy: PolicyChoice) -> PolicyChoice:
        knobs = self._knobs
        if knobs.slot_share < 1 and not self._own_slots:
            # None was turned since the policy was set: what it tells now is its own.
            self._own_slots = 0 if self.about is None else self.about.slots
        if not self._own_slots:
            # A share of what is not known yet: with the next turn.
            knobs = replace(knobs, slot_share=1.0)
        if knobs == EngineKnobs():
            return policy
        options = parsed_options(policy.options)
        return PolicyChoice(policy.name, turned_options(options, knobs, self._own_slots).changed())

    def explain(self) -> Explained:
        """The active policy and what it is made of, without decisions and steps."""
        if (about := self.about) is None:
            return super().explain()
        try:
            policy = make_policy(about.policy, options_of(about.options))
        except ValueError:
            return Explained(about.policy, {}, options=about.options)
        described = policy.describe()
        choices = {decision: described[decision] for decision in ("order", "admit", "compose", "evict")}
        return Explained(about.policy, choices, options=about.options, decode_slots=about.decode_slots)

    async def collect(self, own: Callable[[], Sequence[RunningSequence]], *, adopt: bool) -> Inventory:
        """Everything unaccounted for, as of an exchange that begins now. Raises `UpstreamLost`."""
        await self._answered(adopt=adopt)
        return self.state.inventory(self.replica_id, own())

    # ------------------------------------------------------------ inside

    async def _answered(self, *, adopt: bool = False) -> None:
        try:
            async with asyncio.timeout(REPLY_S):
                is_answered = await self._exchange(adopt=adopt)
        except TimeoutError:
            is_answered = False
        if not is_answered:
            raise UpstreamLost(self.refusal or "its plug-in does not answer in time")

    async def _keep_talking(self) -> None:
        while True:
            seconds = BUSY_EVERY_S if self.is_up and self.state.num_running else IDLE_EVERY_S
            if not self.is_up:
                await asyncio.sleep(seconds)
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), seconds)
            try:
                await self._exchange()
            except Exception:
                log.exception("the channel to the plug-in of %s failed; it goes on", self.replica_id)
                await asyncio.sleep(IDLE_EVERY_S)

    async def _exchange(self, *, adopt: bool = False) -> bool:
        """Whether it was answered. Retries once: servers close idle connections at any time."""
        async with self._exchanging:
            was_up = self.is_up
            return await self._one_exchange(adopt, is_last=not was_up) or (
                was_up and await self._one_exchange(adopt, is_last=True)
            )

    async def _one_exchange(self, adopt: bool, *, is_last: bool) -> bool:
        self._wake.clear()
        nonce = secrets.token_hex(16)
        exchange = self.state.exchange(nonce, time.time(), adopt=adopt)
        try:
            frame = await self._transport.ask(encode_exchange(exchange, self._key), ANSWER_S)
            report = decode_report(frame, self._key, nonce)
        except NoPlugin:
            self._lost("plugin", NO_PLUGIN)
        except ChannelFailed as error:
            if is_last:
                self._lost("channel", str(error))
        except ChannelRefused as error:
            log.debug("the plug-in of %s: %s", self.replica_id, error)
            self._lost(error.code, _reason(error.code))
        else:
            self._heard(exchange, report)
            return True
        return False

    def _heard(self, exchange: Exchange, report: PluginReport) -> None:
        had_life, had_refusal = self.state.life, self.state.policy_refusal
        self.state.heard(exchange, report)
        was_up, self.is_up, self.refusal, self.refusal_code = self.is_up, True, "", ""
        if not was_up or report.life != had_life:
            about = report.about
            log.info(
                "%s has Fairgate's plug-in %s in vLLM %s: policy %s, %d slots, %d places%s",
                self.replica_id,
                about.version,
                about.vllm_version,
                about.policy,
                about.slots,
                about.places,
                f"; never tried with: {', '.join(about.not_supported)}" if about.not_supported else "",
            )
        if report.policy_refusal and report.policy_refusal != had_refusal:
            log.error("%s does not take the policy: %.400s", self.replica_id, report.policy_refusal)
        if report.service:
            self.on_service(report.service)
        for sequence_id, emitted_tokens in self.state.resting().items():
            self._on_rest[sequence_id](emitted_tokens)
        now_s = time.monotonic()
        has_orphans = bool(self.state.orphans()) and now_s - self._orphans_told_s >= ORPHANS_EVERY_S
        if has_orphans:
            self._orphans_told_s = now_s
        if not was_up or report.life != had_life or has_orphans:
            self._on_change()
        if self.state.has_more:
            self._wake.set()

    def _lost(self, code: str, refusal: str) -> None:
        if refusal != self.refusal:
            log.warning("upstream %s is not used: %s", self.replica_id, refusal)
        was_up, self.is_up, self.refusal, self.refusal_code = self.is_up, False, refusal, code
        if was_up:
            self._on_change()


def _reason(code: str) -> str:
    if code == "protocol_version":
        return (
            f"its plug-in speaks another version of the protocol than this gateway ({PROTOCOL_VERSION}):"
            " install the fairgate-vllm of the gateway's version"
        )
    return REASONS.get(code, "what answers there is no Fairgate plug-in that this gateway can use")
