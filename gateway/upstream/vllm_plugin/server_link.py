"""The channel to our plug-in in a server that has none: it asks for nothing and knows of no lease."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine.messages import EngineKnobs, Explained, Inventory, Ready, RunningSequence, Submit
from engine.vllm_plugin.protocol import PolicyChoice
from gateway.upstream.base import OnService, UpstreamLost


class ServerLink:
    """The base of `PluginLink`, and what stands in its place at a server without the plug-in."""

    has_plugin = False
    is_up = True
    """The last exchange was answered."""
    refusal = ""
    """Why it is not used; empty: it is."""
    refusal_code = ""

    def __init__(self, replica_id: str) -> None:
        self.replica_id = replica_id
        self.on_service: OnService = lambda service: None
        """Called with the service of the steps since the last report, by tenant."""

    def ready(self, ready: Ready) -> Ready:
        """The server as the monitor knows it, with its policy and its life."""
        return ready

    def describe(self) -> dict[str, Any] | None:
        return None

    def waits_there(self, sequence_id: str) -> bool:
        """Whether the sequence waits for its turn or its lease."""
        return False

    def begin(self, submit: Submit, on_rest: Callable[[int], None]) -> str:
        """Notes a sequence about to be sent; returns the signed claims for its request. `on_rest`: called at
        each report with its emitted tokens once it has used up its lease."""
        return ""

    def top_up(self, sequence_id: str, lease_tokens: int) -> None: ...

    def cancel(self, sequence_id: str, cause: str) -> bool:
        """Whether the server ends it within a step, and its stream brings the end."""
        return False

    def over(self, sequence_id: str, *, has_outcome: bool) -> None: ...

    def acknowledge(self, sequence_ids: Sequence[str]) -> None: ...

    async def start(self) -> None: ...

    async def probe(self) -> None: ...

    async def close(self) -> None: ...

    async def set_policy(self, policy: PolicyChoice) -> None: ...

    def set_knobs(self, knobs: EngineKnobs) -> None: ...

    def explain(self) -> Explained:
        """The active policy and what it is made of. Raises `UpstreamLost`."""
        raise UpstreamLost("it does not tell its decisions")

    async def collect(self, own: Callable[[], Sequence[RunningSequence]], *, adopt: bool) -> Inventory:
        """Everything unaccounted for. Raises `UpstreamLost`."""
        return Inventory(self.replica_id, list(own()), [])
