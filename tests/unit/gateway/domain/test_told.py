"""What a request was told, against what its timeline says that happened."""

from __future__ import annotations

import pytest

from gateway.domain.timeline import OUTCOMES, Event, TimelineKind, pack, unpack
from gateway.domain.told import kept_figures
from tenants.counts.calibration import CalibrationKey, KeptCount
from tenants.outcomes import RequestOutcome

HOUR_S = 7200
ENDED_US = (HOUR_S + 1800) * 1_000_000
TOLD = (1_000, 2_000, 9_000, 10, 3_000, 4_000, 20_000, 30)


def timeline(
    *,
    told: tuple[int, ...] = TOLD,
    binding: bool = False,
    outcome: RequestOutcome = RequestOutcome.COMPLETED,
    waited_us: int = 1_000,
    ttft_us: int | None = 4_000,
    moved: bool = False,
) -> list[Event]:
    events = [
        Event(TimelineKind.RECEIVED, 0, (5, 1, 1, 64)),
        Event(TimelineKind.QUOTED, 0, (*told, int(binding))),
        Event(TimelineKind.DISPATCHED, waited_us, (1, 0, 0)),
    ]
    if moved:
        events.append(Event(TimelineKind.MOVED, 0, (1, 2)))
    if ttft_us is not None:
        events.append(Event(TimelineKind.FIRST_TOKEN, ttft_us))
    events.append(Event(TimelineKind.ENDED, 20_001, (OUTCOMES.index(outcome),)))
    events.append(Event(TimelineKind.SETTLED, 20_001, (5, 11, 99)))
    return unpack(pack(events))


def kept(events: list[Event]) -> dict[str, KeptCount]:
    return {key.figure: each for key, each in kept_figures(events, "m", ENDED_US).items()}


def test_each_figure_is_compared_with_both_quantiles() -> None:
    assert kept(timeline()) == {
        "wait": KeptCount(1, 1, 1),
        "ttft": KeptCount(1, 0, 1),
        "e2e": KeptCount(1, 0, 0),
        "output": KeptCount(1, 0, 1),
    }


def test_they_are_counted_by_hour_model_tier_told_wait_and_kind() -> None:
    [*plain] = kept_figures(timeline(), "m", ENDED_US)
    assert plain[0] == CalibrationKey(HOUR_S, "m", "standard", "wait", 0, "plain")
    long = (100_000, *TOLD[1:])
    [*binding] = kept_figures(timeline(told=long, binding=True), "m", ENDED_US)
    assert binding[0] == CalibrationKey(HOUR_S, "m", "standard", "wait", 2, "binding")


def test_vectors_have_no_tokens_to_compare() -> None:
    assert set(kept(timeline(ttft_us=None))) == {"wait", "e2e"}


@pytest.mark.parametrize(
    "events",
    [
        timeline(outcome=RequestOutcome.CANCELLED),
        timeline(moved=True),
        timeline(told=TOLD[:3]),  # an older version's
        [each for each in timeline() if each.kind != TimelineKind.QUOTED],
        [],
    ],
)
def test_what_was_told_nothing_or_something_else_is_left_out(events: list[Event]) -> None:
    assert kept(events) == {}
