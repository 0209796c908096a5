"""A stored policy is in force in every gateway of a database, and goes before the settings."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.scheduling.policy import UnknownPolicy, options_of
from gateway.cluster.active_policy import ActivePolicy
from gateway.config import GatewayConfig
from gateway.flow.knobs import QueueSettings
from gateway.flow.window import WindowRule
from gateway.pools.learned_actions import LearnedActions
from gateway.upstream.base import UpstreamLost
from tenants.admin.admin import Admin
from tenants.admin.audit import Actor
from tenants.admin.platform.policy import StoredPolicy
from tenants.admin.transaction import Transactions
from tenants.directory.directory import Directory
from tenants.errors import Invalid
from tenants.storage.database import Database
from tests.support.audited import audited
from tests.support.learned_tables import learned_table

ACTOR = Actor("cli:tester")


@dataclass
class Engine:
    """The part of an engine that takes policies."""

    replica_id: str = "engine-0"
    is_up: bool = True
    refuses: str = ""
    told: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    async def set_policy(self, name: str, options: Mapping[str, Any]) -> None:
        if not self.is_up:
            raise UpstreamLost("it is away")
        if name == self.refuses:
            raise ValueError("not this one")
        self.told.append((name, dict(options)))


@dataclass
class Line:
    """The part of a pool that has an order."""

    order_name: str
    settings: QueueSettings = field(
        default_factory=lambda: QueueSettings(9, 9, (), WindowRule(lookahead_sequences=1, kv_window=0.5), 9)
    )

    def set_order(self, name: str) -> None:
        self.order_name = name

    def require_order(self, name: str) -> None:
        if name == "mlfq":
            raise UnknownPolicy("gateways that share a queue do not know mlfq")


class House:
    """One gateway's policy, with an engine and a queue."""

    def __init__(self, database: Database, pepper: bytes, policy: str = "fcfs", **options: Any) -> None:
        self.engine, self.other = Engine(), Engine("engine-1")
        self.line = Line(policy)
        self.directory = Directory(database, pepper)
        self.admin = Admin(Transactions(database, pepper))
        config = GatewayConfig(policy=policy, policy_options=options_of(options))
        deps = SimpleNamespace(
            config=config, admin=self.admin, directory=self.directory, upstreams=(self.engine, self.other)
        )
        spec = SimpleNamespace(name="tiny", upstreams=())
        self.learned = LearnedActions("tiny", cast(Any, self.line), [])
        control = SimpleNamespace(learned=self.learned)
        pool = SimpleNamespace(dispatcher=self.line, flow=self.line, spec=spec, control=control)
        self.policy = ActivePolicy(cast(Any, deps), cast(Any, {"tiny": pool}))

    async def start(self) -> None:
        await self.directory.refresh()
        await self.policy.start()

    async def look(self) -> None:
        """What the gateway does four times a second."""
        await self.directory.refresh()
        await self.policy.follow()


async def test_without_a_stored_policy_the_settings_count(database: Database, pepper: bytes) -> None:
    house = House(database, pepper, "vtc", slots=7)
    await house.start()
    assert house.policy.now == StoredPolicy("vtc", {"slots": 7})
    assert not house.policy.is_stored
    assert house.engine.told == [("vtc", {"slots": 7})]
    assert house.line.order_name == "vtc"


async def test_what_one_gateway_stores_the_others_take_over(database: Database, pepper: bytes) -> None:
    here, there = House(database, pepper), House(database, pepper, "sjf")
    await here.start()
    await there.start()
    wanted = StoredPolicy("drr", {"slots": 3, "target_step_s": 0.25, "evict": "latest-victim"})
    await here.policy.change(ACTOR, wanted)
    await there.look()
    for house in (here, there):
        assert house.policy.now == wanted
        assert house.engine.told[-1] == ("drr", wanted.options)
        assert house.line.order_name == "drr"
    [row] = [row for row in await audited(here.admin) if row.action == "policy.set"]
    assert (row.before, row.after) == ({"policy": "fcfs", "options": {}}, wanted.as_json())
    await there.policy.change(ACTOR, None)
    await here.look()
    assert (here.policy.now.name, there.policy.now.name) == ("fcfs", "sjf"), "each its own settings"
    assert await here.admin.policy.stored() is None


async def test_an_act_of_another_kind_changes_no_policy(database: Database, pepper: bytes) -> None:
    house = House(database, pepper)
    await house.start()
    await house.admin.transactions.note(ACTOR, "something.else", "thing")
    told = len(house.engine.told)
    await house.look()
    assert len(house.engine.told) == told


