"""A simulation as one HTML file that fetches nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment

from ops.simulate.figures.curves import Curves
from ops.simulate.report.plot import NoMatplotlib, svg
from ops.simulate.report.show import heading, notes, published, sections
from ops.simulate.run import Report
from ops.simulate.slo import SloLimits

TENANTS = 40
TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ heading }}</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; color: #222; max-width: 76rem; margin: 2rem auto; padding: 0
1rem } h1 { font-size: 1.25rem } h2 { font-size: 1rem; margin-top: 2rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #e4e4e4; white-space: nowrap }
th:first-child, td:first-child { text-align: left } td.words { white-space: normal; text-align: left }
.wide { overflow-x: auto } svg { max-width: 100%; height: auto } p.note { color: #555 }
</style>
</head>
<body>
{% if warning %}<p><strong>{{ warning }}</strong></p>{% endif %}
<h1>{{ heading }}</h1>
{% if picture %}<div class="wide">{{ picture | safe }}</div>{% else %}
<p class="note">Without a picture: {{ missing }}</p>{% endif %}
{% for title, columns, rows in sections %}
<h2>{{ title }}</h2>
<div class="wide"><table>
<tr>{% for column in columns %}<th>{{ column }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
{% endfor %}
{% if published %}
<h2>what was published of such a scenario, and ours</h2>
<div class="wide"><table>
<tr><th>policy</th><th>published</th><th>ours</th></tr>
{% for row in published %}<tr>{% for cell in row %}<td class="words">{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
{% endif %}
{% for note in notes %}<p class="note">{{ note }}</p>{% endfor %}
</body>
</html>
"""


def page(report: Report, found: Sequence[Curves], slo: SloLimits) -> str:
    """The page; without matplotlib its tables alone."""
    missing = ""
    try:
        picture = svg("", found, slo)
    except NoMatplotlib as error:
        picture, missing = "", str(error)
    template = Environment(autoescape=True).from_string(TEMPLATE)
    return template.render(
        heading=heading(report),
        warning=report.get("warning"),
        sections=sections(report, TENANTS),
        published=published(report),
        notes=notes(report),
        picture=picture,
        missing=missing,
    )


def write_page(path: Path, report: Report, found: Sequence[Curves], slo: SloLimits) -> None:
    """Writes the page. Raises OSError."""
    path.write_text(page(report, found, slo), encoding="utf-8")
