"""Where the parts of a chart lie, and what a page keeps of a report."""

from __future__ import annotations

import json
import math
from xml.etree import ElementTree

import pytest

from ops.pages.charts import WIDTH, Bar, BarChart, ChartLine, LineChart, drawn_bars, drawn_lines
from ops.pages.page import ReportPage, html, svg
from ops.reporting import Check, Report, recorded, table

SVG = "{http://www.w3.org/2000/svg}"


def test_a_line_begins_and_ends_at_the_edges_of_its_chart() -> None:
    chart = LineChart("t", "x", "y", [ChartLine("a", [(0.0, 0.0), (5.0, 10.0), (10.0, 20.0)])])
    drawn = drawn_lines(chart)
    points = [tuple(map(float, point.split(","))) for point in drawn.lines[0].points.split()]
    assert points[0] == (drawn.left, drawn.bottom)
    assert points[-1] == (drawn.right, drawn.top)
    assert points[1] == ((drawn.left + drawn.right) / 2, (drawn.top + drawn.bottom) / 2)
    assert [tick.words for tick in drawn.x_ticks] == ["0", "2", "4", "6", "8", "10"]


def test_a_logarithmic_axis_has_powers_of_ten_and_no_zero() -> None:
    points = [(0.0, 0.0), (0.01, 50.0), (1.0, 100.0), (math.inf, 100.0)]
    drawn = drawn_lines(LineChart("t", "s", "%", [ChartLine("a", points)], is_logarithmic=True, target=0.1))
    assert [tick.words for tick in drawn.x_ticks] == ["0.0001", "0.001", "0.01", "0.1", "1"]
    assert len(drawn.lines[0].points.split()) == 3, "what is not finite has no place"
    assert drawn.target_x == pytest.approx(drawn.x_ticks[3].at)


def test_a_logarithmic_axis_within_one_power_of_ten_has_round_numbers() -> None:
    points = [(0.0067, 0.0), (0.0082, 100.0)]
    drawn = drawn_lines(LineChart("t", "s", "%", [ChartLine("a", points)], is_logarithmic=True))
    assert [tick.words for tick in drawn.x_ticks] == ["0.007", "0.0075", "0.008"]
    assert all(drawn.left < tick.at < drawn.right for tick in drawn.x_ticks)


def test_names_of_bars_have_room_and_long_ones_are_cut() -> None:
    short, long = (
        drawn_bars(BarChart("t", [Bar(name, 1.0, "1")])) for name in ("a", "a tenant with a long name " * 4)
    )
    assert short.start < long.start < long.width / 2
    assert long.bars[0].name == f"{long.bars[0].bar.name[:59]}…"


@pytest.mark.parametrize("points", [[], [(1.0, 0.0)], [(math.nan, 1.0)], [(2.0, 5.0), (2.0, 6.0)]])
def test_charts_of_little_or_nothing_are_drawn(points: list[tuple[float, float]]) -> None:
    drawn = drawn_lines(LineChart("t", "x", "y", [ChartLine("a", points)]))
    assert "nan" not in drawn.lines[0].points
    assert len(drawn.y_ticks) >= 2


def test_bars_share_a_scale_and_show_their_spread() -> None:
    drawn = drawn_bars(BarChart("t", [Bar("a", 1.0, "1", 0, 0.5, 4.0), Bar("b", 2.0, "2", 9)], ideal=2.0))
    first, second = drawn.bars
    assert first.high is not None
    length = first.end - drawn.start
    assert second.end - drawn.start == pytest.approx(2 * length)
    assert first.high - drawn.start == pytest.approx(4 * length)
    assert drawn.ideal_x == pytest.approx(second.end)
    assert first.words_x > first.high, "words stand behind the spread"
    assert (first.colour, second.colour) == (1, 2)


def test_in_a_picture_lines_lie_in_twos_and_bars_below() -> None:
    line, bars = LineChart("t", "x", "y", [ChartLine("a", [(0.0, 1.0)])]), BarChart("b", [Bar("a", 1.0, "1")])
    picture = ElementTree.fromstring(svg([line, line, line, bars]))
    places = [(float(each.get("x", "")), float(each.get("y", ""))) for each in picture.findall(f"{SVG}svg")]
    assert [x for x, _ in places] == [0.0, WIDTH, 0.0, 0.0]
    downs = [y for _, y in places]
    assert downs[0] == downs[1] < downs[2] < downs[3]


def test_what_a_command_prints_becomes_parts_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("figures", [("name", "name"), ("value", "value", ".2f")], [{"name": "a", "value": 1.234}])
    report.checks.append(Check("value", 1.234, 1.0))

    def show() -> None:
        print("before")
        report.show()
        table("nothing", ("x",), [])

    parts = recorded(show)
    assert capsys.readouterr().out == ""
    assert parts[0] == "before"
    assert not isinstance(parts[1], str)
    assert (parts[1].title, parts[1].columns, parts[1].rows) == (
        "figures",
        ["name", "value"],
        [["a", "1.23"]],
    )
    assert isinstance(parts[2], str)
    assert "NOT ok" in parts[2]
    assert not isinstance(parts[3], str)
    assert parts[3].rows == []


def test_a_page_stands_alone_and_has_every_figure() -> None:
    exact = {"name": "</pre><script>alert(1)</script>", "value": 0.1 + 0.2}
    chart = BarChart("bars & more", [Bar("<b>", 1.0, "1")])
    text = html(ReportPage("a <title>", ["a paragraph"], [chart], exact=exact))
    assert "<script" not in text
    assert "src=" not in text
    assert "href=" not in text
    page = ElementTree.fromstring(text.removeprefix("<!doctype html>"))
    shown = page.find(".//pre[@id='exact']")
    assert shown is not None
    assert json.loads(shown.text or "") == exact
