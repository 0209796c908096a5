"""Interfaces between the parts of the vLLM plug-in: what it reads of vLLM, and what the gateway's side says.

`VllmRequest`: what the plug-in uses of vLLM's `Request`. `Desk`: the gateway's side inside the server, which
names a request's owner, and gets its steps and ends. `Controls`: what a desk may do to running sequences.
All of them live in vLLM's engine core process, on one thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.core.step_service import ServiceShare
from engine.messages import RunningSequence, Submit
from engine.scheduling.options import PolicyOptions


class VllmSamplingParams(Protocol):
    """Of vLLM's `SamplingParams`."""

    extra_args: dict[str, Any] | None
    """`vllm_xargs` of the HTTP request."""


class VllmRequest(Protocol):
    """Of vLLM's `Request`."""

    request_id: str
    client_index: int
    sampling_params: VllmSamplingParams | None
    max_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    """Those of steps under way included."""
    num_output_placeholders: int
    """Tokens that steps under way will emit."""
    num_in_flight_tokens: int
    num_stale_output_tokens: int
    num_preemptions: int
    next_decode_eligible_step: int
    """It gets no tokens in earlier steps."""
    is_prefill_chunk: bool
    """Its last slice did not reach its last known token."""
    status: Any
    trace_headers: Any

    @property
    def num_tokens(self) -> int:
        """Prompt and output, without placeholders."""
        ...

    @property
    def num_output_tokens(self) -> int: ...

    @property
    def has_encoder_inputs(self) -> bool: ...

    def is_finished(self) -> bool: ...

    def get_finished_reason(self) -> Any: ...

    def take_events(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class ServiceTerms:
    """On whose terms a request runs."""

    submit: Submit
    """Its terms, without the prompt; `max_tokens` is replaced by the request's own."""
    gateway_id: str = ""
    is_verified: bool = False
    """A gateway signed it. False: it is of the default tenant."""


@dataclass(slots=True)
class StepService:
    """What one step of vLLM gave, at the time at which it was put together."""

    step: int
    shares: dict[str, ServiceShare]
    """By tenant id."""
    num_sequences: int = 0
    num_tokens: int = 0
    num_evicted: int = 0
    notes: dict[str, str] = field(default_factory=dict)
    """By sequence id: why one that was chosen got fewer tokens than planned, in vLLM's terms."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a sequence ended."""

    sequence_id: str
    request_id: str
    tenant_id: str
    gateway_id: str
    finish: str
    """`stop`, `length`, `cancelled` or `failed`; or the cause that `Controls.end` was given."""
    prompt_tokens: int
    emitted_tokens: int
    """Those that vLLM handed to its API server."""
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0


class Controls(Protocol):
    """What may be done to sequences between steps."""

    def top_up(self, sequence_id: str, lease_tokens: int) -> bool:
        """Raises a lease; absolute, it never shrinks. False: not here."""
        ...

    def end(self, sequence_id: str, cause: str) -> bool:
        """Ends a sequence with `length` once the tokens under way have come. False: not here."""
        ...

    def set_policy(self, name: str, options: PolicyOptions | None = None) -> None:
        """From the next step on; None: with the options in force. Raises ValueError."""
        ...

    def begin_words(self) -> None:
        """A gateway begins anew: it has counted no service that was not reported to it."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """`vllm` (version), policy and options, slots, places, step, waiting, `kv_usage`, `not_supported`."""
        ...

    def sequences(self) -> list[RunningSequence]:
        """All live sequences; with its lease used up one is `paused` with its KV, `preempted` without."""
        ...


class Desk(Protocol):
    """The gateway's side inside the server."""

    def terms(self, request: VllmRequest, now_s: float) -> ServiceTerms:
        """Whose a request is: its verified claims, or the default tenant's."""
        ...

    def before_step(self, controls: Controls, now_s: float) -> None:
        """Applies the gateway's commands since the last step: top-ups, ends, a policy."""
        ...

    def after_step(self, service: StepService, now_s: float) -> None: ...

    def ended(self, ended: Ended, now_s: float) -> None: ...


DEFAULT_TENANT = "(unsigned)"
"""Of requests without a valid signature. No tenant of a gateway has such an id."""


def default_terms(request: VllmRequest) -> ServiceTerms:
    """Those of a request that no gateway signed: tier standard, weight 1, the lease is all its tokens."""
    submit = Submit(
        # A client may choose its request's id: it must not be that of a sequence of a gateway.
        sequence_id=f"{DEFAULT_TENANT}/{request.request_id}",
        request_id=request.request_id,
        tenant_id=DEFAULT_TENANT,
        prompt_token_ids=[],
        max_tokens=request.max_tokens,
        lease_tokens=request.max_tokens,
        # No gateway made a forecast: the mean of those that ended.
        predicted_output_tokens=0,
    )
    return ServiceTerms(submit)
