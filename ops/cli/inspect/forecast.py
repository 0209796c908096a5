"""`fairgate forecast`: quality of the length forecasts, and training of their third layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ops.cli.base import Failure, PageCommand, answer, group, settings_now
from ops.cli.live import call, running_server
from ops.cli.options import Number
from ops.cli.resource_commands import add_to
from ops.reporting import table
from tenants.resources.records.counts import CALIBRATION

ENGINE_OPTION = click.option(
    "--engine-id", default="engine-0", show_default=True, help="Its name in the data directory."
)


@group()
def forecast() -> None:
    """Forecasts: how accurate they are; training.

    \b
      fairgate forecast report
      fairgate forecast calibration --group-by model,figure     estimates against actuals
      fairgate serve --engine-collect-lengths yes     collect readings while serving
      fairgate forecast train                         train a probe on them; running engines take it over
    """


@forecast.command(cls=PageCommand)
@ENGINE_OPTION
def report(engine_id: str) -> None:
    """Shows how accurate each layer of the forecast was, and which one is used.

    Of the server that runs on this data directory, as of now; of none, what was saved last.

    \b
    Layers 1 and 2 are judged by the gateway, on arrival. Layer 3, the length probe, is judged by each engine
    against what the same answers were predicted to be before their prompts were computed. Pinball loss and
    errors are in tokens; rank accuracy: of two answers, how often the longer one was expected to be longer.
    --json answers:
      {"from": "server", "gateway": {"fairgate-demo": {"used": 1, "changes": 1, "samples": 812,
       "relative_loss": [1.0, 0.31], "layers": {"sketches": {"samples": 812, "pinball_tokens": 9.1,
       "p90_coverage": 0.91, …}, …}}}, "engines": {"engine-0": {"length_probe": {"state": "on",
       "problem": "", "trained_on": 37089, "loaded": 1, "is_used": true, "answers": 700,
       "forecast": {"pinball_tokens": 2.1, "mean_error_tokens": 6.2, "p90_coverage": 0.9, …},
       "probe": {"pinball_tokens": 1.0, …}}, "step_time": {"base_s": …}}}}
    """
    server = running_server()
    if server is not None:
        scores = {"from": "server"} | call(server, "GET", "/forecasts")
    else:
        scores = {"from": "files"} | _saved(Path(settings_now().data_dir), engine_id)
    answer(scores, lambda: _show(scores))


add_to(forecast, CALIBRATION)


@forecast.command()
@ENGINE_OPTION
@click.option("--model", metavar="DIR", help="Model directory.  [default: the shipped model]")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where the probe goes.  [default: beside the weights, where engines look for it]",
)
@click.option(
    "--instructions",
    type=Number(int, 100, 100_000),
    help="Instead of collected readings: let the shipped model answer so many of its own instructions.",
)
@click.option("--threads", type=Number(int, 1, 256), default=1, show_default=True, help="CPU threads.")
@click.option("--seed", type=Number(int), default=1, show_default=True)
def train(
    engine_id: str,
    model: str | None,
    out: Path | None,
    instructions: int | None,
    threads: int,
    seed: int,
) -> None:
    """Trains the length probe on what an engine collected while it served.

    \b
    Collecting is off by default; engine.collect_lengths = "yes" switches it on; engines write what they have
    once there are 200, every three minutes, and at their end. Running engines take the new probe over within
    seconds. Of each engine's readings the newest 20,000 are kept. The probe fits this model only: with other
    weights it is refused, and forecasts do without it.
    --json answers:
      {"probe": "/models/x/length_probe.fairgate", "readings": 5120, "held_out": 568,
       "mean_error_tokens": 6.1, "blind_error_tokens": 22.4}
    """
    import torch

    from engine.core.learned_state import SamplesRefused, read_samples, samples_path
    from engine.model.length_probe.fit import TooFewReadings, fit_probe
    from engine.model.length_probe.probe import FILE_NAME
    from engine.process.fingerprint import model_fingerprint
    from ops.demo.prompts.probe_readings import answer_instructions, states_of
    from ops.serving.hub_model import ModelMissing, with_local_model

    try:
        settings = with_local_model(settings_now({"model": model}), download=False)
    except ModelMissing as error:
        raise Failure(str(error)) from None
    model_dir = Path(settings.model)
    torch.set_num_threads(threads)
    try:
        fingerprint = model_fingerprint(model_dir)
    except OSError as error:
        raise Failure(f"model directory {model_dir} cannot be read: {error.strerror}") from None
    try:
        if instructions is not None:
            readings, layers = answer_instructions(model_dir, instructions, seed=seed, threads=threads)
            states = [reading.state for reading in readings]
            remaining = [reading.remaining for reading in readings]
        else:
            path = samples_path(Path(settings.data_dir), engine_id)
            if not path.exists():
                raise Failure(
                    f"{path} does not exist: nothing was collected. Set engine.collect_lengths to yes"
                    " (FAIRGATE_ENGINE_COLLECT_LENGTHS=yes), serve for a while, and try again"
                )
            samples = read_samples(path, fingerprint)
            rows = samples.rows
            states, remaining, layers = [row[2] for row in rows], [row[1] for row in rows], samples.layers
        fitted = fit_probe(states_of(states), remaining, layers=layers, fingerprint=fingerprint, seed=seed)
    except (SamplesRefused, TooFewReadings) as error:
        raise Failure(str(error)) from None
    target = out if out is not None else model_dir / FILE_NAME
    try:
        fitted.weights.save(target)
    except OSError as error:
        raise Failure(
            f"{target} cannot be written ({error.strerror or error}): name another place with --out, and copy"
            f" it to the model directory as {FILE_NAME}"
        ) from None
    result = {
        "probe": str(target),
        "readings": fitted.weights.samples,
        "held_out": fitted.held_out,
        "mean_error_tokens": fitted.mean_error_tokens,
        "blind_error_tokens": fitted.blind_error_tokens,
    }
    answer(
        result,
        f"{target}: trained on {fitted.weights.samples} readings. On {fitted.held_out} others its mean error"
        f" is {fitted.mean_error_tokens:.1f} tokens; that of the best constant is"
        f" {fitted.blind_error_tokens:.1f}. Running engines take it over within seconds.",
    )


def _saved(data_dir: Path, engine_id: str) -> dict[str, Any]:
    from engine.core.learned_state import learned_path, read_learned

    try:
        learned = read_learned(learned_path(data_dir, engine_id))
        gateway = _gateway_report(data_dir)
    except (OSError, ValueError) as error:
        raise Failure(str(error)) from None
    engines = {}
    if learned is not None:
        engines[engine_id] = {
            "length_probe": learned.get("length_probe", {"state": "off"}),
            "step_time": learned.get("fit"),
        }
    return {"gateway": gateway, "engines": engines}


def _gateway_report(data_dir: Path) -> dict[str, Any]:
    path = data_dir / "lengths.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no length forecast")
    report: dict[str, Any] = content.get("report", {})
    return report


def _show(scores: dict[str, Any]) -> None:
    rows: list[tuple[object, ...]] = []
    for model_id, pool in scores["gateway"].items():
        for number, (name, score) in enumerate(pool["layers"].items()):
            rows.append(_row(f"gateway, {model_id}", f"{number + 1} {name}", pool["used"] == number, score))
    for engine_id, engine in scores["engines"].items():
        probe = engine["length_probe"]
        for name, key, is_used in (("before", "forecast", False), ("3 probe", "probe", True)):
            if probe.get(key) is not None:
                score = {"samples": probe["answers"]} | probe[key]
                rows.append(_row(engine_id, name, is_used and probe.get("is_used", False), score))
    columns = (
        "judged by",
        "layer",
        "used",
        "answers",
        "pinball loss",
        "mean error",
        "p90 covers",
        "rank accuracy",
    )
    table("length forecasts", columns, rows)
    for engine_id, engine in scores["engines"].items():
        click.echo(f"{engine_id}: {_probe_line(engine['length_probe'])}")
        fit = engine["step_time"]
        if fit is not None:
            click.echo(
                f"{engine_id}: a step takes {1e3 * fit['base_s']:.3f} ms + {1e6 * fit['per_token_s']:.1f} us"
                f" a token + {1e6 * fit['per_sequence_s']:.1f} us a sequence; {fit['samples']} steps,"
                f" mean error {100 * fit['relative_error']:.1f} %"
            )


def _probe_line(probe: dict[str, Any]) -> str:
    line = f"length probe {probe['state']}"
    if probe["state"] == "on":
        line += f", trained on {probe['trained_on']} readings, "
        line += "used" if probe.get("is_used") else "not used: not better so far"
    if probe.get("problem"):
        line += f"; {probe['problem']}"
    return line


def _row(judge: str, layer: str, is_used: bool, score: dict[str, Any]) -> tuple[object, ...]:
    def number(key: str, form: str) -> str:
        return "" if score.get(key) is None else format(score[key], form)

    return (
        judge,
        layer,
        "yes" if is_used else "",
        score["samples"],
        number("pinball_tokens", ".2f"),
        number("mean_error_tokens", ".2f"),
        number("p90_coverage", ".0%"),
        number("rank_accuracy", ".0%"),
    )
