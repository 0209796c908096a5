"""The server's own state: its description, and its sequences by state. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from engine.messages import RunningSequence
from engine.vllm_plugin.channel.gateways import LiveSequence
from engine.vllm_plugin.protocol import About, PolicyChoice
from engine.vllm_plugin.seam import Controls

STATES = ("running", "held", "parked", "waiting")


class ServerState:
    """The server as last read."""

    def __init__(self, version: str) -> None:
        self.is_known = False
        self.counts = dict.fromkeys(STATES, 0)
        self.steps = 0
        self.kv_usage = 0.0
        self._about = About(version, "", "")

    def read(self, controls: Controls, live: Mapping[str, LiveSequence]) -> None:
        """Reads it, and notes in `live` (by sequence) how far each is."""
        counts: Counter[str] = Counter()
        for running in controls.sequences():
            state = state_of(running)
            counts[state] += 1
            sequence = live.get(running.sequence_id)
            if sequence is not None:
                sequence.state, sequence.emitted_tokens = state, running.emitted_tokens
                sequence.computed_tokens = running.computed_tokens
        self.counts = {state: counts[state] for state in STATES}
        described = controls.describe()
        self.steps, self.kv_usage = described.get("step", 0), described.get("kv_usage", 0.0)
        self._about = About(
            self._about.version,
            described.get("vllm", ""),
            described.get("policy", ""),
            dict(described.get("options", {})),
            described.get("slots", 0),
            described.get("places", 0),
            list(described.get("not_supported", ())),
            decode_slots=described.get("decode_slots"),
        )
        self.is_known = True

    def about(self, choice: PolicyChoice | None, nonce: str = "") -> About:
        """The description; `choice` is the policy from the next step on, None: the one in force."""
        about = self._about
        name, options = (about.policy, about.options) if choice is None else (choice.name, choice.options)
        return About(
            about.version, about.vllm_version, name, options, about.slots, about.places, about.not_supported,
            nonce=nonce, decode_slots=about.decode_slots,
        )  # fmt: skip


def state_of(sequence: RunningSequence) -> str:
    """The engine's state as the channel's: `paused` keeps its KV, `preempted` does not."""
    if sequence.state not in ("paused", "preempted"):
        return sequence.state
    if sequence.emitted_tokens >= sequence.lease_tokens:
        return "parked"
    return "held" if sequence.state == "paused" else "waiting"
