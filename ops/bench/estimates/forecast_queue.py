"""What the shipped length probe does for the queue: charges and waits, before and after prompts are computed.

Instructions that neither the model nor its probe was trained on are answered in a drawn order by a virtual
engine of some places, one token each a step, in front of which the others wait. *Before*: what the gateway
predicts on arrival, learning as it goes. *After*: what the engine foresees once the prompt is computed. The
wait of each that finds no place is forecast by one replay for each way, on the same queue at the same
instant, and compared with what it then was.

A probe trained to mislead (on lengths in reverse) goes through the same gate.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.entry import QueueEntry
from engine.forecast.length.length import LengthForecast
from engine.forecast.length.probe import length_quantile, prior_of, remaining_quantiles
from engine.forecast.length.probe_gate import ProbeGate
from engine.forecast.length.scores import HIGH, QUANTILES, LayerScore
from engine.forecast.wait.forecast import EngineLoad, Flight, forecast
from engine.messages import StepTime
from engine.scheduling.counters import ServiceCounters
from engine.scheduling.tiers import TieredQueue
from gateway.estimates.estimator import SURE
from ops.bench.estimates.forecast_traffic import (
    MAX_TOKENS,
    AnsweredInstruction,
    answer_instructions,
    states_of,
)
from ops.reporting import table

LEARNED_FIRST = 300
"""Answers after which scores begin: until then the gateway has next to nothing to go by."""
PLACES = 8
MOST_WAITING = 60
STEP_S = 0.01
STEP_TIME = StepTime(STEP_S, 0.0, 0.0, 0.0, samples=100, relative_error=0.05)
TENANT, MODEL = "bench", "shipped"
WANTED_SHARE = 0.5
"""Of the error and of the loss before, at most."""
WAYS = ("by what the tenant's answers are like", "and by what engines foresee", "and by sure forecasts")

Lengths = tuple[int, int]
"""Median and 90th percentile."""


@dataclass(frozen=True, slots=True)
class Foretold:
    """One answer, and its length as predicted on arrival and as foreseen after the prompt."""

    length: int
    before: Lengths
    after: Lengths


@dataclass(slots=True)
class DecodedAnswer:
    entry: QueueEntry
    told: Foretold
    emitted: int = 0


def run(directory: Path, *, answers: int, threads: int, seed: int) -> dict[str, Any] | None:
    """`ok` says whether the probe halves loss and error, waits get better, and the misleading one is dropped.
    None: the model has no probe."""
    import torch

    from engine.model.length_probe.fit import fit_probe
    from engine.model.length_probe.probe import FILE_NAME, load_probe
    from engine.model.loader import load_runner
    from engine.process.fingerprint import model_fingerprint

    if not (directory / FILE_NAME).exists():
        return None
    runner = load_runner(directory, num_blocks=1, fast_paths=False)
    shipped = load_probe(
        directory / FILE_NAME, runner.state_reader(), model_fingerprint(directory), torch.device("cpu")
    )
    answered = answer_instructions(directory, answers, seed=seed + 1, threads=threads, held_out=True)
    random.Random(seed).shuffle(answered)
    states = states_of([each.readings[0].state for each in answered])
    longest = max(each.output_tokens for each in answered)
    reverse = [longest + 1 - each.output_tokens for each in answered]
    liar = fit_probe(states, reverse, layers=(), fingerprint="", held_out_share=0.0).weights
    logits, lies = (weights.logits(states).tolist() for weights in (shipped, liar))
    scores = {"before": LayerScore(), "after": LayerScore()}
    told = _foretell(answered, logits, scores)
    lengths = {name: score.report() for name, score in scores.items()}
    waits = measure_waits(told, answered, random.Random(seed))
    misled = _gate(answered, told, lies)
    errors = [each["mean_error_s"] for each in waits["ways"].values()]
    before, after = scores["before"], scores["after"]
    halves = (
        after.pinball_sum_tokens <= WANTED_SHARE * before.pinball_sum_tokens
        and after.error_sum_tokens <= WANTED_SHARE * before.error_sum_tokens
    )
    return {
        "lengths": lengths,
        "waits": waits,
        "misleading": misled,
        "ok": halves and errors[1] < errors[0] and errors[2] < errors[0] and misled["used_share"] == 0.0,
    }


def _foretell(
    answered: Sequence[AnsweredInstruction], logits: Sequence[Sequence[float]], scores: dict[str, LayerScore]
) -> list[Foretold]:
    """In order, learning from each answer after it was foretold."""
    lengths = LengthForecast()
    told: list[Foretold] = []
    for number, (each, read) in enumerate(zip(answered, logits, strict=True)):
        before = lengths.quantiles(TENANT, MODEL, QUANTILES, 0, MAX_TOKENS, each.features)
        rest = remaining_quantiles(read, prior_of(before[0], before[HIGH], 0), QUANTILES)
        after = [min(more, MAX_TOKENS) for more in rest]
        if number >= LEARNED_FIRST:
            scores["before"].observe(before, each.output_tokens)
            scores["after"].observe(after, each.output_tokens)
        told.append(Foretold(each.output_tokens, (before[0], before[HIGH]), (after[0], after[HIGH])))
        lengths.observe(TENANT, MODEL, each.output_tokens, each.features)
    return told[LEARNED_FIRST:]


def _gate(
    answered: Sequence[AnsweredInstruction], told: Sequence[Foretold], lies: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """An engine with the misleading probe: how often the gate let it answer."""
    gate = ProbeGate()
    gate.took_over(len(lies))
    used = 0
    for number, (each, read) in enumerate(zip(told, lies[-len(told) :], strict=True)):
        name = str(number)
        found = gate.read(name, TENANT, forecast=each.before, generated=0, max_tokens=MAX_TOKENS, logits=read)
        used += found is not None
        gate.ended(name, TENANT, each.length)
    said = gate.describe()
    assert said.forecast is not None
    assert said.probe is not None
    return {
        "answers": said.answers,
        "used_share": used / len(told),
        "pinball_tokens": said.probe.pinball_tokens,
        "pinball_tokens_without": said.forecast.pinball_tokens,
    }


def measure_waits(
    told: Sequence[Foretold], answered: Sequence[AnsweredInstruction], rng: random.Random
) -> dict[str, Any]:
    """A pool under full load: the mean error of each way to forecast a wait, in seconds."""
    lengths = LengthForecast()
    for learned in answered:
        lengths.observe(TENANT, MODEL, learned.output_tokens)
    rate_per_step = PLACES * len(told) / sum(each.length for each in told)
    waiting: deque[tuple[QueueEntry, Foretold]] = deque()
    running: list[DecodedAnswer] = []
    asked: dict[str, tuple[int, list[float]]] = {}
    waits: list[float] = []
    errors = [0.0] * len(WAYS)
    step, coming, next_step = 0, 0, 0.0
    while coming < len(told) or waiting:
        while coming < len(told) and next_step <= step:
            each = told[coming]
            entry = QueueEntry(
                f"r{coming}", TENANT, step * STEP_S, 1, each.before[0], predicted_high_tokens=each.before[1]
            )
            coming += 1
            next_step += rng.expovariate(rate_per_step)
            if len(running) == PLACES and len(waiting) < MOST_WAITING:
                ways = [
                    _forecast(entry, each, waiting, running, way, lengths, step) for way in range(len(WAYS))
                ]
                asked[entry.entry_id] = (step, ways)
            waiting.append((entry, each))
        while waiting and len(running) < PLACES:
            entry, each = waiting.popleft()
            running.append(DecodedAnswer(entry, each))
            if (known := asked.pop(entry.entry_id, None)) is not None:
                waits.append((step - known[0]) * STEP_S)
                errors = [total + abs(said - waits[-1]) for total, said in zip(errors, known[1], strict=True)]
        step += 1
        for stream in running:
            stream.emitted += 1
        running = [stream for stream in running if stream.emitted < stream.told.length]
    return {
        "requests": len(waits),
        "mean_wait_s": sum(waits) / len(waits),
        "ways": {way: {"mean_error_s": error / len(waits)} for way, error in zip(WAYS, errors, strict=True)},
    }


def _forecast(
    entry: QueueEntry,
    own: Foretold,
    waiting: Iterable[tuple[QueueEntry, Foretold]],
    running: Sequence[DecodedAnswer],
    way: int,
    lengths: LengthForecast,
    step: int,
) -> float:
    """Seconds until a place, by one of `WAYS`."""
    counters = ServiceCounters()
    queue = TieredQueue("fcfs", counters)
    for waits, _ in waiting:
        queue.add(waits)
    queue.add(entry)
    flights = [Flight(each.entry, 0, 1 + each.emitted, each.emitted, 0) for each in running]
    load = EngineLoad("a", STEP_TIME, PLACES, MAX_TOKENS, PLACES, 1 << 30, flights)
    return forecast(
        entry,
        queue=queue,
        counters=counters,
        engines=[load],
        output_tokens=own.before,
        now_s=step * STEP_S,
        draw_length=_drawing(running, way, lengths),
    ).wait_s[0]


def _drawing(
    running: Sequence[DecodedAnswer], way: int, lengths: LengthForecast
) -> Callable[[QueueEntry, int, float], int]:
    """As `Estimator` draws lengths."""
    foreseen = {each.entry.entry_id: each.told.after for each in running} if way >= 1 else {}

    def draw(entry: QueueEntry, generated: int, u: float) -> int:
        known = foreseen.get(entry.entry_id)
        if known is None and way == 2:
            median, high = entry.predicted_output_tokens, entry.predicted_high_tokens
            known = (median, high) if high <= SURE * median else None
        if known is None:
            return lengths.quantile(TENANT, MODEL, u, generated, MAX_TOKENS)
        return min(length_quantile(*known, generated, u), max(MAX_TOKENS, generated + 1))

    return draw


def show(report: dict[str, Any]) -> None:
    """The tables for people."""
    rows = [
        (
            name,
            score["samples"],
            f"{score['pinball_tokens']:.2f}",
            f"{score['mean_error_tokens']:.2f}",
            f"{score['p90_coverage']:.0%}",
            f"{score['rank_accuracy']:.0%}",
        )
        for name, score in report["lengths"].items()
    ]
    columns = ("forecast", "answers", "pinball loss", "mean error", "p90 covers", "rank accuracy")
    table("the shipped probe, before and after prompts are computed, tokens", columns, rows)
    waits = report["waits"]
    table(
        f"waits of {waits['requests']} requests, {waits['mean_wait_s']:.2f} s in the mean",
        ("lengths of what goes first", "mean error, s"),
        [(way, f"{each['mean_error_s']:.3f}") for way, each in waits["ways"].items()],
    )
    misled = report["misleading"]
    print(
        f"a misleading probe: loss {misled['pinball_tokens']:.2f} instead of"
        f" {misled['pinball_tokens_without']:.2f}, used for {misled['used_share']:.0%} of the answers"
    )
