"""The `Upstream` Protocol: what the gateway needs of a server that generates tokens.

`local_engine.py` is our own engine behind ZeroMQ, `gateway/upstream/openai/upstream.py` any server that
speaks OpenAI's API.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from engine.messages import (
    Delta,
    EngineKnobs,
    Explained,
    Inventory,
    ModelInfo,
    Ready,
    SequenceOutcome,
    Snapshot,
    Submit,
    TenantShare,
    TokenLogprob,
)
from gateway.upstream.capabilities import Capabilities


class UpstreamLost(Exception):
    """The upstream died or cannot be reached; what it emitted after the last delta is unknown."""


class UpstreamFailed(UpstreamLost):
    """The upstream failed while answering: a broken stream, a silence, an error of its own. `message` is fit
    for people and holds none of the upstream's own words."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        self.proof: asyncio.Future[bool] | None = None
        """Resolves to whether the server answered the gateway's own request after this; None: it is not
        asked."""
        self.is_requests = False
        """It did: it was this request that failed."""


class NotBegun(UpstreamFailed):
    """It failed before its first token: the same sequence may be sent to another replica. `code` says how:
    `connect`, `away` (502 to 504) or `key` (401), which no request causes; `first_byte`, `status`, `closed`
    or `garbage`. `refusal`: what it is instead where the server answers others."""

    def __init__(self, code: str, message: str, refusal: SequenceRefused | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.refusal = refusal


class UpstreamUnavailable(Exception):
    """The upstream does not serve now; nothing was sent."""


class UpstreamBusy(UpstreamUnavailable):
    """It is up, and has as many requests as it takes (429)."""


class CapabilityLost(UpstreamUnavailable):
    """No server that serves now can do what the request needs; nothing was sent. `need` as in
    `Capabilities`."""

    def __init__(self, need: str) -> None:
        super().__init__(f"no server that serves now takes {need}")
        self.need = need


class SequenceRefused(Exception):
    """The upstream will never run this sequence. `code` is stable, `message` is fit for the client, whose
    request it may quote; `param` is the field to blame, where that is known."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


class ReaderTooSlow(Exception):
    """The sequence was cancelled because its deltas were not read; raised after the last one, which carries
    the outcome."""


class RequestTask(StrEnum):
    """What a request asks of a server."""

    COMPLETE = "complete"
    """Text, as a chat or a text completion."""
    EMBED = "embeddings"
    RERANK = "rerank"


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
    fields: Mapping[str, Any] = {}
    """Request fields that are passed to the server as they are: tools, response format, fields of its own."""
    sampling: Mapping[str, Any] = {}
    """Sampling fields as the client said them. What it did not say is the server's to choose."""
    needs: frozenset[str] = frozenset()
    """What the request needs of a server, see `Capabilities`."""
    is_uncountable: bool = False
    """The gateway cannot count this prompt exactly (images, tools): it is held with a margin, and the
    server's usage decides, up to what is held."""
    task: RequestTask = RequestTask.COMPLETE
    """Other tasks have all that the client sent in `fields`."""
    trace_headers: Mapping[str, str] = {}
    """Of the W3C trace context, checked; empty: the request is of no trace."""


Part = Mapping[str, Any]
"""A piece of an answer that is not plain text, as one delta object of OpenAI's chat stream: `tool_calls`,
`function_call`, `reasoning_content` or `reasoning`, `refusal`, `annotations`."""


class CountedDelta(Delta, frozen=True, omit_defaults=True):
    """A delta of a sequence that another server runs."""

    parts: tuple[Part, ...] = ()
    """In the order in which they came. They stand before `text`."""


class ServerLogprob(TokenLogprob, frozen=True, array_like=True):
    """A token's log probability as another server tells it in a chat."""

    shown: Mapping[str, Any] = {}
    """The server's own entry, for the client: its tokens may be pieces of characters, which only its bytes
    tell."""


def parts_of(delta: Delta) -> tuple[Part, ...]:
    """What a delta has beside text; nothing where our own engine sent it."""
    return delta.parts if isinstance(delta, CountedDelta) else ()


class CountedOutcome(SequenceOutcome, frozen=True, omit_defaults=True):
    """The outcome of a sequence that another server ran."""

    replica_id: str = ""
    basis: str = "upstream"
    """Source of the token count: `upstream` (its usage), `tokenizer` (the model's, here), `estimate` (by
    bytes) or `gateway` (what was passed on, without any count)."""
    uncertain_tokens: int = 0
    """Upper bound of further tokens that were generated unseen: the answer was to come whole, and was given
    up. They are not charged."""
    finish_word: str = ""
    """The server's own finish reason where it says more than `finish`: `tool_calls`, `function_call`,
    `content_filter`, `repetition`."""
    unknown_finish: str = ""
    """Its own finish reason where it is none that is known, in a line; `finish` is `stop` then."""
    choice_fields: Mapping[str, Any] = {}
    """Further fields of the choice that the server sent with its end, such as `stop_reason`, or beside its
    text, such as `token_ids`; of a chat those `ABOUT_PROMPT` stand beside the choices."""
    fingerprint: str = ""
    """The server's `system_fingerprint`."""
    reasoning_tokens: int = 0
    """Emitted tokens that were reasoning, as the server says."""
    incomplete: str = ""
    """What was cut in the middle: `tool_calls`, `json` (an answer that was to be JSON) or nothing (empty)."""


ABOUT_PROMPT = ("prompt_token_ids", "prompt_logprobs")
"""Fields of an answer that say something of its prompt."""


class ServersWord(msgspec.Struct, frozen=True):
    """What other servers say of a request's answers, all sequences together; our own engine says none of
    it."""

    basis: str = "engine"
    """Source of its token count: `engine` is our own; of several others the least certain."""
    replica_id: str = ""
    """The replica that ran it, which may not be the one that it was sent to."""
    uncertain_tokens: int = 0
    """Upper bound of its tokens that were generated unseen."""
    reasoning_tokens: int = 0
    """Its tokens that were reasoning."""
    incomplete: str = ""
    """What of its answers was cut in the middle; empty: nothing."""
    unknown_finish: str = ""
    """How the first of its answers ended, where its server has a word of its own for that."""


_WEAKEST_FIRST = ("estimate", "gateway", "tokenizer", "upstream")


def servers_word(outcomes: Sequence[SequenceOutcome]) -> ServersWord:
    """See `ServersWord`."""
    counted = [each for each in outcomes if isinstance(each, CountedOutcome)]
    if not counted:
        return ServersWord()
    bases = [each.basis for each in counted]
    cut = [each.incomplete for each in counted]
    return ServersWord(
        next((basis for basis in _WEAKEST_FIRST if basis in bases), "engine"),
        counted[0].replica_id,
        sum([each.uncertain_tokens for each in counted]),
        sum([each.reasoning_tokens for each in counted]),
        next((what for what in ("tool_calls", "json") if what in cut), ""),
        counted[0].unknown_finish,
    )


OnService = Callable[[Mapping[str, TenantShare]], None]
"""Gets the service of one step, by tenant."""


def engine_life(ready: Ready | None) -> str:
    """Name of one life of an engine, as it announced itself: after a restart it has another."""
    return "" if ready is None else f"{ready.engine_id}/{ready.life or ready.pid}"


class Upstream(Protocol):
    """Contract: a submitted sequence ends with exactly one delta that carries its outcome, or with
    `UpstreamLost` or `SequenceRefused`; outcomes are kept by the upstream until acknowledged.
    """

    @property
    def replica_id(self) -> str: ...

    @property
    def address(self) -> str:
        """Unique among all servers: two gateways that name it may call it by other names."""
        ...

    @property
    def is_up(self) -> bool: ...

    @property
    def is_drained(self) -> bool:
        """Taken out of rotation by an operator: it gets no new sequence, and what runs there goes on."""
        ...

    @property
    def ready(self) -> Ready | None:
        """Size and model as last announced; None before the first contact."""
        ...

    @property
    def model(self) -> ModelInfo | None: ...

    @property
    def snapshot(self) -> Snapshot | None: ...

    @property
    def running_requests(self) -> int:
        """Requests of this gateway that it counts itself, because some come from replicas that did not begin
        them, past the dispatcher; 0: none does."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What it can do beyond plain text, as last known."""
        ...

    def describe(self) -> dict[str, Any]:
        """For the status page: name, kind, and why it is not used."""
        ...

    def watch(self, on_change: Callable[[], None]) -> None:
        """Calls back when the upstream comes up or is lost, is drained or resumed."""
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

    def acknowledge(self, sequence_ids: Sequence[str], *, is_traced: bool = False) -> None:
        """The outcomes are settled and durable. Harmless to repeat, and when the upstream is gone.
        `is_traced`: their trace is kept; an upstream that makes spans makes them now."""
        ...

    async def wait_until_up(self, timeout_s: float) -> bool:
        """Whether it came up in time."""
        ...

    async def set_policy(self, name: str, options: Mapping[str, str | int | float]) -> None:
        """Sets the scheduling policy with these options from the next step on, and after every restart.
        Raises `UpstreamLost` (it is set when the upstream is back), and ValueError where it is refused."""
        ...

    def set_knobs(self, knobs: EngineKnobs) -> None:
        """Turns the knobs of its scheduler, all of them, also after a restart. No effect where the upstream
        has a scheduler of its own; our plug-in has some of them."""
        ...

    def set_brakes(self, shares: Mapping[int, float]) -> None:
        """Sets the share of places, KV cache and step tokens that tiers, by rank, may hold, also after a
        restart; a tier that is not named is not braked. No effect where the upstream has a scheduler of its
        own."""
        ...

    def set_drained(self, is_drained: bool) -> None:
        """Takes it out of rotation, or back. The upstream itself is not told: what runs there goes on."""
        ...

    async def explain(self, steps: int = 0) -> Explained:
        """The policy in force, the last scheduling decisions and the tokens of the last `steps` steps. Raises
        `UpstreamLost`."""
        ...

    async def collect(self, *, adopt: bool = False) -> Inventory:
        """Everything unaccounted for of this gateway; `adopt` adds what dead gateways left. Raises
        `UpstreamLost`."""
        ...


def takes_turns(upstream: Upstream) -> bool:
    """Whether new sequences may be sent to it: it serves, and is not drained."""
    return upstream.is_up and not upstream.is_drained
