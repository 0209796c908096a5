"""The `Upstream` Protocol: what the gateway needs of a server that generates tokens.

`local_engine.py` is our own engine behind ZeroMQ, `gateway/upstream/openai/upstream.py` any server that
speaks OpenAI's API.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from engine.messages import (
    Delta,
    Explained,
    Inventory,
    ModelInfo,
    Ready,
    SequenceOutcome,
    Snapshot,
    Submit,
    TenantShare,
)


class UpstreamLost(Exception):
    """The upstream died or cannot be reached; what it emitted after the last delta is unknown."""


class UpstreamFailed(UpstreamLost):
    """The upstream failed while answering: a broken stream, a silence, an error of its own. `message` is fit
    for people and holds none of the upstream's own words."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class NotBegun(UpstreamFailed):
    """It failed before its first token: the same sequence may be sent to another replica. `code` says how:
    `connect`, `first_byte`, `status`, `closed` or `garbage`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


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


class Wording(msgspec.Struct, frozen=True):
    """A sequence as its client put it, for servers that render and tokenise themselves."""

    messages: Sequence[dict[str, Any]] | None = None
    """Of a chat; None: `prompt` is a text completion's."""
    prompt: str | list[int] = ""
    most_tokens: Callable[[], int] | None = None
    """Output tokens that could be held for this sequence so far: servers without leases are asked for no
    more. None: all of `max_tokens`."""
    is_streamed: bool = True
    """The client reads its tokens as they come; False: only the whole answer is of use."""


class CountedOutcome(SequenceOutcome, frozen=True, omit_defaults=True):
    """The outcome of a sequence that another server ran."""

    replica_id: str = ""
    basis: str = "upstream"
    """Source of the token count: `upstream` (its usage), `tokenizer` (the model's, here), `estimate` (by
    bytes) or `gateway` (what was passed on, without any count)."""
    uncertain_tokens: int = 0
    """Upper bound of further tokens that were generated unseen: the answer was to come whole, and was given
    up. They are not charged."""


def basis_of(outcomes: Sequence[SequenceOutcome]) -> str:
    """Source of a request's token count: `engine` is our own; of several others the least certain."""
    found = {each.basis for each in outcomes if isinstance(each, CountedOutcome)}
    weakest_first = ("estimate", "gateway", "tokenizer", "upstream")
    return next((basis for basis in weakest_first if basis in found), "engine")


def uncertain_tokens(outcomes: Sequence[SequenceOutcome]) -> int:
    """Upper bound of a request's tokens that were generated unseen."""
    return sum(each.uncertain_tokens for each in outcomes if isinstance(each, CountedOutcome))


def served_by(upstream: Upstream | None, outcomes: Sequence[SequenceOutcome]) -> str | None:
    """The replica that ran a request which was sent to `upstream`, and may have been moved from there."""
    moved = next((each.replica_id for each in outcomes if isinstance(each, CountedOutcome)), "")
    return moved or (upstream.replica_id if upstream is not None else None)


OnService = Callable[[Mapping[str, TenantShare]], None]
"""Gets the service of one step, by tenant."""


def engine_life(ready: Ready | None) -> str:
    """Name of one life of an engine, as it announced itself: after a restart it has another."""
    return "" if ready is None else f"{ready.engine_id}/{ready.pid}"


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

    def describe(self) -> dict[str, Any]:
        """For the status page: name, kind, and why it is not used."""
        ...

    def watch(self, on_change: Callable[[], None]) -> None:
        """Calls back when the upstream comes up or is lost."""
        ...

    def listen(self, on_service: OnService) -> None:
        """Calls back with the service of each step, before what it emitted can be read. Never where the
        server reports none."""
        ...

    def run(self, submit: Submit, wording: Wording) -> AsyncIterator[Delta]:
        """Starts a sequence immediately; iterating gives its deltas. Raises `UpstreamUnavailable` where
        nothing was sent; iterating raises `UpstreamLost`, `SequenceRefused`, `ReaderTooSlow`.

        Token ids are 0 where only their number is known.
        """
        ...

    def top_up(self, sequence_id: str, lease_tokens: int, lease_gpu_us: int | None) -> None:
        """Covers `lease_tokens` emitted tokens and the device time in all. Harmless to repeat, and after the
        sequence's end. Raises `UpstreamUnavailable`."""
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

    async def set_policy(self, name: str, options: Mapping[str, str | int | float]) -> None:
        """Sets the scheduling policy with these options from the next step on, and after every restart.
        Raises `UpstreamLost` (it is set when the upstream is back), and ValueError where it is refused."""
        ...

    def set_token_budget(self, share: float) -> None:
        """Sets the share of a step's token budget that is used at most, also after a restart. No effect where
        the upstream has a scheduler of its own."""
        ...

    def set_brakes(self, shares: Mapping[int, float]) -> None:
        """Sets the share of places, KV cache and step tokens that tiers, by rank, may hold, also after a
        restart; a tier that is not named is not braked. No effect where the upstream has a scheduler of its
        own."""
        ...

    async def explain(self, steps: int = 0) -> Explained:
        """The policy in force, the last scheduling decisions and the tokens of the last `steps` steps. Raises
        `UpstreamLost`."""
        ...

    async def collect(self, *, adopt: bool = False) -> Inventory:
        """Everything unaccounted for of this gateway; `adopt` adds what dead gateways left. Raises
        `UpstreamLost`."""
        ...
