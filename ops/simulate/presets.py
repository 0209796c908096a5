"""Scenarios by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.scheduling.options import PolicyOptions
from ops.simulate.slo import SloLimits
from ops.simulate.traffic.generate import AllAtOnce, Generated, Spec
from ops.simulate.traffic.requests import Source

BATCH_TIER = 2


@dataclass(frozen=True, slots=True)
class ScenarioPreset:
    """Options that a name stands for; given options replace them."""

    about: str
    source: Callable[[int], Source]
    slo: SloLimits = field(default_factory=SloLimits)
    gpu: str = "h200"
    model: str = "8b"
    tensor_parallel: int = 1
    policies: tuple[str, ...] = ("static-padded", "fcfs", "hybrid")
    options: PolicyOptions = field(default_factory=PolicyOptions)
    max_sequences: int = 256
    claims: dict[str, str] = field(default_factory=dict)


PRESETS = {
    "chat": ScenarioPreset(
        "twelve tenants of real chat lengths, one floods",
        lambda seed: Generated(Spec(tenants=12, rate=12, seconds=180, onoff=2, flooder=1.0), seed),
        SloLimits(ttft_s=1.0, tpot_s=0.05),
    ),
    "code": ScenarioPreset(
        "completions: long prompts with shared beginnings, short answers",
        lambda seed: Generated(Spec(tenants=4, rate=8, seconds=180, hot=4, cold=2, lengths="code"), seed),
        SloLimits(ttft_s=0.5, tpot_s=0.05),
    ),
    "long-form": ScenarioPreset(
        "answers of a thousand tokens and more, some with long contexts",
        lambda seed: Generated(Spec(tenants=6, rate=4, seconds=180, long=1, lengths="long-form"), seed),
        SloLimits(ttft_s=2.0, tpot_s=0.05),
    ),
    "batch": ScenarioPreset(
        "2,000 requests of the batch tier, all there at once",
        lambda seed: AllAtOnce(Generated(Spec(tenants=4, rate=100, seconds=60), seed, BATCH_TIER), 2000),
        SloLimits(ttft_s=3600.0, tpot_s=1.0),
    ),
    "seventy-b": ScenarioPreset(
        "70B on four H200s, 1,000 requests of 50 to 1,000 tokens in and out, all there at once",
        lambda seed: AllAtOnce(Generated(Spec(tenants=1, rate=100, seconds=60, lengths="even"), seed), 1000),
        model="70b",
        tensor_parallel=4,
        options=PolicyOptions(batch_size=32),
        # "Continuous Batching: a leap in throughput" (2025) claims these of static batches of 32, of
        # continuous batching, and of scheduling by predicted lengths (ARES) with mixed kernels (POD).
        claims={
            "static-padded": "800 output tokens/s, mean latency 3.2 s, 25 % busy",
            "fcfs": "2,400 output tokens/s, mean latency 1.1 s, 65 % busy",
            "hybrid": "7,200 output tokens/s, mean latency 0.4 s, 92 % busy",
        },
    ),
}
