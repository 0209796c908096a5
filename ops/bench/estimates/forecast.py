"""Benchmark of the layers of the output-length forecast on unseen wordings.

Instructions are answered by the shipped model at temperature 1 (`forecast_traffic.py`). Their templates are
dealt into three parts; each part is forecast by layers that have learned from the other two only. The first
and second layer learn online, in the order of the traffic, and the second layer's forecasts are then the
prior of the probe. Beside them stands the length-blind constant: the median of the training answers. The gate
is run over the traffic in its order, as it runs when it serves.
"""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.forecast.length.length import LAYERS, LengthForecast
from engine.forecast.length.probe import prior_of, prior_quantiles, remaining_quantiles
from engine.forecast.length.scores import HIGH, QUANTILES, LayerScore, pinball_tokens
from ops.bench.estimates import forecast_groups, forecast_queue
from ops.bench.estimates.forecast_traffic import (
    MAX_TOKENS,
    AnsweredInstruction,
    answer_instructions,
    states_of,
)
from ops.reporting import table

PARTS = 3
WANTED_SHARE_OF_BLIND_ERROR = 0.5
WANTED_GATE_EXCESS = 0.02
TENANT, MODEL = "bench", "shipped"


@dataclass
class LayerScores:
    """The layers' scores, over all held-out answers."""

    blind: LayerScore = field(default_factory=LayerScore)
    sketches: LayerScore = field(default_factory=LayerScore)
    features: LayerScore = field(default_factory=LayerScore)
    probe: LayerScore = field(default_factory=LayerScore)
    later: dict[int, tuple[LayerScore, LayerScore]] = field(
        default_factory=lambda: defaultdict(lambda: (LayerScore(), LayerScore()))
    )
    """After some tokens (in powers of two): features alone, and with the probe; of the whole length."""

    def rows(self) -> dict[str, LayerScore]:
        return {
            "constant (length-blind)": self.blind,
            "1 sketches": self.sketches,
            "2 features": self.features,
            "3 probe": self.probe,
        }


def run(*, model: str | None, answers: int, threads: int, seed: int, progress: Any) -> dict[str, Any]:
    """Everything that is measured; `ok` says whether each layer beats the one below it."""
    from ops.demo.training.evaluate import MODEL_DIRECTORY

    directory = Path(model) if model else MODEL_DIRECTORY
    answered = answer_instructions(directory, answers, seed=seed, threads=threads, progress=progress)
    # Batches end in an order of their own: the shortest first. Traffic does not come sorted.
    random.Random(seed).shuffle(answered)
    report = judge(answered)
    report["queue"] = forecast_queue.run(directory, answers=answers, threads=threads, seed=seed)
    report["groups"] = forecast_groups.run()
    report["ok"] = (
        report["ok"] and report["groups"]["ok"] and (report["queue"] is None or report["queue"]["ok"])
    )
    return report


def judge(answered: Sequence[AnsweredInstruction]) -> dict[str, Any]:
    """The report on answers that are there already."""
    parts = deal(answered)
    measured = LayerScores()
    for part in range(PARTS):
        training = [each for each, its in zip(answered, parts, strict=True) if its != part]
        held_out = [each for each, its in zip(answered, parts, strict=True) if its == part]
        _measure(training, held_out, measured)
    scores = measured.rows()
    means = [score.pinball_sum_tokens / max(1, score.samples) for score in scores.values()]
    share = measured.probe.error_sum_tokens / max(1e-9, measured.blind.error_sum_tokens)
    gate = _gate(answered)
    return {
        "answers": len(answered),
        "templates": len({each.template for each in answered}),
        "layers": {name: score.report() for name, score in scores.items()},
        "probe_error_share": share,
        "later": {
            str(generated): [each.report() for each in scores]
            for generated, scores in sorted(measured.later.items())
        },
        "gate": gate,
        "ok": means[1] > means[2] > means[3]
        and share <= WANTED_SHARE_OF_BLIND_ERROR
        and gate["excess"] <= WANTED_GATE_EXCESS,
    }


def deal(answered: Sequence[AnsweredInstruction]) -> list[int]:
    """Which part each answer belongs to: all of one template to the same, the templates of a family in turn
    to one part after the other, in the order of their hashes."""
    families: dict[str, set[str]] = defaultdict(set)
    for each in answered:
        families[each.family].add(each.template)
    part_of: dict[str, int] = {}
    for templates in families.values():
        ordered = sorted(templates, key=lambda name: hashlib.sha256(name.encode()).digest())
        part_of |= {name: index % PARTS for index, name in enumerate(ordered)}
    return [part_of[each.template] for each in answered]


