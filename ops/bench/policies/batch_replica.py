"""What does an engine on virtual time make of a stream, with an admission that runs batches to completion?

The engine's own scheduler, orders and admissions, the very ones that serve; only the steps' time is the
model's. What is measured is what the batch-or-wait table minimises: a request's latency runs to the end of
its batch, and it is late if its batch began too late.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.core import EngineConfig, StepResult
from engine.messages import SamplingParams, Submit
from engine.scheduling.batch_or_wait.batch_model import BatchModel, RequestLengths
from engine.scheduling.options import PolicyOptions
from engine.scheduling.policy import PolicyPreset
from engine.virtual.replica import VirtualReplica, virtual_prompt
from ops.bench.policies.batch_queue import WARM_UP, Arrivals, StreamOutcome

SAME_INSTANT_S = 1e-6
"""Requests of one batch start together but for rounding; two batches never do."""
BLOCK_TOKENS = 16


@dataclass(slots=True)
class StartedBatch:
    """Requests that started together."""

    start_s: float
    end_s: float
    arrived_s: list[float]
    own_latency_s: float = 0.0
    """Sum over its members of the time to each one's own last token."""


@dataclass(frozen=True, slots=True)
class StreamMeasured:
    """What an engine did with a stream."""

    outcome: StreamOutcome
    own_latency_s: float
    """Mean time to each request's own last token, which its batch does not keep back."""


class BatchReplica:
    """One engine on virtual time that serves one stream to its end."""

    def __init__(
        self, model: BatchModel, arrivals: Arrivals, slo_s: float, *, order: str, options: PolicyOptions
    ) -> None:
        """`options` name the admission and what it goes by. Memory never limits a batch."""
        self._model, self._arrivals, self._slo_s = model, arrivals, slo_s
        most = max(model.short.total_tokens, model.long.total_tokens)
        places = options.batch_size or 64
        self._replica = VirtualReplica(
            EngineConfig(
                # A batch starts whole: all its prompts are in its first step.
                max_batched_tokens=places * model.long.prompt_tokens,
                max_sequences=places,
                max_waiting=len(arrivals.times_s) + 1,
            ),
            num_blocks=2 * places * (most // BLOCK_TOKENS + 1),
            block_tokens=BLOCK_TOKENS,
            context_tokens=2 * most,
            step_time=model.step_time,
        )
        policy = PolicyPreset("batches", order)(options)
        self._replica.core.table.set_policy(policy)
        self._received_s: list[float] = []
        self._batches: dict[int, StartedBatch] = {}

    @property
    def batches(self) -> list[StartedBatch]:
        """Those that have ended at least in part, in the order in which they began."""
        return sorted(self._batches.values(), key=lambda batch: batch.start_s)

    def run(self) -> StreamMeasured:
        """Raises RuntimeError when the engine hangs."""
        replica, times_s = self._replica, self._arrivals.times_s
        clock, core = replica.clock, replica.core
        while True:
            while len(self._received_s) < len(times_s) and times_s[len(self._received_s)] <= clock.now_s:
                self._submit(len(self._received_s))
            next_s = times_s[len(self._received_s)] if len(self._received_s) < len(times_s) else None
            if not core.has_work():
                if next_s is None:
                    return self._measured()
                clock.advance(next_s - clock.now_s)
                continue
            result = replica.step()
            self._collect(result)
            if result.num_tokens or result.deltas:
                continue
            instants = [at_s for at_s in (result.wait_until_s, next_s) if at_s is not None]
            if not instants or min(instants) <= clock.now_s:
                raise RuntimeError(f"the engine hangs at {clock.now_s:.3f} s: it neither runs nor waits")
            clock.advance(min(instants) - clock.now_s)

    def _submit(self, number: int) -> None:
        kind = self._kind(number)
        name = str(number)
        refused = self._replica.submit(
            Submit(
                sequence_id=name,
                request_id=name,
                tenant_id="stream",
                prompt_token_ids=virtual_prompt(name, kind.prompt_tokens),
                max_tokens=kind.output_tokens,
                lease_tokens=kind.output_tokens,
                sampling=SamplingParams(seed=number),
                predicted_output_tokens=kind.output_tokens,
            )
        )
        if refused is not None:
            raise ValueError(f"request {number} was refused: {refused.message}")
        self._received_s.append(self._replica.clock.now_s)

    def _kind(self, number: int) -> RequestLengths:
        return self._model.long if self._arrivals.longs[number] else self._model.short

    def _collect(self, result: StepResult) -> None:
        now_s = self._replica.clock.now_s
        for delta in result.deltas.get("virtual", ()):
            outcome = delta.outcome
            if outcome is None:
                continue
            number = int(delta.sequence_id)
            assert outcome.scheduled_s is not None, "it ended without having run"
            start_s = self._received_s[number] + outcome.scheduled_s
            batch = self._batches.setdefault(
                round(start_s / SAME_INSTANT_S), StartedBatch(start_s, now_s, [])
            )
            arrived_s = self._arrivals.times_s[number]
            batch.end_s = max(batch.end_s, now_s)
            batch.arrived_s.append(arrived_s)
            batch.own_latency_s += now_s - arrived_s

    def _measured(self) -> StreamMeasured:
        """Means over the batches that began when `WARM_UP` requests had been served."""
        batches = self.batches
        served = warm = 0
        while served < WARM_UP:
            served += len(batches[warm].arrived_s)
            warm += 1
        counted = batches[warm:]
        requests = sum(len(batch.arrived_s) for batch in counted)
        latency_s = sum(batch.end_s - arrived_s for batch in counted for arrived_s in batch.arrived_s)
        late = sum(
            batch.start_s - arrived_s > self._slo_s + SAME_INSTANT_S
            for batch in counted
            for arrived_s in batch.arrived_s
        )
        joules = sum(
            self._model.launch_joules + self._model.busy_watts * (batch.end_s - batch.start_s)
            for batch in counted
        )
        began_s = batches[warm - 1].end_s if warm else 0.0
        return StreamMeasured(
            StreamOutcome(
                latency_s / requests,
                joules / (counted[-1].end_s - began_s),
                late / requests,
                requests / len(counted),
            ),
            sum(batch.own_latency_s for batch in counted) / requests,
        )
