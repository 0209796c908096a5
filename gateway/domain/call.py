"""A parsed call, and the model that serves it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import force_setattr

from engine.forecast.length.features import Features
from engine.messages import SamplingParams
from gateway.trace_context import TraceContext
from gateway.upstream.base import RequestTask, Wording
from gateway.upstream.capabilities import ServerOffer
from tenants.types import Amounts, Limit, OnLowBudget, Principal, RequestTraits, Tier

if TYPE_CHECKING:
    from gateway.domain.fallback import Fallback
    from gateway.domain.quote_binding import Binding
    from tenants.pricing.pricing import PriceBook


OPENAI_DEFAULTS = SamplingParams()
"""Of sampling."""


class ServedModel(msgspec.Struct, frozen=True):
    """What parsing needs to know of a model."""

    name: str
    context_tokens: int
    """Prompt and answer together."""
    vocabulary: int
    is_estimated: bool = False
    """No tokenizer is known here: prompts are counted by their bytes, with a margin."""
    pool: str = ""
    """The pool that runs it; empty: the pool of that model name."""
    asked: str = ""
    """The name that was asked for, where a chain brought it to this model; empty: `name`."""
    servers: tuple[ServerOffer, ...] = ()
    """What its servers can do; empty: our own engine alone, which generates plain text."""
    image_tokens: int = 0
    """Held for each image."""
    sampling: SamplingParams = OPENAI_DEFAULTS
    """In our own engine, of a request that says nothing."""


@dataclass(frozen=True, slots=True)
class Chained:
    """A call's place in the chain of its alias."""

    fallback: Fallback
    prices: PriceBook
    """Those by which pools were compared: the request is charged by them."""
    onward: Callable[[Exception], Awaitable[Call]]
    """The call for the next pool, after this refusal of the one taken. Raises the refusal where it is none
    that a chain goes on after, and `NoneTook` where no pool is left."""


class Call(msgspec.Struct, frozen=True):
    """One parsed request: its principal, its tokens, its sampling.

    Its sequences are `choices` for each prompt, in OpenAI's order: all choices of the first prompt, then
    those of the next.
    """

    request_id: str
    chat: bool
    """`/v1/chat/completions` rather than `/v1/completions`."""
    model: str
    principal: Principal
    tier: Tier
    prompts: tuple[list[int], ...]
    choices: int
    max_tokens: int
    """For each sequence: `min(max_tokens, context left)`."""
    sampling: SamplingParams
    stream: bool
    include_usage: bool
    created: int
    """Unix time."""
    trace: TraceContext | None = None
    asked_max_tokens: bool = True
    """False: the client named no length; `max_tokens` is what the context leaves."""
    timeout_s: float | None = None
    """How long it may wait for its turn, if its client said so."""
    progress: bool | None = False
    """Whether its stream has headers and reports its wait before its first token; None: where the wait is
    long."""
    max_wait_s: float | None = None
    """The longest wait (p90) that it may be told, if its client said so."""
    max_cost_nanousd: int | None = None
    """The most that it may cost, if its client said so."""
    names_timeout: bool = False
    """Its client said so outright, not only its SDK: in the batch tier its word goes before the tier's."""
    wordings: tuple[Wording, ...] = ()
    """The client's text, by prompt, for servers that tokenise by themselves."""
    pool: str = ""
    """The pool that runs it; empty: the pool of `model`."""
    traits: Features | None = None
    """Features for the length forecast."""
    names_tier: bool = False
    """The client asked for this tier; it is not only its key's default."""
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Of its metadata what its tenant has declared, for the ledger."""
    binding: Binding | None = None
    """The quote that it redeems."""
    end_user: str = ""
    """The end user that the client names; empty: none."""
    task: RequestTask = RequestTask.COMPLETE
    """Others emit no tokens: their `max_tokens` is 0."""
    chained: Chained | None = None
    """None: the name that was asked for means no chain."""
    needs: frozenset[str] = frozenset()
    """What it needs of a server, see `gateway/upstream/capabilities.py`."""
    first_byte_s: float | None = None
    """When its first byte was read, on the gateway's clock; None: it came otherwise than by HTTP."""
    sequences: int = 0
    """Streams of tokens that this request runs (derived: every step asks for it)."""
    input_tokens: int = 0
    """Prompt tokens (derived); a prompt counts once, however many choices it has, as OpenAI bills it."""

    def __post_init__(self) -> None:
        force_setattr(self, "sequences", len(self.prompts) * self.choices)
        force_setattr(self, "input_tokens", sum(map(len, self.prompts)))

    @property
    def max_output_tokens(self) -> int:
        """The most that all sequences together can emit."""
        return self.max_tokens * self.sequences

    @property
    def may_be_cut(self) -> bool:
        """Whether it is admitted where a budget has no room for its longest answer, which then ends with the
        budget."""
        return not self.asked_max_tokens or self.principal.on_low_budget is OnLowBudget.TRUNCATE

    def limits_at(self, now_s: float, tier: Tier | None = None) -> tuple[Limit, ...]:
        """The limits that bind it in its tier, or in another one, as in force at `now_s` (seconds since
        1970)."""
        tokens = self.input_tokens + self.max_output_tokens
        traits = RequestTraits(tier or self.tier, self.model, tokens, self.end_user)
        return self.principal.limits_for(traits, now_s)

    def prompt_of(self, index: int) -> list[int]:
        """The prompt of sequence `index`."""
        return self.prompts[index // self.choices]

    def wording_of(self, index: int) -> Wording:
        """What the client wrote for sequence `index`; without the words, the tokens."""
        prompt = index // self.choices
        return self.wordings[prompt] if self.wordings else Wording(prompt=self.prompts[prompt])

    def sampling_of(self, index: int) -> SamplingParams:
        """The sampling of sequence `index`: choices of one seeded prompt get seeds of their own, or they
        would all be the same."""
        choice = index % self.choices
        seed = self.sampling.seed
        if seed is None or choice == 0:
            return self.sampling
        return msgspec.structs.replace(self.sampling, seed=(seed + choice + 2**63) % 2**64 - 2**63)

    def largest(self, cost_nanousd: int) -> Amounts:
        """The most that it can come to."""
        return Amounts(self.input_tokens, self.max_output_tokens, cost_nanousd, requests=1)
