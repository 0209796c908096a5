"""SVG plots that compare policies.

Four panels: the distributions of TTFT and TPOT with their targets, requests a second that met the SLO over
time beside those that arrived, and attainment by tenant. Needs matplotlib, which is an extra of its own.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ops.simulate.figures.curves import POINTS, Curves
from ops.simulate.slo import SloLimits

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666", "#000000")
"""Distinguishable with red-green colour blindness (Okabe and Ito, 2008)."""
STYLES = ("-", "--", ":", "-.")
DPI = 150


class NoMatplotlib(RuntimeError):
    """It is not installed; the message says how."""

    def __init__(self) -> None:
        super().__init__("plots need matplotlib: pip install 'fairgate[plots]'")


def save(path: Path, title: str, found: Sequence[Curves], slo: SloLimits) -> None:
    """Writes a picture, of the kind that the file's name ends with. Raises `NoMatplotlib`, ValueError for a
    kind that does not exist, OSError."""
    draw(title, found, slo).savefig(path, dpi=DPI)


def svg(title: str, found: Sequence[Curves], slo: SloLimits) -> str:
    """The picture as an element for a page. Raises `NoMatplotlib`."""
    written = io.StringIO()
    draw(title, found, slo).savefig(written, format="svg")
    text = written.getvalue()
    return text[text.index("<svg") :]


def require() -> None:
    """Raises `NoMatplotlib`: better before an hour of work than after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise NoMatplotlib from None


def draw(title: str, found: Sequence[Curves], slo: SloLimits) -> Figure:
    """The picture."""
    require()
    # No `pyplot`: it keeps state, and may want a screen.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    figure.suptitle(title, fontsize=11)
    panels: Any = figure.subplots(2, 2)
    _distribution(panels[0][0], "time to first token, s", [each.ttft_s for each in found], found, slo.ttft_s)
    _distribution(
        panels[0][1], "time per output token, s", [each.tpot_s for each in found], found, slo.tpot_s
    )
    _over_time(panels[1][0], found)
    _by_tenant(panels[1][1], found)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)), frameon=False)
    return figure


def _look(number: int) -> dict[str, str]:
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": STYLES[number // len(COLOURS) % len(STYLES)],
    }


def _distribution(
    axes: Any, label: str, values: Sequence[list[float]], found: Sequence[Curves], target_s: float
) -> None:
    for number, (each, quantiles) in enumerate(zip(found, values, strict=True)):
        shares = [place / POINTS * 100 for place in range(len(quantiles))]
        # A logarithmic axis has no zero.
        axes.plot([max(value, 1e-4) for value in quantiles], shares, label=each.policy, **_look(number))
    if 0 < target_s < float("inf"):
        axes.axvline(target_s, color="#999999", linewidth=1)
        axes.annotate(
            "target", (target_s, 2), fontsize=8, color="#666666", xytext=(3, 0), textcoords="offset points"
        )
    axes.set(xscale="log", xlabel=label, ylabel="requests served within, %", ylim=(0, 100))
    _tidy(axes)


def _over_time(axes: Any, found: Sequence[Curves]) -> None:
    if found:
        longest = max(found, key=lambda each: each.span_s)
        axes.fill_between(_middles(longest), longest.arrived_per_s, color="#dddddd", linewidth=0, step="mid")
        axes.annotate("arrived", (0.01, 0.94), xycoords="axes fraction", fontsize=8, color="#888888")
    for number, each in enumerate(found):
        axes.plot(_middles(each), each.met_per_s, linewidth=1.2, **_look(number))
    axes.set(xlabel="time, s", ylabel="requests/s that met the SLO", ylim=(0, None), xlim=(0, None))
    _tidy(axes)


def _middles(each: Curves) -> list[float]:
    width_s = each.span_s / len(each.met_per_s)
    return [(number + 0.5) * width_s for number in range(len(each.met_per_s))]


def _by_tenant(axes: Any, found: Sequence[Curves]) -> None:
    tenants = list(found[0].attainment) if found else []
    width = 0.8 / max(1, len(found))
    for number, each in enumerate(found):
        places = [place + (number - (len(found) - 1) / 2) * width for place in range(len(tenants))]
        shares = [100 * each.attainment.get(tenant, 0.0) for tenant in tenants]
        axes.bar(places, shares, width, color=COLOURS[number % len(COLOURS)])
    axes.set_xticks(range(len(tenants)), tenants, rotation=30, ha="right", fontsize=8)
    axes.set(ylabel="requests that met the SLO, %", ylim=(0, 100), xlabel="tenants with the most requests")
    _tidy(axes)


def _tidy(axes: Any) -> None:
    axes.grid(color="#eeeeee", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
