"""What do all requests of a line that go at once have in common?

The short way to an estimate where nobody waits, as is so for most requests of most days: what the surface,
the calibration and the price book say of such a line is looked up once, until one of the three changes. The
plain way, for everybody else, is `Surface.read`, `Calibration.correct` and `Estimates._told`; both say the
same.
"""

from __future__ import annotations

from math import hypot

import msgspec

from engine.forecast.calibration import AT_ONCE, Bucket, Calibration, Correction, corrected
from engine.forecast.wait.forecast import Figures, Seconds
from engine.forecast.wait.surface import NOTHING_AHEAD, Point, Surface
from engine.messages import TIER_RANKS
from gateway.account.estimate import Estimate
from gateway.account.promise import Promise
from gateway.surfaces import Size
from tenants.pricing.pricing import Entry, PriceBook, check_counts
from tenants.types import Tier


class LineAtOnce(msgspec.Struct, frozen=True):
    """Requests of one tenant in one tier for one model, as long as they go at once."""

    surface: Surface
    point: Point
    """What every probe of the line saw, whatever its size."""
    free_places: int
    bucket: Bucket
    raw_tpot_s: Seconds
    wait_s: Seconds
    """As it is told, and so is `tpot_s`."""
    tpot_s: Seconds
    of_ttft: Correction
    of_e2e: Correction
    price: Entry
    basis: str

    def estimate(
        self, size: Size, output_tokens: tuple[int, int], more_prompt_tokens: int, samples: int
    ) -> Estimate:
        """As `Estimates.estimate` has it, for a request that finds a place free."""
        surface, point, price = self.surface, self.point, self.price.cost_nanousd
        p50, p90 = output_tokens
        count, tokens = size.sequences, size.input_tokens
        prompts_ahead = point.prompt_tokens_ahead + more_prompt_tokens
        ttft_s = surface.start_up_s(point, tokens * size.choices, count, prompts_ahead) + point.place_s
        tpot_s, off_alone = point.tpot_s, surface.off_alone
        ttft_off_s = ttft_s * off_alone
        rest_s = tpot_s * (p50 - 1)
        e2e_s = ttft_s + rest_s
        e2e_off_s = hypot(ttft_off_s, tpot_s * (p90 - p50), rest_s * off_alone)
        raw = Figures(AT_ONCE, (ttft_s, ttft_s + ttft_off_s), self.raw_tpot_s, (e2e_s, e2e_s + e2e_off_s))
        told_ttft_s = corrected(raw.ttft_s, self.of_ttft, self.wait_s)
        most = size.max_tokens * count
        check_counts(tokens, 0, most)
        total = (p50 * count, p90 * count)
        return Estimate(
            wait_s=self.wait_s,
            ttft_s=told_ttft_s,
            tpot_s=self.tpot_s,
            e2e_s=corrected(raw.e2e_s, self.of_e2e, told_ttft_s),
            output_tokens=total,
            cost_nanousd=(price(tokens, 0, total[0]), price(tokens, 0, total[1])),
            max_cost_nanousd=price(tokens, 0, most),
            tokens_ahead=NOTHING_AHEAD,
            basis=self.basis,
            samples=samples,
            saturated=not point.is_reached,
            promise=Promise(self.bucket, raw),
        )


class AtOnce:
    """The lines of one surface. Use from one event loop."""

    def __init__(self, note: str) -> None:
        """`note` is said with every forecast's basis."""
        self._note = note
        self._surface: Surface | None = None
        self._prices: PriceBook | None = None
        self._calibration: Calibration | None = None
        self._changes = 0
        self._lines: dict[tuple[str, Tier, str, bool], LineAtOnce | None] = {}

    def line(
        self,
        surface: Surface,
        prices: PriceBook,
        calibration: Calibration,
        tenant_id: str,
        tier: Tier,
        model: str,
        is_exact: bool,
    ) -> LineAtOnce | None:
        """None: somebody waits there, or sizes differ in what they see. Raises `UnknownPrice`."""
        if (
            surface is not self._surface
            or prices is not self._prices
            or calibration is not self._calibration
            or calibration.changes != self._changes
        ):
            self._lines.clear()
            self._surface, self._prices = surface, prices
            self._calibration, self._changes = calibration, calibration.changes
        key = (tenant_id, tier, model, is_exact)
        if key not in self._lines:
            price = prices.entry(model, tier)
            self._lines[key] = self._look_up(surface, price, calibration, tenant_id, tier, is_exact)
        return self._lines[key]

    def _look_up(
        self,
        surface: Surface,
        price: Entry,
        calibration: Calibration,
        tenant_id: str,
        tier: Tier,
        is_exact: bool,
    ) -> LineAtOnce | None:
        rank = TIER_RANKS[tier]
        point = surface.point_of_all(tenant_id, rank)
        if point is None or point.wait_s > 0:
            return None
        bucket = Bucket("plain", is_exact, rank, 0)
        of_wait, of_ttft, of_tpot, of_e2e = calibration.corrections(bucket)
        tpot_s = (point.tpot_s, point.tpot_s * (1 + surface.off_alone))
        return LineAtOnce(
            surface=surface,
            point=point,
            free_places=surface.free_places.get(rank, 0),
            bucket=bucket,
            raw_tpot_s=tpot_s,
            wait_s=corrected(AT_ONCE, of_wait, AT_ONCE),
            tpot_s=corrected(tpot_s, of_tpot, AT_ONCE),
            of_ttft=of_ttft,
            of_e2e=of_e2e,
            price=price,
            basis=surface.basis + self._note,
        )
