"""Workload files of the engine benchmarks: each request's prompt, output length and arrival in mean gaps."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

SHIPPED_WORKLOAD = Path(__file__).parents[1] / "workloads" / "mixed_64.json"
MAX_REQUESTS = 100_000
MAX_FILE_BYTES = 64 << 20
FIRST_TOKEN_ID = 3
"""Random prompts leave out the lowest ids, which mostly mark a beginning or an end."""
SAMPLE_SALT = 1
WARM_UP_SALT = 2
_MASK = (1 << 64) - 1


class BadWorkload(ValueError):
    """No workload, or one that the model cannot serve; names the request, the field and the limit."""


class WorkloadRequest(msgspec.Struct, frozen=True):
    """One request of a workload. `prompt_token_ids` None: `prompt_tokens` ids that follow from the seed."""

    output_tokens: Annotated[int, Meta(ge=1)]
    prompt_tokens: Annotated[int, Meta(ge=1)] | None = None
    arrival: Annotated[float, Meta(ge=0)] = 0.0
    """In mean gaps since the run began."""
    prompt_token_ids: Annotated[tuple[int, ...], Meta(min_length=1)] | None = None

    def __post_init__(self) -> None:
        if self.prompt_token_ids is None and self.prompt_tokens is None:
            raise ValueError("there is neither prompt_tokens nor prompt_token_ids")
        if self.prompt_token_ids is not None and self.prompt_tokens not in (None, self.length):
            raise ValueError(f"prompt_tokens is {self.prompt_tokens}, prompt_token_ids has {self.length}")
        if not math.isfinite(self.arrival):
            raise ValueError("arrival must be finite")

    @property
    def length(self) -> int:
        return len(self.prompt_token_ids) if self.prompt_token_ids is not None else self.prompt_tokens or 0


class Workload(msgspec.Struct, frozen=True):
    requests: Annotated[tuple[WorkloadRequest, ...], Meta(min_length=1, max_length=MAX_REQUESTS)]
    name: str = "unnamed"
    seed: Annotated[int, Meta(ge=0, lt=1 << 32)] = 0

    @property
    def prompt_tokens(self) -> int:
        return sum(request.length for request in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(request.output_tokens for request in self.requests)

    def kv_tokens(self, max_sequences: int) -> int:
        sizes = sorted((request.length + request.output_tokens for request in self.requests), reverse=True)
        return sum(sizes[:max_sequences])

    def prompt_token_ids(self, index: int, vocabulary: int, *, salt: int = 0) -> list[int]:
        request = self.requests[index]
        if request.prompt_token_ids is not None:
            return list(request.prompt_token_ids)
        first = min(FIRST_TOKEN_ID, vocabulary - 1)
        stream = _mix(_mix(self.seed << 8 | salt) ^ index)
        return [first + _mix(stream ^ position) % (vocabulary - first) for position in range(request.length)]


def load_workload(path: Path) -> Workload:
    """Reads a workload file. Raises `BadWorkload`."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise BadWorkload(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB")
        content = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise BadWorkload(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        raise BadWorkload(f"{path} is not JSON: {error}") from None
    try:
        return parse_workload(content)
    except BadWorkload as error:
        raise BadWorkload(f"{path}: {error}") from None


def parse_workload(content: Any) -> Workload:
    """Raises `BadWorkload`."""
    try:
        workload = msgspec.convert(content, Workload)
    except msgspec.ValidationError as error:
        raise BadWorkload(str(error)) from None
    requests = tuple(sorted(workload.requests, key=lambda request: request.arrival))
    return msgspec.structs.replace(workload, requests=requests)


def check_workload(workload: Workload, *, vocabulary: int, context_tokens: int) -> None:
    """Whether the model can serve every request. Raises `BadWorkload` for the first that it cannot."""
    for number, request in enumerate(workload.requests):
        if request.length + request.output_tokens > context_tokens:
            raise BadWorkload(
                f"request {number}: prompt_tokens ({request.length}) + output_tokens"
                f" ({request.output_tokens}) exceed the model's context of {context_tokens} tokens:"
                " shorten one of them or take a model with a longer context"
            )
        for position, token_id in enumerate(request.prompt_token_ids or ()):
            if not 0 <= token_id < vocabulary:
                raise BadWorkload(
                    f"request {number}: prompt_token_ids[{position}] is {token_id}, outside of the model's "
                    f"vocabulary 0..{vocabulary - 1}"
                )


def sample_workload(workload: Workload, requests: int) -> Workload:
    """`requests` of the workload's, drawn with its seed, at exponential gaps of mean 1."""
    generator = random.Random(workload.seed << 8 | SAMPLE_SALT)
    drawn = []
    arrival = 0.0
    for _ in range(requests):
        chosen = workload.requests[int(generator.random() * len(workload.requests))]
        drawn.append(msgspec.structs.replace(chosen, arrival=arrival))
        arrival -= math.log(1.0 - generator.random())
    return Workload(tuple(drawn), f"{workload.name}, {requests} drawn", workload.seed)


def as_orders(
    workload: Workload, vocabulary: int, *, rate_per_s: float | None, salt: int = 0
) -> list[dict[str, Any]]:
    """The requests as an engine's process gets them; `rate_per_s` None: all arrive together."""
    return [
        {
            "prompt_token_ids": workload.prompt_token_ids(index, vocabulary, salt=salt),
            "output_tokens": request.output_tokens,
            "arrival_s": 0.0 if rate_per_s is None else request.arrival / rate_per_s,
        }
        for index, request in enumerate(workload.requests)
    ]


def warm_up_orders(
    workload: Workload, vocabulary: int, *, requests: int, output_tokens: int
) -> list[dict[str, Any]]:
    """Short requests with other prompts than the workload's, so that no cache knows these afterwards."""
    short = tuple(
        WorkloadRequest(min(output_tokens, request.output_tokens), request.length)
        for request in workload.requests[:requests]
    )
    part = Workload(short, workload.name, workload.seed)
    return as_orders(part, vocabulary, rate_per_s=None, salt=WARM_UP_SALT)


def _mix(value: int) -> int:
    """A 64-bit finaliser (splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
