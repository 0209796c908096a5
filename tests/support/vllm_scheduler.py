"""A stand-in of vLLM's scheduler: its interface as `FairSteps` uses it, on blocks and tokens without a model.

Its `schedule` follows vLLM's: running requests in order, those skipped whose next step is later; the tail of
`running` gives way when a block lacks; then the waiting queue's head, for as long as there is room. Which
attributes and methods vLLM's own classes have is recorded in `tests/unit/engine/vllm_plugin/seams.json`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from enum import IntEnum, auto
from types import SimpleNamespace
from typing import Any

from engine.messages import Submit
from engine.sizes import blocks_for
from engine.vllm_plugin.fair_steps import FairSteps
from engine.vllm_plugin.seam import Controls, Ended, ServiceTerms, StepService


class Status(IntEnum):
    """As vLLM's `RequestStatus`."""

    WAITING = auto()
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED_STOPPED = auto()
    FINISHED_LENGTH_CAPPED = auto()
    FINISHED_ABORTED = auto()


class StandInRequest:
    """As vLLM's `Request`."""

    def __init__(
        self, request_id: str, prompt_tokens: int, max_tokens: int, extra: dict[str, Any] | None = None
    ) -> None:
        self.request_id = request_id
        self.client_index = 0
        self.sampling_params = SimpleNamespace(extra_args=extra)
        self.max_tokens = max_tokens
        self.num_prompt_tokens = prompt_tokens
        self.num_computed_tokens = 0
        self.num_output_placeholders = 0
        self.num_in_flight_tokens = 0
        self.num_stale_output_tokens = 0
        self.num_preemptions = 0
        self.drop_stale_output = False
        self.next_decode_eligible_step = 0
        self.is_prefill_chunk = False
        self.status: Any = Status.WAITING
        self.trace_headers = None
        self.output: list[int] = []
        self.cached_tokens = 0
        """What its prompt finds in the prefix cache."""

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output)

    @property
    def has_encoder_inputs(self) -> bool:
        return False

    def is_finished(self) -> bool:
        return bool(self.status > Status.PREEMPTED)

    def get_finished_reason(self) -> str:
        return "length" if self.status == Status.FINISHED_LENGTH_CAPPED else "stop"

    def take_events(self) -> None:
        return None


class StandInQueue(ABC):
    """The abstract methods of vLLM's `RequestQueue`."""

    @abstractmethod
    def add_request(self, request: Any) -> None: ...
    @abstractmethod
    def peek_request(self) -> Any: ...
    @abstractmethod
    def pop_request(self) -> Any: ...
    @abstractmethod
    def prepend_request(self, request: Any) -> None: ...
    @abstractmethod
    def prepend_requests(self, requests: Any) -> None: ...
    @abstractmethod
    def remove_request(self, request: Any) -> None: ...
    @abstractmethod
    def remove_requests(self, requests: Any) -> None: ...


class StandInBlocks:
    """As vLLM's block pool, in numbers."""

    def __init__(self, num_blocks: int) -> None:
        self.num_gpu_blocks = num_blocks + 1
        self.free = num_blocks

    def get_num_free_blocks(self) -> int:
        return self.free


