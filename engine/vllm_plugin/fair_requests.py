"""`FairRequests`: vLLM's requests as sequences of the planner, and what a desk may do to them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from engine.messages import RunningSequence
from engine.scheduling.options import PolicyOptions
from engine.sequence import Sequence, SequenceStatus
from engine.vllm_plugin.channel.setup import make_desk
from engine.vllm_plugin.options import read_settings
from engine.vllm_plugin.planner import Sizes, StepPlanner
from engine.vllm_plugin.seam import Desk, Ended, VllmRequest
from engine.vllm_plugin.seam_check import PROMOTE, check_instance, not_run_with
from engine.vllm_plugin.waiting import OfferedRequests, PassedOn

if TYPE_CHECKING:

    class VllmSchedulerBase:
        """What the mixin uses of vLLM's scheduler; when it runs, the base class is vLLM's."""

        block_size: int
        current_step: int
        kv_cache_config: Any
        kv_cache_manager: Any
        max_model_len: int
        max_num_running_reqs: int
        max_num_scheduled_tokens: int
        need_mamba_block_aligned_split: bool
        requests: dict[str, VllmRequest]
        running: list[VllmRequest]
        waiting: Any
        vllm_config: Any
        _pause_state: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def schedule(self, *args: Any, **kwargs: Any) -> Any: ...
        def add_request(self, request: VllmRequest) -> None: ...
        def finish_requests(self, request_ids: Any, finished_status: Any) -> Any: ...
        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]: ...
        def _preempt_request(self, request: VllmRequest, timestamp: float, *args: Any, **kw: Any) -> None: ...
        def _free_request(self, request: VllmRequest, *args: Any, **kwargs: Any) -> Any: ...
        def _mamba_block_aligned_split(
            self, request: VllmRequest, num_new_tokens: int, *args: Any, **kwargs: Any
        ) -> int: ...
        def _is_blocked_waiting_status(self, status: Any) -> bool: ...

else:
    VllmSchedulerBase = object

logger = logging.getLogger(__name__)

FINISHES = {
    "FINISHED_STOPPED": "stop",
    "FINISHED_REPETITION": "stop",
    "FINISHED_LENGTH_CAPPED": "length",
    "FINISHED_IGNORED": "length",
    "FINISHED_ABORTED": "cancelled",
    "FINISHED_ERROR": "failed",
}


class FairRequests(VllmSchedulerBase):
    """A mixin for vLLM's scheduler; implements `Controls`."""

    vllm_version = "unknown"
    clock = staticmethod(time.monotonic)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_instance(self, self.vllm_version)
        self.not_supported = not_run_with(self, self.vllm_version)
        self.settings = read_settings(os.environ)
        groups = max(1, len(self.kv_cache_config.kv_cache_groups))
        self._groups = groups
        pool = self.kv_cache_manager.block_pool
        most_places = min(self.max_num_running_reqs, getattr(self, "max_num_active_reqs", 1 << 30))
        self.planner = StepPlanner(
            Sizes(
                # One block is vLLM's own; each group of layers takes blocks of the same pool.
                num_blocks=max(1, (pool.num_gpu_blocks - 1) // groups),
                block_tokens=self.block_size,
                max_batched_tokens=self.max_num_scheduled_tokens,
                places=min(self.settings.places or most_places, most_places),
                context_tokens=self.max_model_len,
                watermark_blocks=getattr(self.kv_cache_manager, "watermark_blocks", 0) // groups,
            ),
            self.settings.policy,
            self.settings.with_slots(self.settings.options),
        )
        self.desk: Desk = make_desk(os.environ)
        self.waiting = OfferedRequests()
        if hasattr(self, "skipped_waiting"):
            self.skipped_waiting = PassedOn(self.waiting)
        self._aligns_chunks = self.need_mamba_block_aligned_split
        # The hook by which chunks of prompts are cut is called only then.
        self.need_mamba_block_aligned_split = True
        self._promote = next(getattr(self, name) for name in PROMOTE if hasattr(self, name))
        self._sequences: dict[str, Sequence] = {}
        self._requests: dict[Sequence, VllmRequest] = {}
        self._by_sequence_id: dict[str, Sequence] = {}
        self._blocked: dict[str, Sequence] = {}
        """Of requests whose grammar is not ready: they do not wait for a turn yet."""
        self._ending: dict[str, str] = {}
        """Cause by request id, of those that are ended as soon as no token is under way."""
        self._evicts_as_planned = False
        """The present evictions are the planner's, which may have admitted some of them again."""
        self._in_step: Container[Sequence] = ()
        for feature in self.not_supported:
            logger.warning("fairgate-vllm was not run with %s: it may work, and nothing is known", feature)
        sizes = self.planner.sizes
        logger.info(
            "fairgate-vllm: policy %s, %s slots a step, %d places, %d blocks of %d tokens",
            self.settings.policy,
            self.planner.options.slots or "all",
            sizes.places,
            sizes.num_blocks,
            sizes.block_tokens,
        )
        self.desk.before_step(self, self.clock())

    def add_request(self, request: VllmRequest) -> None:
        if request.request_id not in self.requests:
            self._open(request, self.clock())
        super().add_request(request)
        if getattr(request, "resumable", False) and request.request_id in self._sequences:
            # Its prompt grows while it runs, which nothing here counts.
            logger.warning("fairgate-vllm: a session with streaming input was ended: it is not supported")
            self.end(self._sequences[request.request_id].sequence_id, "failed")

    def _open(self, request: VllmRequest, now_s: float) -> None:
        terms = self.desk.terms(request, now_s)
        sequence = self.planner.sequence_of(
            terms.submit, terms.gateway_id, request.num_prompt_tokens, request.max_tokens, now_s
        )
        self._sequences[request.request_id] = sequence
        self._requests[sequence] = request
        self._by_sequence_id[sequence.sequence_id] = sequence
        if self._is_blocked_waiting_status(request.status):
            self._blocked[request.request_id] = sequence
        else:
            self.planner.add(sequence)

    def _unblock(self) -> None:
        for request_id, sequence in list(self._blocked.items()):
            if self._promote(self._requests[sequence]):
                del self._blocked[request_id]
                self.planner.add(sequence)

    def _preempt_request(self, request: VllmRequest, timestamp: float, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, timestamp, *args, **kwargs)
        sequence = self._sequences[request.request_id]
        if not self._evicts_as_planned:
            self.planner.evicted(sequence)
        if getattr(request, "drop_stale_output", False) and request.request_id not in self._ending:
            self.planner.take_back(sequence, request.num_tokens)

    def _free_request(self, request: VllmRequest, *args: Any, **kwargs: Any) -> Any:
        sequence = self._sequences.pop(request.request_id, None)
        if sequence is not None:
            self._blocked.pop(request.request_id, None)
            finish = FINISHES.get(request.status.name, "failed")
            cause = self._ending.pop(request.request_id, finish)
            self.planner.finish(sequence, is_whole=cause in ("stop", "length"))
            del self._requests[sequence]
            self._by_sequence_id.pop(sequence.sequence_id, None)
            ended = Ended(
                sequence_id=sequence.sequence_id,
                request_id=sequence.submit.request_id,
                tenant_id=sequence.tenant_id,
                gateway_id=sequence.gateway_id,
                finish=cause,
                prompt_tokens=sequence.prompt_tokens,
                emitted_tokens=request.num_output_tokens,
                cached_tokens=sequence.cached_tokens,
                recomputed_tokens=sequence.recomputed_tokens,
                preemptions=request.num_preemptions,
            )
            self.desk.ended(ended, self.clock())
        return super()._free_request(request, *args, **kwargs)

    def _holds_place(self, sequence: Sequence) -> bool:
        """Whether vLLM runs it: one that got its place in the plan enters with its first tokens."""
        return self._requests[sequence].request_id not in self.waiting

    def _end_due(self, outputs: dict[int, Any]) -> None:
        """Ends those due to end without a token under way, and reports to their clients."""
        for request_id in list(self._ending):
            request = self.requests[request_id]
            if request.num_in_flight_tokens:
                continue
            self.finish_requests(request_id, type(request.status).FINISHED_LENGTH_CAPPED)
            self.note_end(outputs, request)

    def note_end(self, outputs: dict[int, Any], request: VllmRequest) -> None:
        """Adds the last output of a request that ended without a token, in vLLM's own structs."""
        raise NotImplementedError

    def top_up(self, sequence_id: str, lease_tokens: int) -> bool:
        sequence = self._by_sequence_id.get(sequence_id)
        if sequence is None:
            return False
        if self._requests[sequence].request_id in self._ending:
            # It has had its last token: a lease that comes now must not set it going again.
            return True
        if self.planner.has(sequence):
            self.planner.table.top_up(sequence, lease_tokens)
        else:
            sequence.lease_tokens = max(sequence.lease_tokens, lease_tokens)
        return True

    def end(self, sequence_id: str, cause: str) -> bool:
        sequence = self._by_sequence_id.get(sequence_id)
        if sequence is None:
            return False
        request_id = self._requests[sequence].request_id
        self._ending.setdefault(request_id, cause)
        self._blocked.pop(request_id, None)
        self.planner.rest(sequence, self.clock())
        return True

    def set_policy(self, name: str, options: PolicyOptions | None = None) -> None:
        self.planner.set_policy(name, None if options is None else self.settings.with_slots(options))

    def begin_words(self) -> None:
        self.planner.table.standings.begin_words()

    def describe(self) -> Mapping[str, Any]:
        planner = self.planner
        return {
            **planner.table.policy.describe(),
            "vllm": self.vllm_version,
            "slots": planner.table.most_decodes,
            "places": planner.sizes.places,
            "decode_slots": planner.table.decode_slots(),
            "step": planner.step,
            "waiting": len(self.waiting),
            "running": len(self.running),
            "kv_usage": self.kv_cache_manager.usage,
            "not_supported": self.not_supported,
        }

    def sequences(self) -> list[RunningSequence]:
        return [
            replace(sequence.summary(), state=self._state(sequence)) for sequence in self._sequences.values()
        ]

    def _state(self, sequence: Sequence) -> str:
        """State for a gateway: waiting until vLLM lets it in, paused while it has a place but no tokens."""
        if sequence.state is SequenceStatus.FINISHED:
            return SequenceStatus.RUNNING
        if sequence.state is not SequenceStatus.RUNNING or sequence in self._in_step:
            return sequence.state
        return SequenceStatus.PAUSED if self._holds_place(sequence) else SequenceStatus.WAITING
