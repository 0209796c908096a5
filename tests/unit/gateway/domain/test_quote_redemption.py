"""Misses of quoted times, and their credits."""

from __future__ import annotations

import pytest

from engine.entry import QueueEntry
from gateway.domain.estimate import Estimate, Times
from gateway.domain.quote_redemption import Redemption, redemption_of
from gateway.estimates.displacement import Displacement, displacement
from gateway.flow.types import InFlight, Ticket
from tenants.outcomes import RequestOutcome

QUOTED = Estimate(
    (0.5, 1.0), (0.6, 2.0), (0.02, 0.04), (2.0, 5.0), (50, 90), (1, 2), 9, {}, "replay", 0, False
)


def came(
    ttft_s: float = 1.0,
    e2e_s: float = 4.0,
    *,
    outcome: RequestOutcome = RequestOutcome.COMPLETED,
    output_tokens: int = 60,
    limited_s: float = 0.0,
    rested_s: float = 0.0,
    share: float = 0.5,
    own_s: tuple[float, float] = (0.0, 0.0),
    is_binding: bool = True,
) -> Redemption:
    return redemption_of(
        "offer", QUOTED, Times(10.0, 10.5, 10.0 + ttft_s, 10.0 + e2e_s, 10.0 + e2e_s), outcome,
        output_tokens=output_tokens, cost_nanousd=1_001, limited_s=limited_s, rested_s=rested_s,
        credit_share=share, own_s=own_s, is_binding=is_binding,
    )  # fmt: skip


def test_a_kept_quote_credits_nothing() -> None:
    kept = came(2.0, 5.0)
    assert (kept.is_kept, kept.missed, kept.credit_nanousd) == (True, (), 0)


@pytest.mark.parametrize(
    ("fields", "missed"),
    [
        ({"ttft_s": 2.1}, ("ttft",)),
        ({"e2e_s": 5.1}, ("e2e",)),
        ({"ttft_s": 3.0, "e2e_s": 9.0}, ("ttft", "e2e")),
        ({"outcome": RequestOutcome.ENGINE_LOST}, ("engine_lost",)),
    ],
)
def test_a_miss_of_ours_credits_its_share_rounded_up(
    fields: dict[str, object], missed: tuple[str, ...]
) -> None:
    broken = came(**fields)  # type: ignore[arg-type]
    assert (broken.is_kept, broken.missed, broken.credit_nanousd) == (False, missed, 501)
    assert came(**fields, share=1.0).credit_nanousd == 1_001  # type: ignore[arg-type]
    assert came(**fields, share=0.0).credit_nanousd == 0  # type: ignore[arg-type]


def test_what_the_client_did_is_not_ours() -> None:
    assert came(e2e_s=9.0, output_tokens=91).is_kept, "a longer answer takes longer"
    assert came(ttft_s=3.0, e2e_s=6.0, limited_s=1.5).is_kept, "its own limit held it back"
    assert came(ttft_s=3.0, limited_s=0.5).missed == ("ttft",)
    assert came(e2e_s=9.0, rested_s=4.5).is_kept, "its client did not read, or its rate was used up"
    assert came(e2e_s=9.0, rested_s=3.5).missed == ("e2e",)
    assert came(ttft_s=3.0, rested_s=4.5).missed == ("ttft",), "it rests after its first token only"
    for outcome in (RequestOutcome.CANCELLED, RequestOutcome.DISCONNECTED, RequestOutcome.BUDGET):
        gone = came(ttft_s=99.0, outcome=outcome)
        assert (gone.is_kept, gone.credit_nanousd) == (None, 0)


def test_time_that_went_to_its_tenants_later_work_is_not_ours() -> None:
    assert came(ttft_s=3.0, own_s=(1.5, 1.5)).is_kept
    assert came(ttft_s=3.0, own_s=(0.5, 0.5)).missed == ("ttft",)
    assert came(e2e_s=9.0, own_s=(0.0, 4.5)).is_kept
    assert came(e2e_s=9.0, own_s=(0.0, 3.5)).missed == ("e2e",)
    lost = came(own_s=(9.0, 9.0), outcome=RequestOutcome.ENGINE_LOST)
    assert (lost.missed, lost.credit_nanousd) == (("engine_lost",), 501), "a fault of ours is one"


def test_a_quote_that_does_not_bind_is_judged_and_not_credited() -> None:
    for changes in ({"ttft_s": 2.1}, {"outcome": RequestOutcome.ENGINE_LOST}):
        missed = came(**changes, is_binding=False)  # type: ignore[arg-type]
        assert (missed.is_kept, missed.credit_nanousd, missed.is_binding) == (False, 0, False)
    assert came(is_binding=False).is_kept


def ticket(name: str, tenant: str, tier: int) -> Ticket:
    return Ticket(QueueEntry(name, tenant, 0.0, 100, 50, tier), 1, 150)


def flight(name: str, tenant: str, tier: int) -> InFlight:
    return InFlight(ticket(name, tenant, tier), "a", 0.0, 200, live_sequences=1, kv_tokens=150, tier=tier)


def test_a_jump_passes_lower_tiers_of_others_and_pauses_where_no_place_is_free() -> None:
    waiting = [ticket("a", "me", 2), ticket("b", "x", 2), ticket("c", "x", 1), ticket("d", "x", 0)]
    running = [flight("e", "x", 2), flight("f", "x", 1), flight("g", "x", 0)]

    def of(rank: int, places: int, sequences: int = 1) -> Displacement:
        return displacement("me", rank, sequences, 40 * sequences, waiting, running, places)

    assert of(0, 3) == Displacement(400, 40, {"x": 400})
    assert of(1, 3) == Displacement(200, 40, {"x": 200})
    assert of(2, 3) == Displacement(0, 0)
    assert of(0, 4) == Displacement(400, 0, {"x": 400}), "a place is free"
    assert of(0, 3, sequences=3) == Displacement(400, 80, {"x": 400}), "only two run in lower tiers"
