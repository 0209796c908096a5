"""The `Upstream` Protocol: what the gateway needs of a server that generates tokens.

Implemented by `local_engine.py` (our engine behind ZeroMQ) and `openai/upstream.py` (OpenAI's API).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from engine.messages import (
    Delta,
    EngineKnobs,
    Explained,
    Inventory,
    Ready,
    SequenceOutcome,
    SequenceState,
    Snapshot,
    Submit,
    TenantShare,
    TokenLogprob,
)
from gateway.upstream.capabilities import Capabilities


class UpstreamLost(Exception):
    """The upstream died or is unreachable; what it emitted after the last delta is unknown."""


class UpstreamFailed(UpstreamLost):
    """Failed while answering. `message` is fit for people and holds none of the upstream's own words."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        self.proof: asyncio.Future[bool] | None = None
        """Whether the server answered the gateway's own probe afterwards; None: not probed."""
        self.is_requests = False
        """It did: this request caused the failure."""


class NotBegun(UpstreamFailed):
    """It failed before its first token, so the sequence may be sent to another replica. `code`: `connect`,
    `away` (502 to 504) or `key` (401), which no request causes; `first_byte`, `status`, `closed` or
    `garbage`. `refusal`: raised instead if the server answers others."""

    def __init__(self, code: str, message: str, refusal: SequenceRefused | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.refusal = refusal


class UpstreamUnavailable(Exception):
    """The upstream does not serve now; nothing was sent."""


class UpstreamBusy(UpstreamUnavailable):
    """It is up, and at its maximum of requests (429)."""


class CapabilityLost(UpstreamUnavailable):
    """No available server can do what the request needs; nothing was sent. `need` as in `Capabilities`."""

    def __init__(self, need: str) -> None:
        super().__init__(f"no server that serves now takes {need}")
        self.need = need


class SequenceRefused(Exception):
    """The upstream will never run this sequence. `code` is stable, `message` is fit for the client, whose
    request it may quote; `param`: the field to blame, if known."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


class ReaderTooSlow(Exception):
    """Cancelled because its deltas were not read; raised after the last one, which carries the outcome."""


class RequestTask(StrEnum):
    COMPLETE = "complete"
    EMBED = "embeddings"
    RERANK = "rerank"


class Wording(msgspec.Struct, frozen=True):
    """A sequence as its client put it, for servers that render and tokenise themselves."""

    messages: Sequence[dict[str, Any]] | None = None
    """None: `prompt` is a text completion's."""
    prompt: str | list[int] = ""
    most_tokens: Callable[[], int] | None = None
    """Output tokens that could be held so far, asked of servers without leases; None: `max_tokens`."""
    is_streamed: bool = True
    """False: only the whole answer is of use."""
    fields: Mapping[str, Any] = {}
    """Passed to the server unchanged: tools, response format, fields of its own."""
    sampling: Mapping[str, Any] = {}
    """Only those the client set; the others are the server's choice."""
    needs: frozenset[str] = frozenset()
    """See `Capabilities`."""
    is_uncountable: bool = False
    """The prompt cannot be counted here (images, tools): a margin is held, the server's usage decides."""
    task: RequestTask = RequestTask.COMPLETE
    """Other tasks have everything in `fields`."""
    trace_headers: Mapping[str, str] = {}
    """W3C trace context; empty: no trace."""


Part = Mapping[str, Any]
"""One of `Delta.parts`."""


class ServerLogprob(TokenLogprob, frozen=True, array_like=True):
    """A token's log probability from another server's chat."""

    shown: Mapping[str, Any] = {}
    """The server's own entry: its tokens may be pieces of characters, which only its bytes tell."""


class CountedOutcome(SequenceOutcome, frozen=True, omit_defaults=True):
    """The outcome of a sequence on another server."""

    replica_id: str = ""
    basis: str = "upstream"
    """Source of the token count: `upstream` (its usage), `tokenizer` (the model's, here), `estimate` (by
    bytes) or `gateway` (what was passed on, without any count)."""
    uncertain_tokens: int = 0
    """Bound of tokens generated unseen after a non-streamed answer was given up; not charged."""
    unknown_finish: str = ""
    """Its unknown finish reason, in a line; `finish` is then `stop`."""
    choice_fields: Mapping[str, Any] = {}
    """Further fields of the choice, such as `stop_reason` and `token_ids`; see `ABOUT_PROMPT`."""
    fingerprint: str = ""
    reasoning_tokens: int = 0
    """Emitted tokens that were reasoning, by the server's count."""


ABOUT_PROMPT = ("prompt_token_ids", "prompt_logprobs")
"""Fields of an answer about its prompt."""


class ServersWord(msgspec.Struct, frozen=True):
    """What servers report of a request's answers, all sequences together. Our own engine only says how they
    ended."""

    basis: str = "engine"
    """Source of its token count: `engine` is our own; of several others the least certain."""
    replica_id: str = ""
    """The replica that ran it, which may not be the one that it was sent to."""
    uncertain_tokens: int = 0
    reasoning_tokens: int = 0
    incomplete: str = ""
    closed: bool = False
    """Of an answer that was cut, its end was written."""
    unknown_finish: str = ""
    """The first unknown finish reason among its answers."""


_WEAKEST_FIRST = ("estimate", "gateway", "tokenizer", "upstream")


def servers_word(outcomes: Sequence[SequenceOutcome]) -> ServersWord:
    counted = [outcome for outcome in outcomes if isinstance(outcome, CountedOutcome)]
    cut = [outcome.incomplete for outcome in outcomes]
    incomplete = next((what for what in ("tool_calls", "json") if what in cut), "")
    if not counted:
        return ServersWord(incomplete=incomplete, closed=any(outcome.closed for outcome in outcomes))
    bases = [outcome.basis for outcome in counted]
    return ServersWord(
        next((basis for basis in _WEAKEST_FIRST if basis in bases), "engine"),
        counted[0].replica_id,
        sum([outcome.uncertain_tokens for outcome in counted]),
        sum([outcome.reasoning_tokens for outcome in counted]),
        incomplete,
        unknown_finish=counted[0].unknown_finish,
    )


OnService = Callable[[Mapping[str, TenantShare]], None]


def engine_life(ready: Ready | None) -> str:
    """Identifies one run of an engine process."""
    return "" if ready is None else f"{ready.engine_id}/{ready.life or ready.pid}"


class Upstream(Protocol):
    """Contract: a submitted sequence ends with exactly one delta that carries its outcome, or with
    `UpstreamLost` or `SequenceRefused`; outcomes are kept by the upstream until acknowledged."""

    @property
    def replica_id(self) -> str: ...

    @property
    def name(self) -> str:
        """Of the replica in the whole installation, wherever it runs: queue, drains and gateways' rows go by
        it. `replica_id`, except of an engine that only this gateway reaches."""
        ...

    @property
    def address(self) -> str: ...

    @property
    def is_up(self) -> bool: ...

    @property
    def is_drained(self) -> bool:
        """Taken out of rotation: no new sequences; running ones go on."""
        ...

    @property
    def ready(self) -> Ready | None:
        """Size and model as last announced; None before the first contact."""
        ...

    @property
    def snapshot(self) -> Snapshot | None: ...

    @property
    def running_requests(self) -> int:
        """Requests that arrived from other replicas, past the dispatcher's count."""
        ...

    @property
    def capabilities(self) -> Capabilities: ...

    def describe(self) -> dict[str, Any]:
        """For the status page."""
        ...

    def watch(self, on_change: Callable[[], None]) -> None:
        """Calls back when the upstream comes up or is lost, is drained or resumed."""
        ...

    def listen(self, on_service: OnService) -> None:
        """Calls back with each step's service, before its output can be read; never if none is reported."""
        ...

    def run(self, submit: Submit, wording: Wording) -> AsyncIterator[Delta]:
        """Starts a sequence; iterating gives its deltas. Raises `UpstreamUnavailable` if nothing was sent;
        iterating raises `UpstreamLost`, `SequenceRefused`, `ReaderTooSlow`. Token ids are 0 if unknown."""
        ...

    def top_up(self, sequence_id: str, lease_tokens: int, lease_gpu_us: int | None) -> None:
        """Covers `lease_tokens` emitted tokens and the device time in all. Idempotent, also after the
        sequence's end. Raises `UpstreamUnavailable`."""
        ...

    def cancel(self, sequence_id: str, cause: str) -> None:
        """Stops within one step; the outcome still comes through `run`. Idempotent."""
        ...

    def acknowledge(self, sequence_ids: Sequence[str], *, is_traced: bool = False) -> None:
        """The outcomes are settled and durable. Idempotent. `is_traced`: the upstream makes its spans now."""
        ...

    async def wait_until_up(self, timeout_s: float) -> bool: ...

    async def set_policy(self, name: str, options: Mapping[str, str | int | float]) -> None:
        """From the next step on, also after restarts. Raises ValueError, or `UpstreamLost` (set later)."""
        ...

    def set_knobs(self, knobs: EngineKnobs) -> None:
        """Sets all knobs, also after a restart. No effect on foreign schedulers; our plug-in has some."""
        ...

    def set_brakes(self, shares: Mapping[int, float]) -> None:
        """Sets the share of places, KV cache and step tokens that tiers, by rank, may hold, also after a
        restart; unnamed tiers are not braked. No effect on servers with a scheduler of their own."""
        ...

    def set_drained(self, is_drained: bool) -> None:
        """Takes it out of rotation, or back, without telling the upstream."""
        ...

    async def explain(self, steps: int = 0) -> Explained:
        """The policy, last decisions and tokens of the last `steps` steps. Raises `UpstreamLost`."""
        ...

    async def collect(self, *, adopt: bool = False) -> Inventory:
        """This gateway's unaccounted sequences; `adopt` adds dead gateways'. Raises `UpstreamLost`."""
        ...


class MovableUpstream(ABC):
    """An `Upstream` whose sequences can go on at another of its kind, token for token: our own engines.
    Generators, penalty counts and grammars of other servers cannot be handed over."""

    @abstractmethod
    def takes_kv(self, tokens: int, target: Upstream) -> bool:
        """Whether a sequence of `tokens`, prompt and output, goes on sooner at `target` with its KV."""

    @abstractmethod
    async def export_state(self, sequence_id: str, *, with_kv: bool = True) -> SequenceState | None:
        """Takes a sequence out (None: it is not there); its deltas end without an outcome. Raises
        `UpstreamLost`."""

    @abstractmethod
    def import_state(
        self, state: SequenceState, wording: Wording, after: AsyncIterator[Delta] | None = None
    ) -> AsyncIterator[Delta]:
        """Goes on with a sequence; as `run`. What is not in `state.kv` is recomputed, uncharged. `after`:
        what the call before returned, as an end is judged by the whole answer; None: nothing had come."""


def takes_turns(upstream: Upstream) -> bool:
    return upstream.is_up and not upstream.is_drained
