"""Length probe: predicts the remaining output length from the model's state.

The state is read from the paged cache, after the step's tokens are chosen: the values of a middle layer and
the last one, as the mean over the prompt, the last token's, and the mean over the last few tokens. A small
network maps them to the probability of each range of remaining lengths (`engine/forecast/length/probe.py`;
TRAIL, arXiv 2410.01035; ARES, arXiv 2510.13668).
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from engine.core.model_runner import RowStart, Sampled, StepWork
from engine.forecast.length.probe import RANGES
from engine.model.attention import LayerCache
from engine.model.rows import DeviceRows
from engine.model.staging import StagedStep, on_host

log = logging.getLogger(__name__)

FILE_NAME = "length_probe.fairgate"
"""File in the model directory. In safetensors' format, but not loaded as weights."""
FORMAT = "fairgate length probe 1"
MAX_FILE_BYTES = 1 << 26
LAST_TOKENS = 8
READ_EVERY = 32
"""Steps between two readings of all sequences; each is also read when its prompt is computed."""
MAX_KEPT_PROMPTS = 1024
FARTHEST = 4.0
"""Bound of inputs, in standard deviations: beyond it, inputs are unlike those in training."""


class ProbeRefused(Exception):
    """The file is no probe for this model; the message says why, and what to do."""


