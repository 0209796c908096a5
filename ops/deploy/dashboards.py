"""Grafana dashboards as JSON, generated from the lists in `panels.py`.

Read by Grafana 10 and later, from files or by import. On a difference: `python -m ops.deploy.dashboards`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ops.deploy.panels import DASHBOARDS, Panel

FOLDER = Path(__file__).parent / "grafana"
SCHEMA_VERSION = 39
PANELS_IN_A_ROW, WIDTH, HEIGHT = 2, 24, 8
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
JOB = 'job=~"$job"'


def dashboard(name: str) -> dict[str, Any]:
    title, panels = DASHBOARDS[name]
    return {
        "uid": f"fairgate-{name}",
        "title": title,
        "tags": ["fairgate"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "time": {"from": "now-6h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": [_variable("datasource", "datasource", "prometheus"), _job()]},
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }


def as_text(name: str) -> str:
    return json.dumps(dashboard(name), indent=1) + "\n"


def expression(query: str) -> str:
    with_job = re.sub(r"<([^>]*)>", lambda found: f"{{{JOB}{',' * bool(found[1])}{found[1]}}}", query)
    return with_job.replace("[R]", "[$__rate_interval]")


def _variable(name: str, kind: str, query: str) -> dict[str, Any]:
    return {"name": name, "label": name, "type": kind, "query": query}


def _job() -> dict[str, Any]:
    variable = _variable("job", "query", "label_values(fairgate_build_info, job)")
    return variable | {
        "datasource": SOURCE,
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".+",
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    width = WIDTH // PANELS_IN_A_ROW
    row, column = divmod(number, PANELS_IN_A_ROW)
    targets = [
        {
            "refId": chr(ord("A") + index),
            "expr": expression(query),
            "legendFormat": legend,
            "datasource": SOURCE,
        }
        for index, (legend, query) in enumerate(panel.queries.items())
    ]
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": {"x": column * width, "y": row * HEIGHT, "w": width, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


if __name__ == "__main__":
    for file_name in DASHBOARDS:
        (FOLDER / f"{file_name}.json").write_text(as_text(file_name))
