"""A running server acts by a learned table: knobs follow the load, and hybrid is in force wherever it says
nothing. A table that cannot be used is refused, or said, each with its own line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from gateway.flow.learned.actions import HYBRID
from gateway.flow.learned.macro_state import SeenRange
from tests.support.commands import answer_of, fairgate
from tests.support.console import Browser
from tests.support.learned_tables import STRICT_SLOTS, learned_table
from tests.support.server_process import MODEL, Server, server_process, until
from tests.support.warm_command import fairgate as warm_fairgate

MOST_QUEUED_PER_PLACE = 3.0


@pytest.fixture(scope="module")
def learning(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[Server]:
    """Few places, and steps that take their time. The table of its settings is missing."""
    data_dir = tmp_path_factory.mktemp("learning")
    arguments = ["--policy", "learned", "--policy-learned-table", f"{data_dir}/missing.json"]
    sizes = ["--engine-max-sequences", "2", "--engine-max-tokens-per-s", "20"]
    with server_process(data_dir, chat_model, *arguments, *sizes) as running:
        yield running


def learned(server: Server) -> dict[str, Any]:
    """What the status says of the policy at work."""
    shown: dict[str, Any] = server.status()["models"]["pools"][MODEL]["learned"]
    return shown


def in_force(server: Server) -> dict[str, float]:
    """Where the knobs really stand."""
    shown: dict[str, float] = server.status()["models"]["pools"][MODEL]["control"]["in_force"]
    return shown


def test_a_missing_table_at_the_start_leaves_hybrid_in_force_and_is_said_once(learning: Server) -> None:
    missing = f"{learning.data_dir}/missing.json cannot be read: No such file or directory"
    assert missing in learned(learning)["problem"]
    assert learning.log().count(missing) == 1
    assert "the actions of hybrid are in force" in learning.log()
    told = fairgate(learning, "policy", "show").stdout
    assert f"{MODEL}: {missing}; see `fairgate policy learn`; the actions of hybrid are in force" in told
    key = learning.tenant("meanwhile")
    with learning.http(key) as client:
        answer = client.post("/v1/completions", json={"model": MODEL, "prompt": "as ever", "max_tokens": 1})
    assert answer.status_code == 200, "it serves all the same"


async def test_the_console_says_what_is_in_force(learning: Server) -> None:
    link = learning.admin("POST", "/people", {"name": "reader", "role": "auditor"})["link"]
    async with Browser(learning.url) as browser:
        assert (await browser.redeem(link.partition("token=")[2])).status_code == 303
        page = (await browser.get("/console/policy")).text
    assert f"<dt>Learned, {MODEL}</dt>" in page
    assert "missing.json cannot be read: No such file or directory" in page


def test_learned_table(learning: Server, tmp_path: Path) -> None:
    """Knobs follow the load, and are hybrid's outside of what the table was fitted on."""
    path = tmp_path / "table.json"
    path.write_bytes(learned_table(fitted=SeenRange(MOST_QUEUED_PER_PLACE, 1.0, 100.0)).encode())
    key = learning.tenant("busy")
    body = {"model": MODEL, "prompt": "and then", "max_tokens": 400, "stream": True, "ignore_eos": True}
    with ExitStack() as streams, learning.http(key, timeout_s=120.0) as client:

        def ask(requests: int) -> None:
            for _ in range(requests):
                answer = streams.enter_context(
                    client.stream("POST", "/v1/completions", json=body, headers={"x-fairgate-progress": "1"})
                )
                assert answer.status_code == 200

        ask(7)
        done = fairgate(learning, "policy", "set", "learned", "--option", f"learned_table={path}", "--json")
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["learned"][MODEL]["problem"] == ""
        until(lambda: (learned(learning)["macro_state"] or 0) >= 4)
        assert learned(learning)["words"].startswith("a queue")
        stand = in_force(learning)
        assert {name: stand[name] for name in ("slots", "token_budget", "long_share", "ageing")} == {
            "slots": STRICT_SLOTS.slots,
            "token_budget": STRICT_SLOTS.token_budget,
            "long_share": STRICT_SLOTS.long_share,
            "ageing": STRICT_SLOTS.ageing,
        }
        state = learned(learning)["macro_state"]
        assert f'fairgate_macro_state{{model="{MODEL}"}} {state}.0' in _metrics(learning)
        assert f"macro-state {state} (a queue" in fairgate(learning, "policy", "show").stdout
        ask(8)
        until(lambda: learned(learning)["is_outside"])
        assert in_force(learning)["slots"] == HYBRID.slots
        told = fairgate(learning, "policy", "show").stdout
        assert "outside of what the table was fitted on; the actions of hybrid are in force" in told
        moves = learning.status()["models"]["pools"][MODEL]["control"]["moves"]
        reasons = [each["reason"] for each in moves if each["knob"] == "slots"]
        assert reasons[0].startswith("learned: a queue; ")
        assert "outside of what the table was fitted on (queued_per_place" in reasons[-1]
        assert f'fairgate_macro_state{{model="{MODEL}"}} -1.0' in _metrics(learning)
    shown = learned(learning)
    assert shown["lookups"] >= shown["switches"] + shown["times_outside"]
    assert fairgate(learning, "policy", "set", "hybrid").exit_code == 0
    assert learned(learning) is None
    until(lambda: in_force(learning)["long_share"] == 0.5)


def _metrics(server: Server) -> str:
    with server.http() as client:
        return client.get("/metrics").text


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bad ones."""
    folder = tmp_path_factory.mktemp("tables")
    good = learned_table().encode()
    (folder / "older.json").write_bytes(good.replace(b'"version": 1', b'"version": 7'))
    (folder / "other.json").write_bytes(learned_table(model="other-model").encode())
    (folder / "gpu.json").write_bytes(learned_table(machine="8b on h100").encode())
    (folder / "garbage.json").write_text("\0not a table")
    (folder / "beyond.json").write_bytes(good.replace(b'"slots": 0.5', b'"slots": 7.0'))
    return folder


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("", "make one with `fairgate policy learn` and name its file in the setting policy.learned_table"),
        ("none.json", "none.json cannot be read: No such file or directory; see `fairgate policy learn`"),
        (
            "older.json",
            "it is of version 7, and this program reads version 1; make one with",
        ),
        ("other.json", "the learned table is for the model 'other-model', and this is 'tiny': fit one"),
        ("gpu.json", "the learned table is for the machine '8b on h100', and 'tiny' runs on cpu: fit one"),
        ("garbage.json", "it is no table of a learned policy"),
        ("beyond.json", "Expected `float` <= 1.0 - at `$.entries[4].actions.slots`"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_before_anything_changes(
    server: Server, tables: Path, name: str, complaint: str
) -> None:
    before = answer_of(server, "policy", "show")
    option = ["--option", f"learned_table={tables / name}"] if name else []
    refused = fairgate(server, "policy", "set", "learned", *option)
    assert refused.exit_code == 1
    assert complaint in refused.output, refused.output
    after = answer_of(server, "policy", "show")
    assert (after["policy"], after["from"], after["learned"]) == (before["policy"], before["from"], {})
    assert after["engines"][0]["policy"] == before["policy"]


def test_a_server_does_not_start_with_the_policy_and_without_the_name_of_a_table(
    tmp_path: Path, chat_model: Path
) -> None:
    flags = ["--data-dir", str(tmp_path / "data"), "--model", str(chat_model), "--policy", "learned"]
    done = warm_fairgate("serve", "--port", "0", *flags)
    assert done.returncode == 1
    assert "make one with `fairgate policy learn`" in done.stderr
    assert "Traceback" not in done.stderr
