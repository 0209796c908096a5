"""Current length forecasts of running sequences, and the gate that drops a poor probe.

When a sequence ends, the probe and the forecast that came with it are judged by what they said at its first
reading; a gate per tenant drops the probe where it does worse. Pure; bounded by the sequences that live. One
writer: the engine's core.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.forecast.length.gate import LayerGate
from engine.forecast.length.probe import prior_of, prior_quantiles, remaining_quantiles
from engine.forecast.length.scores import HIGH, QUANTILES, LayerScore, concordance
from engine.messages import LengthScore, ProbeReport

LAYERS = ("forecast", "probe")
"""By the numbers of the gate: what came with the request, and with the model's state."""
RANKED_EVERY = 64
"""Answers: to compare ranks takes a millisecond."""
_ALL = ""
"""The gate's group: all tenants of an engine, which serves one model."""


@dataclass(frozen=True, slots=True)
class Foreseen:
    """Median and 90th percentile of a whole output, in tokens."""

    median_tokens: int
    high_tokens: int


class ProbeGate:
    def __init__(self) -> None:
        self._state = "off"
        self._problem = ""
        self._trained_on = 0
        self._loaded = 0
        self._forget()

    def _forget(self) -> None:
        self._gate = LayerGate(len(LAYERS))
        self._said: dict[str, tuple[list[int], list[int]]] = {}
        """At a sequence's first reading: by the forecast, and by the probe."""
        self._scores = (LayerScore(), LayerScore())
        self._ranks: list[float | None] = [None, None]
        self._ranked_from = 2
        """Answers from which on the ranks are computed again."""

    def took_over(self, trained_on: int) -> None:
        """A probe that was trained on so many readings is read from now on: it has to show its worth."""
        self._state, self._problem, self._trained_on = "on", "", trained_on
        self._loaded += 1
        self._forget()

    def without_probe(self, state: str, problem: str = "") -> None:
        """No probe is read (any more): `state` is `collecting` or `off`; `problem`: what is wrong with the
        one that is there."""
        self._state, self._problem, self._trained_on = state, problem, 0

    def refused(self, problem: str) -> None:
        """A probe that should have taken over does not fit; the one in use, if any, stays."""
        self._problem = problem

    def read(
        self,
        sequence_id: str,
        tenant_id: str,
        *,
        forecast: tuple[int, int],
        generated: int,
        max_tokens: int,
        logits: Sequence[float],
    ) -> Foreseen | None:
        """A reading after `generated` tokens. `forecast`: the median and 90th percentile (0: not known) that
        the sequence was submitted with. None: the forecast is to be left as it is."""
        prior = prior_of(*forecast, generated)
        remaining = remaining_quantiles(logits, prior, QUANTILES)
        lengths = [min(generated + tokens, max_tokens) for tokens in remaining]
        if generated == 0:
            plain = [min(tokens, max_tokens) for tokens in prior_quantiles(prior, QUANTILES)]
            self._said[sequence_id] = (plain, lengths)
        if not self._gate.layer(tenant_id, _ALL):
            return None
        return Foreseen(lengths[0], lengths[HIGH])

    def ended(self, sequence_id: str, tenant_id: str, output_tokens: int | None) -> None:
        """It ended after `output_tokens`, by itself or at its maximum; None: it was cut off."""
        said = self._said.pop(sequence_id, None)
        if said is None or output_tokens is None:
            return
        losses = [
            score.observe(lengths, output_tokens) for score, lengths in zip(self._scores, said, strict=True)
        ]
        self._gate.observe(tenant_id, _ALL, losses)

    def describe(self) -> ProbeReport:
        """The state of the probe and what it is worth. Cheap: fit for every snapshot."""
        answers = self._scores[0].samples
        if answers >= self._ranked_from:
            self._ranked_from = answers + RANKED_EVERY
            self._ranks = [concordance(score.pairs) for score in self._scores]
        return ProbeReport(
            self._state,
            self._problem,
            self._trained_on,
            self._loaded,
            self._state == "on" and self._gate.layer(_ALL, _ALL) > 0,
            answers,
            *(_told(score, rank) for score, rank in zip(self._scores, self._ranks, strict=True)),
        )


def _told(score: LayerScore, rank_accuracy: float | None) -> LengthScore | None:
    count = score.samples
    if not count:
        return None
    return LengthScore(
        score.pinball_sum_tokens / count,
        score.error_sum_tokens / count,
        score.covered[HIGH] / count,
        rank_accuracy,
    )
