"""Gateways' commands that wait for the scheduler, which takes them between steps only."""

from __future__ import annotations

from engine.scheduling.options import PolicyOptions
from engine.vllm_plugin.protocol import PolicyChoice
from engine.vllm_plugin.seam import Controls


class PendingCommands:
    """Top-ups, ends and a policy, the last of each; bounded by the live sequences."""

    def __init__(self) -> None:
        self.policy: PolicyChoice | None = None
        self._options = PolicyOptions()
        self._top_ups: dict[str, int] = {}
        self._ends: dict[str, str] = {}
        self._begins = False

    def top_up(self, sequence_id: str, lease_tokens: int) -> None:
        """`lease_tokens` in all; it never shrinks."""
        self._top_ups[sequence_id] = max(self._top_ups.get(sequence_id, 0), lease_tokens)

    def end(self, sequence_id: str, cause: str) -> None:
        self._ends.setdefault(sequence_id, cause)

    def set_policy(self, choice: PolicyChoice, options: PolicyOptions) -> None:
        self.policy, self._options = choice, options

    def begin_words(self) -> None:
        self._begins = True

    def apply(self, controls: Controls) -> None:
        """Hands everything to the scheduler, once. Raises ValueError for a policy that it refuses."""
        if self._begins:
            self._begins = False
            controls.begin_words()
        top_ups, self._top_ups = self._top_ups, {}
        for sequence_id, lease_tokens in top_ups.items():
            controls.top_up(sequence_id, lease_tokens)
        ends, self._ends = self._ends, {}
        for sequence_id, cause in ends.items():
            controls.end(sequence_id, cause)
        if self.policy is not None:
            choice, self.policy = self.policy, None
            controls.set_policy(choice.name, self._options)
