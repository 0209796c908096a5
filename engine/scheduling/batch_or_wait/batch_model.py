"""Duration and energy of a batch that runs to completion: short and long requests, nobody leaves or joins."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import comb, sqrt

from engine.messages import StepTime
from engine.step_time.model import predict_decodes_s, predict_step_s

MOST_OUTPUT_TOKENS = 1_000_000


@dataclass(frozen=True, slots=True)
class RequestLengths:
    prompt_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or not 1 <= self.output_tokens <= MOST_OUTPUT_TOKENS:
            raise ValueError(
                f"a request of {self.prompt_tokens} prompt and {self.output_tokens} output tokens:"
                f" both must be at least 1, and the output at most {MOST_OUTPUT_TOKENS:,}"
            )

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True)
class BatchModel:
    step_time: StepTime
    short: RequestLengths
    long: RequestLengths
    long_share: float
    padded: bool = False
    """Whether every row is computed at the longest row's length."""
    busy_watts: float = 200.0
    """Power while a batch runs, above that of the idle machine."""
    launch_joules: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.long_share <= 1:
            raise ValueError(f"long_share {self.long_share} must lie between 0 and 1")
        if self.long.total_tokens < self.short.total_tokens or (
            self.long_share > 0 and self.long.total_tokens == self.short.total_tokens
        ):
            raise ValueError("a long request must have more tokens than a short one; or set long_share to 0")
        for name in ("busy_watts", "launch_joules"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} {getattr(self, name)} must be a number, not negative")
        if not self.service_s(1, 0) > 0:
            raise ValueError("the step-time model predicts no time at all: it needs a positive base_s")

    @property
    def long_tokens(self) -> int:
        if self.long_share == 0:
            return self.long.total_tokens + 1
        middle = round(sqrt(self.short.total_tokens * self.long.total_tokens))
        return max(self.short.total_tokens + 1, middle)

    def service_s(self, shorts: int, longs: int) -> float:
        """Seconds from the start of a batch to its end."""
        key = (shorts, longs)
        if key not in self._known:
            self._known[key] = self._service_s(shorts, longs)
        return self._known[key]

    def energy_j(self, shorts: int, longs: int) -> float:
        """Joules that running the batch costs above idling."""
        return self.launch_joules + self.busy_watts * self.service_s(shorts, longs)

    def capacity_per_s(self, max_batch: int) -> float:
        """Requests a second that full batches of the mean mixture serve."""
        share = self.long_share
        service_s = sum(
            comb(max_batch, longs)
            * share**longs
            * (1 - share) ** (max_batch - longs)
            * self.service_s(max_batch - longs, longs)
            for longs in range(max_batch + 1)
        )
        return max_batch / service_s

    @cached_property
    def _known(self) -> dict[tuple[int, int], float]:
        return {}

    def _service_s(self, shorts: int, longs: int) -> float:
        if shorts + longs < 1:
            raise ValueError("a batch has at least one request")
        if self.padded and longs:
            shorts, longs = 0, shorts + longs
        groups = [(count, kind) for count, kind in ((shorts, self.short), (longs, self.long)) if count]
        prompts = sum(count * kind.prompt_tokens for count, kind in groups)
        attended = sum(count * kind.prompt_tokens * (kind.prompt_tokens + 1) // 2 for count, kind in groups)
        seconds = predict_step_s(self.step_time, prompts, attended, shorts + longs)
        # The prefill gives the first output token; each further one is a step for those not yet done. Within
        # a stretch of steps with the same rows the step time is linear: its mean is the middle's.
        done = 1
        for last in sorted({kind.output_tokens for _, kind in groups if kind.output_tokens > done}):
            rows = [(count, kind) for count, kind in groups if kind.output_tokens >= last]
            ends_s = self._decode_s(rows, done) + self._decode_s(rows, last - 1)
            seconds += (last - done) * ends_s / 2
            done = last
        return seconds

    def _decode_s(self, rows: list[tuple[int, RequestLengths]], emitted: int) -> float:
        sequences = sum(count for count, _ in rows)
        context = sum(count * (kind.prompt_tokens + emitted) for count, kind in rows)
        return predict_decodes_s(self.step_time, sequences, context)