class StandInScheduler:
    """As vLLM's `AsyncScheduler`: `schedule` runs one step ahead of `update_from_output`."""

    policy_word = "fcfs"
    has_speculation = False

    def __init__(self, *, places: int = 64, tokens: int = 2048, blocks: int = 4096) -> None:
        self.block_size = 16
        self.current_step = 0
        self.max_num_running_reqs = places
        self.max_num_scheduled_tokens = tokens
        self.max_model_len = 4096
        self.need_mamba_block_aligned_split = False
        self.requests: dict[str, StandInRequest] = {}
        self.running: list[Any] = []
        self.waiting: Any = deque()
        self._pause_state = SimpleNamespace(name="UNPAUSED")
        self.pool = StandInBlocks(blocks)
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=["all"])
        self.kv_cache_manager = SimpleNamespace(block_pool=self.pool, usage=0.0)
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(),
            scheduler_config=SimpleNamespace(policy=self.policy_word),
            speculative_config="draft" if self.has_speculation else None,
        )
        self.held: dict[str, int] = {}
        """Blocks by request."""
        self.freed_tokens = 0
        """Computed tokens that evictions threw away."""

    def add_request(self, request: StandInRequest) -> None:
        self.requests[request.request_id] = request
        self.waiting.add_request(request)

    def schedule(self) -> Any:
        self.current_step += 1
        budget, given, evicted = self.max_num_scheduled_tokens, {}, False
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            index += 1
            under_way = request.num_output_placeholders
            last = request.num_prompt_tokens + request.max_tokens
            if under_way > 0 and request.num_computed_tokens + 2 - under_way >= last:
                continue
            if self.current_step < request.next_decode_eligible_step:
                continue
            tokens = min(request.num_tokens + under_way - request.num_computed_tokens, budget)
            if self.need_mamba_block_aligned_split:
                tokens = self._mamba_block_aligned_split(request, tokens)
            while tokens and not self._allocate(request, tokens):
                victim, evicted = self.running.pop(), True
                self._preempt_request(victim, 0.0)
                if victim is request:
                    tokens = 0
            if tokens:
                given[request.request_id] = tokens
                budget -= tokens
        while self.waiting and budget > 0 and not evicted and len(self.running) < self.max_num_running_reqs:
            request = self.waiting.peek_request()
            found = min(request.cached_tokens, request.num_tokens - 1)
            tokens = min(request.num_tokens - found, budget)
            if self.need_mamba_block_aligned_split:
                tokens = self._mamba_block_aligned_split(request, tokens)
            if not tokens:
                break
            request.num_computed_tokens = found
            if not self._allocate(request, tokens):
                request.num_computed_tokens = 0
                break
            self.waiting.pop_request()
            self.running.append(request)
            request.status = Status.RUNNING
            given[request.request_id] = tokens
            budget -= tokens
        assert len(self.running) <= self.max_num_running_reqs
        for request_id, tokens in given.items():
            request = self.requests[request_id]
            request.num_computed_tokens += tokens
            request.num_in_flight_tokens += tokens
            whole = request.num_tokens + request.num_output_placeholders
            request.is_prefill_chunk = request.num_computed_tokens < whole
            request.num_output_placeholders += not request.is_prefill_chunk
        return SimpleNamespace(num_scheduled_tokens=given, emits=[
            request_id for request_id in given if not self.requests[request_id].is_prefill_chunk
        ])  # fmt: skip

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            request = self.requests.get(request_id)
            if request is None:
                continue
            request.num_in_flight_tokens -= tokens
            is_stale = request.num_stale_output_tokens > 0
            request.num_stale_output_tokens -= tokens if is_stale else 0
            if request_id not in scheduler_output.emits or (is_stale and request.drop_stale_output):
                continue
            request.output.append(len(request.output))
            request.num_output_placeholders -= not is_stale
            if len(request.output) >= request.max_tokens:
                self.finish_requests(request_id, Status.FINISHED_LENGTH_CAPPED)
        return {}

    def finish_requests(self, request_ids: Any, finished_status: Any) -> None:
        request = self.requests.get(request_ids)
        if request is None:
            return
        if request.status == Status.RUNNING:
            self.running = [each for each in self.running if each is not request]
        else:
            self.waiting.remove_requests([request])
        request.status = finished_status
        self._free_request(request)

    def reset_prefix_cache(self) -> None:
        """Evicts all; what is under way is dropped."""
        while self.running:
            self._preempt_request(self.running.pop(), 0.0, drop_stale_output=True)

    def _preempt_request(
        self, request: StandInRequest, timestamp: float, drop_stale_output: bool = False
    ) -> None:
        self.freed_tokens += request.num_computed_tokens
        self._free(request)
        request.status = Status.PREEMPTED
        request.num_computed_tokens = 0
        request.num_stale_output_tokens = request.num_in_flight_tokens
        request.drop_stale_output = drop_stale_output
        request.num_output_placeholders = 0
        request.num_preemptions += 1
        self.waiting.prepend_request(request)

    def _free_request(self, request: StandInRequest) -> None:
        self._free(request)
        del self.requests[request.request_id]

    def _mamba_block_aligned_split(self, request: StandInRequest, num_new_tokens: int) -> int:
        return num_new_tokens

    def _is_blocked_waiting_status(self, status: Any) -> bool:
        return bool(status == Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)

    def _handle_blocked_waiting_request(self, request: StandInRequest) -> bool:
        return not self._is_blocked_waiting_status(request.status)

    def _allocate(self, request: StandInRequest, tokens: int) -> bool:
        held = self.held.get(request.request_id, 0)
        wanted = blocks_for(request.num_computed_tokens + tokens, self.block_size) - held
        if wanted > self.pool.free:
            return False
        self.pool.free -= max(0, wanted)
        self.held[request.request_id] = held + max(0, wanted)
        return True

    def _free(self, request: StandInRequest) -> None:
        self.pool.free += self.held.pop(request.request_id, 0)


