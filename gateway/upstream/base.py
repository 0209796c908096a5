"""What does the gateway ask of something that generates tokens?

One Protocol. `local_engine.py` is our own engine behind ZeroMQ.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from engine.messages import Delta, Explained, Inventory, ModelInfo, Ready, Snapshot, Submit


class UpstreamLost(Exception):
    """The upstream died or cannot be reached; what it emitted after the last delta is unknown."""


class UpstreamUnavailable(Exception):
    """The upstream does not serve now; nothing was sent."""


class SequenceRefused(Exception):
    """The upstream will never run this sequence. `code` is stable, `message` is fit for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class ReaderTooSlow(Exception):
    """The sequence was cancelled because its deltas were not read; raised after the last one, which carries
    the outcome."""


class Upstream(Protocol):
    """Contract: a submitted sequence ends with exactly one delta that carries its outcome, or with
    `UpstreamLost` or `SequenceRefused`; outcomes are kept by the upstream until acknowledged.
    """

    @property
    def replica_id(self) -> str: ...

    @property
    def is_up(self) -> bool: ...

    @property
    def ready(self) -> Ready | None:
        """Size and model as last announced; None before the first contact."""
        ...

    @property
    def model(self) -> ModelInfo | None: ...

    @property
    def snapshot(self) -> Snapshot | None: ...

    def watch(self, on_change: Callable[[], None]) -> None:
        """Calls back when the upstream comes up or is lost."""
        ...

    def run(self, submit: Submit) -> AsyncIterator[Delta]:
        """Starts a sequence, at once; iterating gives its deltas. Raises `UpstreamUnavailable` where nothing
        was sent; iterating raises `UpstreamLost`, `SequenceRefused`,
        `ReaderTooSlow`."""
        ...

    def top_up(self, sequence_id: str, lease_tokens: int, lease_gpu_us: int | None) -> None:
        """Covers so many emitted tokens, and so much device time, in all. Harmless to repeat, and when the
        sequence has ended. Raises `UpstreamUnavailable`."""
        ...

    def cancel(self, sequence_id: str, cause: str) -> None:
        """Stops within one step; the outcome still comes through `run`. Harmless if it has ended."""
        ...

    def acknowledge(self, sequence_ids: Sequence[str]) -> None:
        """The outcomes are settled and durable. Harmless to repeat, and when the upstream is gone."""
        ...

    async def wait_until_up(self, timeout_s: float) -> bool:
        """Whether it came up in time."""
        ...

    async def set_policy(self, name: str) -> None:
        """Another scheduling policy from the next step on, and after every restart. Raises `UpstreamLost`."""
        ...

    async def explain(self) -> Explained:
        """The policy in force and the last scheduling decisions. Raises `UpstreamLost`."""
        ...

    async def collect(self, *, adopt: bool = False) -> Inventory:
        """Everything of this gateway that is unaccounted for; with `adopt`, what gateways that are gone left
        becomes this one's. Raises `UpstreamLost`."""
        ...