def _measure(
    training: Sequence[AnsweredInstruction], held_out: Sequence[AnsweredInstruction], measured: LayerScores
) -> None:
    import torch

    from engine.model.length_probe.fit import fit_probe

    forecast = LengthForecast()
    for each in training:
        forecast.observe(TENANT, MODEL, each.output_tokens, each.features)
    readings = [reading for each in training for reading in each.readings]
    fitted = fit_probe(
        states_of([reading.state for reading in readings]),
        [reading.remaining for reading in readings],
        layers=(),
        fingerprint="",
        held_out_share=0.0,
    )
    lengths = sorted(each.output_tokens for each in training)
    constants = [float(lengths[min(int(q * len(lengths)), len(lengths) - 1)]) for q in QUANTILES]
    for each in held_out:
        actual = each.output_tokens
        measured.blind.observe(constants, actual)
        measured.sketches.observe(forecast.sketches.quantiles(TENANT, MODEL, QUANTILES), actual)
        below = forecast.by_features(TENANT, MODEL, QUANTILES, each.features)
        measured.features.observe([min(length, MAX_TOKENS) for length in below], actual)
        with torch.inference_mode():
            states = states_of([reading.state for reading in each.readings])
            rows = fitted.weights.logits(states).tolist()
        for reading, logits in zip(each.readings, rows, strict=True):
            out = reading.generated
            prior = prior_of(below[0], below[HIGH], out)
            foreseen = [min(out + more, MAX_TOKENS) for more in remaining_quantiles(logits, prior, QUANTILES)]
            if out == 0:
                measured.probe.observe(foreseen, actual)
            else:
                plain, probed = measured.later[1 << (out.bit_length() - 1)]
                plain.observe(
                    [min(out + more, MAX_TOKENS) for more in prior_quantiles(prior, QUANTILES)], actual
                )
                probed.observe(foreseen, actual)


def _gate(answered: Sequence[AnsweredInstruction]) -> dict[str, Any]:
    """What the gate loses over the whole traffic against the best of its layers in hindsight."""
    forecast = LengthForecast()
    chosen = 0.0
    layers = [0.0, 0.0]
    for each in answered:
        foreseen = forecast.quantiles(TENANT, MODEL, QUANTILES, features=each.features)
        chosen += pinball_tokens(foreseen, each.output_tokens)
        plain = forecast.sketches.quantiles(TENANT, MODEL, QUANTILES)
        layers[0] += pinball_tokens(plain, each.output_tokens)
        layers[1] += pinball_tokens(
            forecast.by_features(TENANT, MODEL, QUANTILES, each.features), each.output_tokens
        )
        forecast.observe(TENANT, MODEL, each.output_tokens, each.features)
    count = len(answered)
    return {
        "pinball_tokens": chosen / count,
        "layers": {name: loss / count for name, loss in zip(LAYERS, layers, strict=False)},
        "excess": chosen / min(layers) - 1,
        "used": forecast.layer(TENANT, MODEL),
    }


def show(report: dict[str, Any]) -> None:
    """The tables for people."""
    rows = [_row(name, score) for name, score in report["layers"].items()]
    columns = ("layer", "answers", "pinball loss", "mean error", "p50 covers", "p90 covers", "rank accuracy")
    table(
        f"output length on unseen wordings, tokens ({report['templates']} templates, {PARTS} parts)",
        columns,
        rows,
    )
    later = [
        _row(f"after {generated}+ tokens: {name}", score)
        for generated, scores in report["later"].items()
        for name, score in zip(("2 features", "3 probe"), scores, strict=True)
    ]
    table("the same while answers are decoded", columns, later)
    gate = report["gate"]
    print(
        f"gate over the traffic in order: loss {gate['pinball_tokens']:.2f}, "
        + ", ".join(f"{name} {loss:.2f}" for name, loss in gate["layers"].items())
        + f"; {100 * gate['excess']:+.1f} % of the best (at most {100 * WANTED_GATE_EXCESS:+.0f} % wanted)"
    )
    print(
        f"the probe's mean error is {100 * report['probe_error_share']:.0f} % of the constant's (at most"
        f" {100 * WANTED_SHARE_OF_BLIND_ERROR:.0f} % wanted)"
    )
    if report["queue"] is not None:
        forecast_queue.show(report["queue"])
    forecast_groups.show(report["groups"])
    print(f"each layer beats the one below, and all that: {'ok' if report['ok'] else 'NOT ok'}")


def _row(name: str, score: dict[str, Any]) -> tuple[object, ...]:
    def share(key: str) -> str:
        return "" if score[key] is None else f"{100 * score[key]:.0f} %"

    return (
        name,
        score["samples"],
        f"{score['pinball_tokens']:.2f}",
        f"{score['mean_error_tokens']:.2f}",
        share("p50_coverage"),
        share("p90_coverage"),
        share("rank_accuracy"),
    )
