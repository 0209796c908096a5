"""A simulated replica that takes the steps of its whole `EngineCore`: slower and nearer to an engine."""

from __future__ import annotations

from msgspec.structs import replace

from engine.messages import Submit
from engine.sequence import Sequence
from engine.virtual.fast_replica import SimulatedReplica, StepsTaken

GATEWAY_ID = "simulated"


class SteppedReplica(SimulatedReplica):
    """Implements the interface of `SimulatedReplica` without runs. One owner."""

    def submit(self, submit: Submit, output_tokens: int) -> None:
        """Takes a sequence that ends after `output_tokens` tokens. Raises ValueError when it is refused."""
        self._catch_up()
        self.runner.set_length(submit.sequence_id, output_tokens)
        lease_tokens = min(submit.lease_tokens, output_tokens)
        refused = self.core.submit(
            replace(submit, max_tokens=output_tokens, lease_tokens=lease_tokens), GATEWAY_ID
        )
        if refused is not None:
            raise ValueError(f"a request of {submit.tenant_id} was refused: {refused.message}")

    @property
    def has_work(self) -> bool:
        return self.core.has_work()

    def steps_alike(self) -> int:
        """None: every step is taken by itself."""
        return 0

    def step(self) -> StepsTaken:
        self._catch_up()
        known: dict[str, Sequence] = dict(self.table.sequences)
        result = self.core.step()
        self.now_s = self.clock.now_s
        taken = StepsTaken(
            wait_until_s=result.wait_until_s,
            num_tokens=result.num_tokens,
            service=result.service,
            lifts={
                (tier, tenant_id): amount
                for tenant_id, share in result.shares.items()
                for tier, amount in share.lifts.items()
            },
        )
        for delta in result.deltas.get(GATEWAY_ID, ()):
            sequence = known[delta.sequence_id]
            if 0 < sequence.emitted_tokens == len(delta.token_ids):
                taken.first.append(sequence)
            if delta.outcome is not None:
                taken.finished.append(sequence)
        self.work.steps += 1
        self.work.busy_s += result.duration_s
        self.work.computed_tokens += result.num_tokens
        return taken

    def _catch_up(self) -> None:
        self.clock.advance(max(0.0, self.now_s - self.clock.now_s))