class StateReader:
    """Reads the state of sequences from a paged cache."""

    def __init__(self, caches: dict[int, LayerCache], block_tokens: int) -> None:
        indices = sorted(caches)
        # The middle of the model, and the last layer's input.
        self.layers = sorted({indices[len(indices) // 2], indices[-1]})
        self._values = [
            caches[index].values.view(-1, caches[index].values.shape[2] * caches[index].values.shape[3])
            for index in self.layers
        ]
        self._block_tokens = block_tokens
        self._prompts: OrderedDict[str, torch.Tensor] = OrderedDict()
        self.width = 3 * sum(values.shape[1] for values in self._values)

    def read(self, due: Mapping[int, RowStart], step: StagedStep, rows: DeviceRows) -> torch.Tensor:
        """`[due, width]`, float32: the states after a step, by place among the sequences that choose a token
        in it; `due`: what these sequences began with. Asks nothing of the device."""
        starts = list(due.values())
        # Not a list of numbers from the host: what is read goes by the rows' own lengths.
        contexts, places = (torch.stack([of[place] for place in due]) for of in (step.contexts, step.rows))
        positions = contexts[:, None] - LAST_TOKENS
        positions = (positions + torch.arange(LAST_TOKENS, device=positions.device)).clamp(min=0)
        index = self._slots(rows.tables, places[:, None] * rows.width, positions).view(-1)
        parts = [torch.stack([self._prompt(start, rows) for start in starts])]
        for values in self._values:
            recent = values.index_select(0, index).view(len(starts), LAST_TOKENS, -1).float()
            parts += [recent[:, -1], recent.mean(dim=1)]
        return torch.cat(parts, dim=1)

    def _prompt(self, start: RowStart, rows: DeviceRows) -> torch.Tensor:
        """Mean over the prompt, of each layer; cached for later readings."""
        kept = self._prompts.pop(start.sequence_id, None)
        if kept is None:
            positions = torch.arange(start.num_prompt_tokens, device=rows.tables.device)
            index = self._slots(rows.tables, start.row * rows.width, positions)
            kept = torch.cat([values.index_select(0, index).float().mean(dim=0) for values in self._values])
        self._prompts[start.sequence_id] = kept
        if len(self._prompts) > MAX_KEPT_PROMPTS:
            self._prompts.popitem(last=False)
        return kept

    def _slots(
        self, tables: torch.Tensor, starts: torch.Tensor | int, positions: torch.Tensor
    ) -> torch.Tensor:
        entries = starts + positions // self._block_tokens
        blocks = tables.index_select(0, entries.view(-1)).view(positions.shape)
        return blocks * self._block_tokens + positions % self._block_tokens


@dataclass(frozen=True, slots=True)
class ProbeWeights:
    """A trained probe: inputs are standardised, then one hidden layer."""

    mean: torch.Tensor
    deviation: torch.Tensor
    hidden: torch.Tensor
    """`[hidden, width]`"""
    hidden_bias: torch.Tensor
    output: torch.Tensor
    """`[RANGES, hidden]`"""
    output_bias: torch.Tensor
    fingerprint: str
    layers: tuple[int, ...]
    samples: int

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        """`[rows, width]` -> `[rows, RANGES]`."""
        standard = ((state - self.mean) / self.deviation).clamp(-FARTHEST, FARTHEST)
        inner = torch.nn.functional.silu(torch.addmm(self.hidden_bias, standard, self.hidden.t()))
        return torch.addmm(self.output_bias, inner, self.output.t())

    def save(self, path: Path) -> None:
        """Replaces the file atomically. Raises OSError."""
        about = {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "layers": json.dumps(self.layers),
            "samples": str(self.samples),
        }
        temporary = path.with_name(path.name + ".new")
        save_file({name: getattr(self, name).contiguous() for name in _TENSORS}, temporary, about)
        temporary.replace(path)


def _metadata(content: bytes) -> dict[str, str]:
    """Of a safetensors file: a header of JSON behind its length."""
    length = int.from_bytes(content[:8], "little")
    metadata: dict[str, str] = json.loads(content[8 : 8 + length]).get("__metadata__", {})
    return metadata


_TENSORS = ("mean", "deviation", "hidden", "hidden_bias", "output", "output_bias")


def load_probe(path: Path, reader: StateReader, fingerprint: str, device: torch.device) -> ProbeWeights:
    """The probe in `path`, for the model of this `fingerprint`. Raises `ProbeRefused`."""
    remedy = "train another one (fairgate forecast train), or delete the file"
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ProbeRefused(f"{path} has more than {MAX_FILE_BYTES >> 20} MiB: {remedy}")
        # Read, not mapped: it may be overwritten in place while its weights are in use.
        content = path.read_bytes()
        stored = load(content)
        about = _metadata(content)
        if about.get("format") != FORMAT:
            raise ProbeRefused(f"{path} is no length probe of this version: {remedy}")
        if about.get("fingerprint") != fingerprint:
            raise ProbeRefused(f"{path} was trained on another model than the one beside it: {remedy}")
        tensors = {name: stored[name].float().to(device) for name in _TENSORS}
        layers = tuple(int(layer) for layer in json.loads(about["layers"]))
        samples = int(about["samples"])
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise ProbeRefused(f"{path} cannot be read as a length probe ({error}): {remedy}") from None
    size = tensors["hidden"].shape[0]
    expected = {
        "mean": (reader.width,),
        "deviation": (reader.width,),
        "hidden": (size, reader.width),
        "hidden_bias": (size,),
        "output": (RANGES, size),
        "output_bias": (RANGES,),
    }
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise ProbeRefused(
                f"{path}: {name} has the shape {tuple(tensors[name].shape)}, this model needs {shape}:"
                f" {remedy}"
            )
        if not bool(tensors[name].isfinite().all()):
            raise ProbeRefused(f"{path}: {name} holds numbers that are not finite: {remedy}")
    if layers != tuple(reader.layers):
        raise ProbeRefused(f"{path} reads layers {layers}, this model's are {tuple(reader.layers)}: {remedy}")
    return ProbeWeights(**tensors, fingerprint=fingerprint, layers=layers, samples=samples)


@dataclass(slots=True)
class LaunchedReadings:
    """Readings of a launched step: those of the sequences at `places` among the ones that choose a token."""

    places: list[int]
    logits: torch.Tensor | None
    states: torch.Tensor | None


class LengthReadings:
    """Reads the states that are due after a step, and attaches predictions to the chosen tokens."""

    def __init__(self, reader: StateReader, weights: ProbeWeights | None, *, keep_states: bool) -> None:
        """Without `weights` nothing is predicted; `keep_states` attaches the states, as training data."""
        self.weights = weights
        self.has_failed = False
        """States cannot be read: nothing is, from then on."""
        self._reader = reader
        self._keep_states = keep_states
        self._steps = 0

    def launch(self, work: StepWork, step: StagedStep, rows: DeviceRows) -> LaunchedReadings | None:
        """Reads the states that are due, on the device. An error disables the readings and fails no step."""
        self._steps += 1
        if self.weights is None and not self._keep_states:
            return None
        reads_all = self._steps % READ_EVERY == 0
        choosing = [index for index, samples in enumerate(work.samples) if samples]
        due: dict[int, RowStart] = {}
        for place, index in enumerate(choosing):
            start = rows.starts[work.rows[index]]
            if reads_all or work.positions[index] + work.num_tokens[index] == start.num_prompt_tokens:
                due[place] = start
        if not due:
            return None
        try:
            state = self._reader.read(due, step, rows)
            logits = None if self.weights is None else on_host(self.weights.logits(state))
            return LaunchedReadings(list(due), logits, on_host(state.half()) if self._keep_states else None)
        except Exception:
            self._fail()
            return None

    def note(self, readings: LaunchedReadings, chosen: Sequence[Sampled | None]) -> None:
        """Attaches a step's readings, once it is over, to its `chosen` tokens."""
        try:
            logits = None if readings.logits is None else readings.logits.tolist()
            states = None if readings.states is None else readings.states.numpy()
            for row, place in enumerate(readings.places):
                choice = chosen[place]
                assert choice is not None
                if logits is not None:
                    choice.remaining_logits = logits[row]
                if states is not None:
                    choice.state = states[row].tobytes()
        except Exception:
            self._fail()

    def _fail(self) -> None:
        log.exception("the states could not be read: from now on lengths are foreseen without them")
        self.has_failed, self.weights, self._keep_states = True, None, False