class NamedDesk:
    """Implements `seam.Desk`: requests name their tenant, unsigned."""

    def __init__(self) -> None:
        self.services: list[StepService] = []
        self.ends: list[Ended] = []

    def terms(self, request: Any, now_s: float) -> ServiceTerms:
        submit = Submit(
            **{
                "sequence_id": request.request_id,
                "request_id": request.request_id,
                "tenant_id": "a",
                "prompt_token_ids": [],
                "max_tokens": request.max_tokens,
                "lease_tokens": request.max_tokens,
                "predicted_output_tokens": request.max_tokens,
                **request.sampling_params.extra_args,
            }
        )
        return ServiceTerms(submit, "gw", is_verified=True)

    def before_step(self, controls: Controls, now_s: float) -> None: ...

    def after_step(self, service: StepService, now_s: float) -> None:
        self.services.append(service)

    def ended(self, ended: Ended, now_s: float) -> None:
        self.ends.append(ended)


class Server:
    """vLLM's engine loop around a scheduler, on virtual time: each step is handed over before the one before
    it comes back."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.desk = NamedDesk()
        self.now_s, self.fixed_s, self.row_s = 0.0, 0.01, 0.0
        self.under_way: deque[Any] = deque()
        self.tokens: list[Counter[str]] = []
        """By step: tokens emitted, by request."""
        self.requests: list[StandInRequest] = []
        self.last: list[str] = []
        """Requests that ended without a token."""
        if isinstance(scheduler, FairSteps):
            scheduler.desk = self.desk
            scheduler.clock = lambda: self.now_s  # type: ignore[method-assign]
            scheduler.note_end = lambda outputs, request: self.last.append(request.request_id)  # type: ignore[method-assign]

    def add(self, name: str, *, prompt: int = 16, tokens: int = 100, cached: int = 0, **terms: Any) -> Any:
        """A request arrives; `terms` are fields of its `Submit`."""
        request = StandInRequest(name, prompt, tokens, terms)
        request.cached_tokens = cached
        self.requests.append(request)
        self.scheduler.add_request(request)
        return request

    def run(self, steps: int = 1) -> None:
        """Steps."""
        for _ in range(steps):
            output = self.scheduler.schedule()
            self.under_way.append(output)
            self.now_s += self.fixed_s + self.row_s * len(output.emits)
            if len(self.under_way) == 2:
                self.scheduler.update_from_output(self.under_way.popleft(), None)
            self.tokens.append(Counter(output.emits))

    def run_all(self, most_steps: int = 20_000) -> None:
        """Steps until all have ended."""
        for _ in range(most_steps):
            if not self.scheduler.requests:
                return
            self.run()
        raise AssertionError(f"{len(self.scheduler.requests)} requests are left")

    def emitted(self, prefix: str, since: int = 0) -> int:
        """Tokens of all requests whose name begins so."""
        return sum(
            count for step in self.tokens[since:] for name, count in step.items() if name.startswith(prefix)
        )


FairStandIn: Any = type("FairStandIn", (FairSteps, StandInScheduler), {})
"""The plug-in's steps on the stand-in."""


class FirstCome(deque[Any]):
    """vLLM's own waiting queue."""

    add_request = deque.append
    prepend_request = deque.appendleft
    pop_request = deque.popleft

    def peek_request(self) -> Any:
        return self[0]

    def remove_requests(self, requests: Any) -> None:
        for request in requests:
            self.remove(request)


def stock(**sizes: int) -> Server:
    """The stand-in as vLLM comes."""
    scheduler = StandInScheduler(**sizes)
    scheduler.waiting = FirstCome()
    return Server(scheduler)
