"""The committed dashboards are those of the generator, and Grafana can tell their parts apart."""

from __future__ import annotations

import json
import re
from itertools import combinations
from typing import Any

import pytest

from ops.deploy.dashboards import FOLDER, as_text, expression
from ops.deploy.panels import DASHBOARDS
from tests.support.prometheus import OF_PROMETHEUS, selected


def loaded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_committed_dashboard_is_up_to_date(name: str) -> None:
    """On a difference: `python -m ops.deploy.dashboards`."""
    assert (FOLDER / f"{name}.json").read_text() == as_text(name)


def test_there_are_no_others() -> None:
    assert {each.stem for each in FOLDER.glob("*.json")} == set(DASHBOARDS)
    assert len({loaded(name)["uid"] for name in DASHBOARDS}) == len(DASHBOARDS)


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_lie_side_by_side(name: str) -> None:
    panels = loaded(name)["panels"]
    assert len({each["id"] for each in panels}) == len(panels)
    for one, other in combinations([each["gridPos"] for each in panels], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert beside or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_query_goes_by_the_job_and_has_the_labels_of_its_legend(name: str) -> None:
    for panel in loaded(name)["panels"]:
        for target in panel["targets"]:
            found = selected(target["expr"].replace("$__rate_interval", "5m"))
            assert all("job" in labels for _, labels, _ in found), panel["title"]
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"])) - OF_PROMETHEUS
            if "by (" in target["expr"]:
                assert all(shown <= labels for _, labels, _ in found), panel["title"]


def test_matchers_stand_beside_the_job() -> None:
    assert expression("sum(a<>)") == 'sum(a{job=~"$job"})'
    assert expression('rate(a<b="1">[R])') == 'rate(a{job=~"$job",b="1"}[$__rate_interval])'
