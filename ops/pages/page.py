"""A report as one HTML file: no script, nothing fetched, light and dark, opened from disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from gateway.console import assets, formats
from ops.pages.charts import WIDTH, Chart, LineChart, drawn_bars, drawn_lines
from ops.reporting import Part

HERE = Path(__file__).parent
TITLE_HEIGHT = 28
PICTURE_WIDTH = 2 * WIDTH
SVG_NAMESPACE = "http://www.w3.org/2000/svg"


@dataclass
class ReportPage:
    """What a page shows, in order; charts come first."""

    title: str
    parts: list[Part] = field(default_factory=list)
    charts: Sequence[Chart] = ()
    warning: str = ""
    exact: Any = None
    """The report as `--json` gives it."""


def _environment() -> jinja2.Environment:
    console = Path(assets.__file__).parent / "templates"
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([HERE / "templates", console]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(formats.FILTERS)
    environment.globals |= {
        "drawn_lines": drawn_lines,
        "drawn_bars": drawn_bars,
        "svg_namespace": SVG_NAMESPACE,
    }
    return environment


def html(page: ReportPage) -> str:
    styles = (HERE / "report.css").read_text(encoding="utf-8") + assets.text("figures.css")
    exact = "" if page.exact is None else json.dumps(page.exact, indent=2, default=str)
    # Style sheets of ours: a browser reads no entities in them.
    return _environment().get_template("report.html").render(page=page, styles=Markup(styles), exact=exact)


def svg(charts: Sequence[Chart]) -> str:
    """Charts as a picture of its own, for documents: bars below each other, lines in twos; light and dark."""
    environment = _environment()
    macros: Any = environment.get_template("svg.html").make_module(environment.globals)
    parts, right, down, bottom = [], 0.0, 0.0, 0.0
    for chart in charts:
        drawn: Any
        if isinstance(chart, LineChart):
            drawn, title = drawn_lines(chart), f"{chart.title} ({chart.y_label})"
            element = macros.line_chart(drawn).strip()
        else:
            drawn, title = drawn_bars(chart), chart.title
            element = macros.bar_chart(drawn).strip()
        if right + drawn.width > PICTURE_WIDTH:
            right, down = 0.0, bottom
        top = down + TITLE_HEIGHT
        heading = Markup('<text class="title" x="{}" y="{}">{}</text>').format(right + 4, top - 8, title)
        place = Markup('<svg x="{}" y="{}" width="{}" height="{}" ').format(
            right, top, drawn.width, drawn.height
        )
        parts.append(heading + place + element.removeprefix("<svg "))
        right += drawn.width
        bottom = max(bottom, top + drawn.height)
    title_style = ".title { font: 600 14px system-ui, sans-serif; fill: var(--figure-text); }"
    return (
        f'<svg xmlns="{SVG_NAMESPACE}" viewBox="0 0 {PICTURE_WIDTH} {bottom}">'
        f"<style>{assets.text('figures.css')}{title_style}</style>{''.join(parts)}</svg>\n"
    )
