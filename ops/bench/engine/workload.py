"""Workload files of the engine benchmarks, and their checks against a model.

A workload file names every request: its prompt (token ids, or a length whose ids follow from the file's
seed), its output length, and its arrival in units of the mean gap. So one file is the same run everywhere.
`python -m ops.bench.engine.workload` prints the file that ships with the project.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

SHIPPED_WORKLOAD = Path(__file__).parents[1] / "workloads" / "mixed_64.json"
MAX_REQUESTS = 100_000
MAX_FILE_BYTES = 64 << 20
MAX_SEED = 1 << 32
FIRST_TOKEN_ID = 3
"""Random prompts leave out the lowest ids, which mostly mark a beginning or an end."""
SAMPLE_SALT = 1
WARM_UP_SALT = 2
_MASK = (1 << 64) - 1


class BadWorkload(ValueError):
    """No workload, or one that the model cannot serve; names the request, the field and the limit."""


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request of a workload. `prompt_token_ids` None: `prompt_tokens` ids that follow from the seed."""

    prompt_tokens: int
    output_tokens: int
    arrival: float = 0.0
    """In mean gaps since the run began."""
    prompt_token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, in order of arrival."""

    name: str
    seed: int
    requests: tuple[WorkloadRequest, ...]

    @property
    def prompt_tokens(self) -> int:
        """Of all requests."""
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def output_tokens(self) -> int:
        """Of all requests."""
        return sum(request.output_tokens for request in self.requests)

    @property
    def mean_output_tokens(self) -> float:
        """Of one request."""
        return fmean(request.output_tokens for request in self.requests)

    def kv_tokens(self, max_sequences: int) -> int:
        """KV slots that let the `max_sequences` largest requests run together."""
        sizes = sorted((each.prompt_tokens + each.output_tokens for each in self.requests), reverse=True)
        return sum(sizes[:max_sequences])

    def prompt_token_ids(self, index: int, vocabulary: int, *, salt: int = 0) -> list[int]:
        """The prompt of request `index` for a model of `vocabulary` tokens."""
        request = self.requests[index]
        if request.prompt_token_ids is not None:
            return list(request.prompt_token_ids)
        first = min(FIRST_TOKEN_ID, vocabulary - 1)
        stream = _mix(_mix(self.seed << 8 | salt) ^ index)
        return [
            first + _mix(stream ^ position) % (vocabulary - first)
            for position in range(request.prompt_tokens)
        ]


def load_workload(path: Path) -> Workload:
    """Reads a workload file. Raises `BadWorkload`."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise BadWorkload(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadWorkload(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BadWorkload(f"{path} is not JSON: {error}") from None
    try:
        return parse_workload(content)
    except BadWorkload as error:
        raise BadWorkload(f"{path}: {error}") from None


def parse_workload(content: Any) -> Workload:
    """Raises `BadWorkload`."""
    if not isinstance(content, dict) or not isinstance(content.get("requests"), list):
        raise BadWorkload('a workload is an object with a list "requests"')
    seed = content.get("seed", 0)
    if not _is_whole(seed) or not 0 <= seed < MAX_SEED:
        raise BadWorkload(f"seed must be a whole number from 0 to {MAX_SEED - 1}, not {seed!r}")
    items = content["requests"]
    if not 1 <= len(items) <= MAX_REQUESTS:
        raise BadWorkload(f"requests must hold 1 to {MAX_REQUESTS} entries, not {len(items)}")
    requests = [_parse_request(number, item) for number, item in enumerate(items)]
    requests.sort(key=lambda request: request.arrival)
    return Workload(str(content.get("name", "unnamed")), seed, tuple(requests))


