"""`FairSteps`: the seams that the plug-in holds on to in vLLM's scheduler.

Mixed into vLLM's `AsyncScheduler` by `vllm_entry.py`. Before each step the planner decides (`planner.py`);
here its plan is put to vLLM, at four places:

- the waiting queue object offers the requests that enter, in the plan's order (`waiting.py`);
- the order of `running`: those with tokens first, at the tail whom vLLM is to evict first if its own count of
  blocks falls short;
- who is in this step: the others stay in `running` with their KV and are skipped by
  `next_decode_eligible_step`; of a prompt vLLM takes as much as the plan gives, by the hook that aligns
  chunks;
- what is charged after it: what vLLM gave. It is compared with the plan, and a difference that has no known
  reason raises `UnfairStep`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.core.plan import Plan
from engine.sequence import Sequence
from engine.vllm_plugin.fair_requests import FairRequests
from engine.vllm_plugin.planner import Given
from engine.vllm_plugin.seam import VllmRequest


class UnfairStep(RuntimeError):
    """vLLM gave a sequence tokens that were not planned, or none for no known reason."""


class FairSteps(FairRequests):
    """A mixin for vLLM's scheduler; see above."""

    _caps: Mapping[str, int] = {}
    """The longest chunks that this step may give, by request."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """See vLLM's `SchedulerInterface`. Raises `UnfairStep`."""
        now_s = self.clock()
        self.desk.before_step(self, now_s)
        if self._pause_state.name == "PAUSED_ALL":
            self.waiting.offer(())
            return super().schedule(*args, **kwargs)
        if self._blocked:
            self._unblock()
        free_blocks = self.kv_cache_manager.block_pool.get_num_free_blocks() // self._groups
        plan = self.planner.plan(free_blocks, now_s)
        if plan.preempted:
            self._evict(plan, now_s)
        self._line_up(plan, is_short=free_blocks < len(self.running))
        output = super().schedule(*args, **kwargs)
        is_throttled = bool(kwargs.get("throttle_prefills", args and args[0]))
        given = self._in_step = self._compare(plan, output, is_throttled=is_throttled)
        service = self.planner.commit(plan, given, now_s)
        self.desk.after_step(service, now_s)
        return output

    def _evict(self, plan: Plan, now_s: float) -> None:
        """Takes the KV of those that the plan preempts; it may have admitted one of them again."""
        self._evicts_as_planned = True
        try:
            for sequence in plan.preempted:
                if self._holds_place(sequence):
                    request = self._requests[sequence]
                    self.running.remove(request)
                    self._preempt_request(request, now_s)
        finally:
            self._evicts_as_planned = False

    def _line_up(self, plan: Plan, *, is_short: bool) -> None:
        """Puts the plan to vLLM: the order of `running`, who is skipped, what is offered, chunks' lengths."""
        waiting, requests = self.waiting, self._requests
        chosen: list[VllmRequest] = []
        offers: list[VllmRequest] = []
        caps: dict[str, int] = {}
        for sequence, tokens in plan.shares.items():
            request = requests[sequence]
            if tokens < len(sequence.token_ids) - sequence.computed_tokens:
                caps[request.request_id] = tokens
            if request.request_id not in waiting.requests:
                chosen.append(request)
            elif not request.num_stale_output_tokens:
                # What was under way when vLLM took its KV may have been dropped.
                del sequence.token_ids[request.num_tokens :]
                offers.append(request)
        self._caps = caps
        waiting.offer(offers[: max(0, self.max_num_running_reqs - len(self.running))])
        if len(chosen) < len(self.running):
            inside = {request.request_id for request in chosen}
            rest = [request for request in self.running if request.request_id not in inside]
            for request in rest:
                request.next_decode_eligible_step = self.current_step + 2
            self.running[:] = chosen + self._by_victim(rest)
        elif is_short:
            self.running[:] = self._by_victim(chosen)
        else:
            self.running[:] = chosen

    def _by_victim(self, requests: list[VllmRequest]) -> list[VllmRequest]:
        """The same; last the one that is to give way first: the longest paused, or the policy's choice."""
        table = self.planner.table
        paused = (sequence for sequence in table.paused.values() if self._holds_place(sequence))
        victim = next(paused, None)
        if victim is None:
            every = [self._sequences[request.request_id] for request in requests]
            sequences = [sequence for sequence in every if self.planner.has(sequence)]
            if not sequences:
                return requests
            tier = max(sequence.tier for sequence in sequences)
            victim = table.policy.evict.victim(sequences, table.standings.of_tier(tier))
        last = self._requests[victim]
        return [request for request in requests if request is not last] + [last]

    def _mamba_block_aligned_split(
        self, request: VllmRequest, num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> int:
        """vLLM asks how long a chunk may be: as long as planned."""
        if self._aligns_chunks:
            return super()._mamba_block_aligned_split(request, num_new_tokens, *args, **kwargs)
        return min(num_new_tokens, self._caps.get(request.request_id, num_new_tokens))

    def _compare(self, plan: Plan, output: Any, *, is_throttled: bool) -> dict[Sequence, Given]:
        """What vLLM gave, by sequence; `is_throttled`: no prompts in this step. Raises `UnfairStep`."""
        given: dict[Sequence, Given] = {}
        shares, sequences, requests = plan.shares, self._sequences, self.requests
        for request_id, tokens in output.num_scheduled_tokens.items():
            sequence, request = sequences[request_id], requests[request_id]
            planned = shares.get(sequence, 0)
            if tokens > planned and not (planned and self._aligns_chunks):
                raise UnfairStep(
                    f"step {self.planner.step}: {tokens} tokens were given to {request_id} of tenant"
                    f" {sequence.tenant_id}, {planned} were planned: this vLLM ({self.vllm_version}) does not"
                    " keep to the plan of fairgate-vllm"
                )
            given[sequence] = Given(
                tokens, request.num_computed_tokens - tokens, emits=not request.is_prefill_chunk
            )
        if len(given) < len(shares):
            self._explain(plan, given, is_throttled=is_throttled)
        return given

    def _explain(self, plan: Plan, given: Mapping[Sequence, Given], *, is_throttled: bool) -> None:
        """Why one that was chosen got nothing. Raises `UnfairStep` where it has no known reason."""
        for sequence in plan.shares:
            if sequence in given or (is_throttled and sequence.is_prefilling):
                continue
            request = self._requests[sequence]
            # Not entered: no memory by vLLM's own count, output of before its eviction under way, no new
            # requests just now. Evicted by vLLM for want of a block; or it waits for an encoder's budget. Or
            # chunks end where vLLM wants it: what is left may be too short for one, or be given to another.
            if request.request_id in self.waiting or request.has_encoder_inputs or self._aligns_chunks:
                continue
            raise UnfairStep(
                f"step {self.planner.step}: {request.request_id} of tenant {sequence.tenant_id} was chosen"
                f" and got no token, for no known reason: this vLLM ({self.vllm_version}) does not keep to"
                " the plan of fairgate-vllm"
            )

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        now_s = self.clock()
        if scheduler_output.num_scheduled_tokens:
            self.planner.came_back(now_s)
        self.desk.before_step(self, now_s)
        if self._ending:
            self._end_due(outputs)
        return outputs
