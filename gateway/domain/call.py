"""A parsed call, and the model that serves it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import force_setattr

from engine.forecast.length.features import Features
from engine.messages import Grammar, SamplingParams
from gateway.trace_context import TraceContext
from gateway.upstream.base import RequestTask, Wording
from gateway.upstream.capabilities import ServerOffer
from tenants.types import Amounts, Limit, OnLowBudget, Principal, RequestTraits, Tier

if TYPE_CHECKING:
    from gateway.domain.fallback import Fallback
    from gateway.domain.quote_binding import Binding
    from tenants.pricing.pricing import PriceBook


OPENAI_DEFAULTS = SamplingParams()


class ServedModel(msgspec.Struct, frozen=True):
    name: str
    context_tokens: int
    vocabulary: int
    is_estimated: bool = False
    """No tokenizer is known: prompts are counted by bytes, with a margin."""
    pool: str = ""
    """Empty: the pool named as the model."""
    asked: str = ""
    """The requested name if a chain led to this model; empty: `name`."""
    servers: tuple[ServerOffer, ...] = ()
    """Empty: our own engine alone, of which only plain text is known."""
    image_tokens: int = 0
    """Held for each image."""
    sampling: SamplingParams = OPENAI_DEFAULTS


@dataclass(frozen=True, slots=True)
class Chained:
    fallback: Fallback
    prices: PriceBook
    """Those by which pools were compared: the request is charged by them."""
    onward: Callable[[Exception], Awaitable[Call]]
    """The call for the next pool. Raises the refusal if no chain goes on after it, `NoneTook` at its end."""


class Call(msgspec.Struct, frozen=True):
    """One parsed request. Its sequences are `choices` for each prompt, in OpenAI's order."""

    request_id: str
    chat: bool
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
    """False: `max_tokens` is what the context leaves."""
    timeout_s: float | None = None
    """Longest wait in the queue, if its client set one."""
    progress: bool | None = False
    """Whether its stream starts with headers and wait reports; None: if the wait is long."""
    max_wait_s: float | None = None
    """The longest wait (p90) to accept, if its client set one."""
    max_cost_nanousd: int | None = None
    names_timeout: bool = False
    """The client set the timeout itself, not its SDK: in the batch tier it goes before the tier's."""
    wordings: tuple[Wording, ...] = ()
    """The client's text by prompt, for servers that tokenise themselves."""
    pool: str = ""
    """Empty: the pool of `model`."""
    traits: Features | None = None
    names_tier: bool = False
    """The client asked for this tier; it is not the key's default."""
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Metadata that its tenant has declared, for the ledger."""
    binding: Binding | None = None
    end_user: str = ""
    route: str = ""
    """The path that it came by; empty: it did not come by HTTP."""
    session: str | None = None
    """The run of an agent that it is a call of (`ids.session_id`)."""
    task: RequestTask = RequestTask.COMPLETE
    """Others emit no tokens: their `max_tokens` is 0."""
    chained: Chained | None = None
    needs: frozenset[str] = frozenset()
    grammar: Grammar | None = None
    """Of our own engine's answers, as `parts`."""
    parts: tuple[str, ...] = ()
    not_enforced: tuple[str, ...] = ()
    """Of what the client asked its answer to be: field and reason."""
    first_byte_s: float | None = None
    """On the gateway's clock; None: it did not come by HTTP."""
    sequences: int = 0
    input_tokens: int = 0
    """Derived; a prompt counts once, however many choices it has, as OpenAI bills it."""

    def __post_init__(self) -> None:
        force_setattr(self, "sequences", len(self.prompts) * self.choices)
        force_setattr(self, "input_tokens", sum(map(len, self.prompts)))

    @property
    def kept_tokens(self) -> int:
        return 0 if self.grammar is None else self.grammar.kept_tokens

    @property
    def max_output_tokens(self) -> int:
        return self.max_tokens * self.sequences

    @property
    def may_be_cut(self) -> bool:
        """Whether it is admitted with a budget for less than its longest answer, and ends with the budget."""
        return not self.asked_max_tokens or self.principal.on_low_budget is OnLowBudget.TRUNCATE

    def limits_at(self, now_s: float, tier: Tier | None = None) -> tuple[Limit, ...]:
        """The limits that bind it, in its tier or another, at `now_s` (Unix seconds)."""
        tokens = self.input_tokens + self.max_output_tokens
        traits = RequestTraits(tier or self.tier, self.model, tokens, self.end_user)
        return self.principal.limits_for(traits, now_s)

    def prompt_of(self, index: int) -> list[int]:
        return self.prompts[index // self.choices]

    def wording_of(self, index: int) -> Wording:
        """The client's text for sequence `index`; without it, the tokens."""
        prompt = index // self.choices
        return self.wordings[prompt] if self.wordings else Wording(prompt=self.prompts[prompt])

    def sampling_of(self, index: int) -> SamplingParams:
        """Choices of one seeded prompt get different seeds."""
        choice = index % self.choices
        seed = self.sampling.seed
        if seed is None or choice == 0:
            return self.sampling
        return msgspec.structs.replace(self.sampling, seed=(seed + choice + 2**63) % 2**64 - 2**63)

    def largest(self, cost_nanousd: int) -> Amounts:
        return Amounts(self.input_tokens, self.max_output_tokens, cost_nanousd, requests=1)
