"""Plots the reliability curves of a calibration report as SVG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ops.bench.estimates.calibration import HELD_TO

COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#8c4a9e", "#c77d0a", "#3c6e71", "#7a1f3d", "#4f5d75", "#222222")


def write_plot(report: dict[str, Any], path: Path) -> None:
    """The reliability plot as SVG: nominal share across, actual share up; the diagonal is what was told."""
    size, pad = 360, 48
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size + 2 * pad + 220} {size + 2 * pad}"'
        ' font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]

    def at(nominal: float, actual: float) -> str:
        return f"{pad + nominal * size:.1f},{pad + (1 - actual) * size:.1f}"

    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = pad + tick * size, pad + (1 - tick) * size
        lines.append(f'<path d="M{at(tick, 0)} L{at(tick, 1)} M{at(0, tick)} L{at(1, tick)}" stroke="#ddd"/>')
        lines.append(f'<text x="{x}" y="{pad + size + 18}" text-anchor="middle">{tick:.0%}</text>')
        lines.append(f'<text x="{pad - 6}" y="{y + 4}" text-anchor="end">{tick:.0%}</text>')
    lines.append(f'<path d="M{at(0, 0)} L{at(1, 1)}" stroke="#888" stroke-dasharray="4 3"/>')
    number = 0
    for each in report["scenarios"]:
        for group, figures in each["groups"].items():
            for what in HELD_TO:
                colour = COLOURS[number % len(COLOURS)]
                points = " ".join(at(nominal, actual) for nominal, actual in figures[what]["curve"])
                lines.append(
                    f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
                )
                y = pad + 16 * number
                lines.append(f'<text x="{size + pad + 16}" y="{y + 4}" fill="{colour}">')
                lines.append(f"{each['name']}, {group}, {what}</text>")
                number += 1
    middle = pad + size / 2
    lines.append(f'<text x="{middle}" y="{pad + size + 38}" text-anchor="middle">told quantile</text>')
    lines.append(f'<text x="{pad}" y="{pad - 16}">share of requests at or under it</text>')
    path.write_text("\n".join([*lines, "</svg>"]) + "\n", encoding="utf-8")