def check_workload(workload: Workload, *, vocabulary: int, context_tokens: int) -> None:
    """Whether the model can serve every request. Raises `BadWorkload` for the first that it cannot."""
    for number, request in enumerate(workload.requests):
        if request.prompt_tokens + request.output_tokens > context_tokens:
            raise BadWorkload(
                f"request {number}: prompt_tokens ({request.prompt_tokens}) + output_tokens "
                f"({request.output_tokens}) exceed the model's context of {context_tokens} tokens: "
                "shorten one of them or take a model with a longer context"
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
        drawn.append(
            WorkloadRequest(chosen.prompt_tokens, chosen.output_tokens, arrival, chosen.prompt_token_ids)
        )
        arrival -= math.log(1.0 - generator.random())
    return Workload(f"{workload.name}, {requests} drawn", workload.seed, tuple(drawn))


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
    part = Workload(
        workload.name,
        workload.seed,
        tuple(
            WorkloadRequest(request.prompt_tokens, min(output_tokens, request.output_tokens))
            for request in workload.requests[:requests]
        ),
    )
    return as_orders(part, vocabulary, rate_per_s=None, salt=WARM_UP_SALT)


def generate(
    *,
    name: str,
    seed: int,
    requests: int,
    prompt_tokens: tuple[int, float, int],
    output_tokens: tuple[int, float, int],
) -> dict[str, Any]:
    """A workload file's content: lognormal lengths of (median, sigma, most), Poisson arrivals.

    Lengths are the distribution's quantiles at evenly spaced shares, in a shuffled order: few random draws
    might miss its median or its tail.
    """
    generator = random.Random(seed)
    prompts = _lognormal(generator, requests, *prompt_tokens)
    outputs = _lognormal(generator, requests, *output_tokens)
    made = []
    arrival = 0.0
    for prompt, output in zip(prompts, outputs, strict=True):
        made.append({"prompt_tokens": prompt, "output_tokens": output, "arrival": round(arrival, 4)})
        arrival -= math.log(1.0 - generator.random())
    return {
        "name": name,
        "seed": seed,
        "lengths": {
            "prompt_tokens": dict(zip(("median", "sigma", "most"), prompt_tokens, strict=True)),
            "output_tokens": dict(zip(("median", "sigma", "most"), output_tokens, strict=True)),
        },
        "requests": made,
    }


def shipped() -> dict[str, Any]:
    """The content of `SHIPPED_WORKLOAD`."""
    return generate(
        name="mixed 64",
        seed=1234,
        requests=64,
        prompt_tokens=(96, 0.7, 512),
        output_tokens=(48, 0.85, 256),
    )


def as_text(content: dict[str, Any]) -> str:
    """A workload file: one line a request."""
    head = {key: value for key, value in content.items() if key != "requests"}
    lines = ",\n".join(f"    {json.dumps(request)}" for request in content["requests"])
    return f'{json.dumps(head, indent=2)[:-2]},\n  "requests": [\n{lines}\n  ]\n}}\n'


def _lognormal(generator: random.Random, count: int, median: int, sigma: float, most: int) -> Sequence[int]:
    normal = NormalDist()
    shares = [(index + 0.5) / count for index in range(count)]
    values = [min(most, max(1, round(median * math.exp(sigma * normal.inv_cdf(share))))) for share in shares]
    values[-1] = most
    generator.shuffle(values)
    return values


def _parse_request(number: int, item: Any) -> WorkloadRequest:
    def bad(problem: str) -> BadWorkload:
        return BadWorkload(f"request {number}: {problem}")

    if not isinstance(item, dict):
        raise bad(f"must be an object with prompt_tokens and output_tokens, not {item!r}")
    token_ids = item.get("prompt_token_ids")
    if token_ids is not None:
        if not isinstance(token_ids, list) or not all(_is_whole(token_id) for token_id in token_ids):
            raise bad("prompt_token_ids must be a list of whole numbers")
        if item.get("prompt_tokens", len(token_ids)) != len(token_ids):
            raise bad(f"prompt_tokens is {item['prompt_tokens']!r}, prompt_token_ids has {len(token_ids)}")
    sizes: dict[str, Any] = {
        "prompt_tokens": item.get("prompt_tokens") if token_ids is None else len(token_ids),
        "output_tokens": item.get("output_tokens"),
    }
    for field, value in sizes.items():
        if not _is_whole(value) or value < 1:
            raise bad(f"{field} must be a whole number of at least 1, not {value!r}")
    arrival = item.get("arrival", 0.0)
    if isinstance(arrival, bool) or not isinstance(arrival, int | float):
        raise bad(f"arrival must be a number, not {arrival!r}")
    if not (math.isfinite(arrival) and arrival >= 0):
        raise bad(f"arrival must be finite and not negative, not {arrival!r}")
    return WorkloadRequest(
        sizes["prompt_tokens"],
        sizes["output_tokens"],
        float(arrival),
        None if token_ids is None else tuple(token_ids),
    )


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _mix(value: int) -> int:
    """A 64-bit finaliser (splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


if __name__ == "__main__":
    print(as_text(shipped()), end="")
