"""Sketches of end users and conversations: they learn, stay apart, are bounded, and are used where better."""

from __future__ import annotations

import json
import random

from engine.forecast.length.features import Features, features_of
from engine.forecast.length.groups import CARRIED, MOST_OF_ONE, GroupSketches
from engine.forecast.length.length import LengthForecast

MODEL = "m"


def asked(user: str = "", blocks: tuple[int, ...] = ()) -> Features:
    return features_of("go on", prompt_tokens=100, user=user, blocks=blocks)


def median(forecast: LengthForecast, features: Features, tenant: str = "t") -> int:
    return forecast.quantile(tenant, MODEL, 0.5, features=features)


def by_user(answers: int) -> LengthForecast:
    """Of two users alike in what they ask, one has short answers and one long ones."""
    forecast = LengthForecast()
    rng = random.Random(1)
    for _ in range(answers):
        user, length = rng.choice((("terse", 10), ("wordy", 400)))
        forecast.observe("t", MODEL, round(length * rng.lognormvariate(0, 0.1)), asked(user))
    return forecast


def test_an_end_users_answers_are_foreseen_by_that_users_own() -> None:
    forecast = by_user(200)
    assert forecast.layer("t", MODEL) == "user"
    assert 8 <= median(forecast, asked("terse")) <= 13
    assert 320 <= median(forecast, asked("wordy")) <= 480
    # Of one that it has not seen, and of a request without one, the next best layer says what it can.
    others = {median(forecast, asked(name)) for name in ("", "new")}
    assert len(others) == 1
    report = forecast.report()[MODEL]
    assert report["layers"]["user"]["pinball_tokens"] < report["layers"]["sketches"]["pinball_tokens"] / 4
    assert report["layers"]["conversation"]["samples"] == 0


def test_the_same_name_at_another_tenant_is_another_user() -> None:
    forecast = by_user(200)
    assert forecast.users.find("other", MODEL, (asked("terse").user,)) is None
    assert forecast.users.find("t", "other model", (asked("terse").user,)) is None
    before = forecast.quantile("other", MODEL, 0.5)
    assert median(forecast, asked("terse"), "other") == median(forecast, asked("new"), "other")
    assert forecast.quantile("other", MODEL, 0.5) == before


def test_a_conversation_goes_on_as_it_went_however_it_began() -> None:
    """All begin with the same two blocks; each turn adds one."""
    forecast = LengthForecast()
    rng = random.Random(2)
    conversations = [((1, 2, 10 * number), rng.choice((10, 400))) for number in range(1, 80)]
    for turn in range(6):
        for blocks, length in conversations:
            chain = (*blocks, *(blocks[-1] + after for after in range(1, turn + 1)))
            forecast.observe("t", MODEL, round(length * rng.lognormvariate(0, 0.1)), asked(blocks=chain))
    assert forecast.layer("t", MODEL) == "conversation"
    for blocks, length in conversations[:20]:
        chain = (*blocks, *(blocks[-1] + after for after in range(1, 8)))
        assert length / 1.5 <= median(forecast, asked(blocks=chain)) <= length * 1.5


def test_where_groups_say_nothing_the_gate_drops_them() -> None:
    forecast = LengthForecast()
    rng = random.Random(3)
    for number in range(600):
        length = max(1, round(100 * rng.lognormvariate(0, 0.7)))
        forecast.observe("t", MODEL, length, asked(f"user {number % 150}", (number % 90, number)))
    report = forecast.report()[MODEL]
    assert report["layers"]["user"]["samples"] > 400
    chosen = report["layers"][forecast.layer("t", MODEL)]["pinball_tokens"]
    assert chosen <= 1.02 * min(
        each["pinball_tokens"] for each in report["layers"].values() if each["samples"]
    )


def test_groups_are_bounded_and_one_tenant_cannot_push_the_others_out() -> None:
    groups = GroupSketches(max_groups=64)
    for number in range(40):
        groups.observe(f"t{number}", MODEL, 1, 50)
    for number in range(1000):
        groups.observe("hostile", MODEL, number, 5)
    assert len(groups) == 64
    kept = [number for number in range(40) if groups.find(f"t{number}", MODEL, (1,)) is not None]
    assert len(kept) == 40
    assert groups.find("hostile", MODEL, (0,)) is None
    assert groups.find("hostile", MODEL, (999,)) is not None
    # Without one that floods, those seen longest ago make room.
    for number in range(40, 120):
        groups.observe(f"t{number}", MODEL, 1, 50)
    assert len(groups) == 64
    assert groups.find("t0", MODEL, (1,)) is None
    assert groups.find("t119", MODEL, (1,)) is not None
    assert 64 // MOST_OF_ONE < 24


def test_what_a_beginning_taught_counts_little_beside_a_conversations_own_answers() -> None:
    groups = GroupSketches()
    for _ in range(500):
        groups.observe("t", MODEL, 1, 50)
    begun = groups.find("t", MODEL, (3, 1))
    assert begun is not None
    groups.observe("t", MODEL, 3, 9, begun)
    own = groups.find("t", MODEL, (3, 1))
    assert own is not None
    assert own is not begun
    assert abs(own.total - (CARRIED + 1)) < 0.01


def test_neither_names_nor_groups_are_kept_on_disk() -> None:
    forecast = by_user(50)
    kept = json.dumps(forecast.to_dict())
    assert "terse" not in kept
    assert str(asked("terse").user) not in kept
    assert len(LengthForecast.from_dict(json.loads(kept)).users) == 0