async def test_a_start_where_settings_and_stored_differ_says_so(
    database: Database, pepper: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    await House(database, pepper).admin.policy.store(ACTOR, StoredPolicy("vtc"), StoredPolicy("fcfs"))
    house = House(database, pepper)
    await house.start()
    assert (house.policy.now.name, house.policy.is_stored) == ("vtc", True)
    [line] = [each for each in caplog.messages if "stored" in each]
    assert "the stored policy vtc is in force, and the settings say fcfs" in line
    caplog.clear()
    await House(database, pepper, "vtc").start()
    assert not caplog.messages


@pytest.mark.parametrize(
    "stored",
    [StoredPolicy("lottery"), StoredPolicy("vtc", {"magic": 1}), StoredPolicy("vtc", {"slots": -1})],
    ids=["no such policy", "no such option", "out of bounds"],
)
async def test_a_stored_policy_that_cannot_be_made_does_not_stop_the_start(
    database: Database, pepper: bytes, caplog: pytest.LogCaptureFixture, stored: StoredPolicy
) -> None:
    await House(database, pepper).admin.policy.store(ACTOR, stored, StoredPolicy("fcfs"))
    house = House(database, pepper)
    with caplog.at_level(logging.ERROR):
        await house.start()
    assert (house.policy.now, house.policy.is_stored) == (StoredPolicy("fcfs"), False)
    assert "cannot be used" in house.policy.problem
    assert any("the settings count" in each for each in caplog.messages)
    assert house.engine.told == [("fcfs", {})]


async def test_what_an_engine_refuses_is_neither_stored_nor_kept(database: Database, pepper: bytes) -> None:
    house = House(database, pepper)
    house.engine.refuses = "vtc"
    await house.start()
    with pytest.raises(UnknownPolicy, match="engine-0 refuses it: not this one"):
        await house.policy.change(ACTOR, StoredPolicy("vtc"))
    assert await house.admin.policy.stored() is None
    assert (house.policy.now.name, house.line.order_name) == ("fcfs", "fcfs")
    assert [name for name, _ in house.other.told] == ["fcfs", "vtc", "fcfs"], "it goes back"


async def test_what_the_queue_or_the_database_cannot_take_changes_nothing(
    database: Database, pepper: bytes
) -> None:
    house = House(database, pepper)
    await house.start()
    with pytest.raises(UnknownPolicy, match="mlfq"):
        await house.policy.change(ACTOR, StoredPolicy("mlfq"))
    with pytest.raises(ValueError, match="no option 'magic'"):
        await house.policy.change(ACTOR, StoredPolicy("vtc", {"magic": 1}))
    with pytest.raises(Invalid, match="characters; the most is 256"):
        await house.admin.policy.store(
            ACTOR, StoredPolicy("vtc", {"table": "/" + "x" * 300}), StoredPolicy("fcfs")
        )
    assert (await house.admin.policy.stored(), house.line.order_name) == (None, "fcfs")


async def test_an_engine_that_is_away_does_not_stop_the_change(database: Database, pepper: bytes) -> None:
    house = House(database, pepper)
    house.engine.is_up = False
    await house.start()
    await house.policy.change(ACTOR, StoredPolicy("vtc"))
    assert (house.policy.now.name, house.line.order_name) == ("vtc", "vtc")


async def test_a_learned_table_is_read_by_every_gateway_and_by_no_engine(
    database: Database, pepper: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(learned_table().encode())
    here, there = House(database, pepper), House(database, pepper)
    await here.start()
    await there.start()
    assert here.learned.as_json() is None, "another policy has no table"
    wanted = StoredPolicy("learned", {"learned_table": str(path), "cap_tokens": 64})
    await here.policy.change(ACTOR, wanted)
    await there.look()
    for house in (here, there):
        assert house.engine.told[-1][0] == "learned"
        assert "learned_table" not in house.engine.told[-1][1]
        assert house.engine.told[-1][1]["cap_tokens"] == 64
        shown = house.learned.as_json()
        assert shown is not None
        assert (shown["problem"], shown["table"]["model"]) == ("", "tiny")
    await there.policy.change(ACTOR, None)
    await here.look()
    assert here.learned.as_json() is None


async def test_a_learned_table_that_is_gone_at_the_next_start_leaves_the_policy_and_is_said(
    database: Database, pepper: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(learned_table().encode())
    before = House(database, pepper)
    await before.start()
    await before.policy.change(ACTOR, StoredPolicy("learned", {"learned_table": str(path)}))
    path.unlink()
    after = House(database, pepper)
    with caplog.at_level(logging.ERROR, "fairgate.gateway.control"):
        await after.start()
        await after.look()
    assert (after.policy.now.name, after.policy.is_stored, after.policy.problem) == ("learned", True, "")
    shown = after.learned.as_json()
    assert shown is not None
    assert f"{path} cannot be read: No such file" in shown["problem"]
    errors = [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]
    assert errors == [f"policy learned, model tiny: {shown['problem']}; the actions of hybrid are in force"]


@pytest.mark.parametrize("table", [None, "missing", "other model"])
async def test_a_learned_table_that_cannot_be_used_changes_nothing(
    database: Database, pepper: bytes, tmp_path: Path, table: str | None
) -> None:
    path = tmp_path / "table.json"
    if table == "other model":
        path.write_bytes(learned_table(model="other").encode())
    house = House(database, pepper)
    await house.start()
    told = len(house.engine.told)
    options = {} if table is None else {"learned_table": str(path)}
    with pytest.raises(ValueError, match="fairgate policy learn"):
        await house.policy.change(ACTOR, StoredPolicy("learned", cast(Any, options)))
    assert house.policy.now.name == "fcfs"
    assert len(house.engine.told) == told, "no engine was asked"
    assert await house.admin.policy.stored() is None
