"""Token-fair steps of an engine core on virtual time: prompts between tenants, lifts, accounts."""

from __future__ import annotations

from collections import Counter

from engine.core.core import EngineConfig
from engine.entry import COUNTER_SCALE
from engine.messages import SequenceOutcome, Submit
from engine.scheduling.options import PolicyOptions
from engine.virtual.replica import VirtualReplica
from tests.support import builders
from tests.support.builders import virtual_prompt

CAP = 256


def replica(policy: str = "vtc", *, tokens: int = 512, places: int = 16, **options: object) -> VirtualReplica:
    config = EngineConfig(
        policy=policy,
        policy_options=PolicyOptions(**options),  # type: ignore[arg-type]
        max_batched_tokens=tokens,
        max_sequences=places,
    )
    return VirtualReplica(config, num_blocks=4096)


def submit(name: str, tenant: str, prompt: int, *, max_tokens: int = 20, weight: float = 1.0) -> Submit:
    ids = virtual_prompt(name, prompt)
    return builders.submit(name, tenant_id=tenant, prompt_token_ids=ids, max_tokens=max_tokens, weight=weight)


class LongAndShort:
    """Tenant `long` has prompts of 1,500 tokens without end, tenant `chat` short ones."""

    def __init__(self, policy: str, **weights: float) -> None:
        self.engine = replica(policy)
        self.weights = weights
        self.number = 0
        self.begun: dict[str, int] = {}
        """Steps until the first token of a chat's prompt was computed, by sequence."""
        self.missed = 0
        """Steps in which a decoding chat got no token."""
        self.both: list[tuple[int, int, int]] = []
        """Of steps in which both had work: tokens of `long` and of `chat`, and tokens left over."""

    def add(self, tenant: str, prompt: int, max_tokens: int) -> str:
        self.number += 1
        name = f"{tenant}-{self.number}"
        asked = submit(name, tenant, prompt, max_tokens=max_tokens, weight=self.weights.get(tenant, 1.0))
        assert self.engine.submit(asked) is None
        return name

    def run(self, steps: int) -> None:
        table = self.engine.core.table
        waiting: dict[str, int] = {}
        for step in range(steps):
            live = Counter(each.tenant_id for each in table.sequences.values())
            while live["long"] < 4:
                self.add("long", 1500, 5)
                live["long"] += 1
            if step % 7 == 3 and live["chat"] < 6:
                waiting[self.add("chat", 30 + step % 50, 12)] = step
            decoding = {
                name: each.emitted_tokens
                for name, each in table.sequences.items()
                if each.tenant_id == "chat" and each.emitted_tokens
            }
            had_both = bool(live["chat"])
            self.engine.step()
            (record,) = self.engine.core.explain(1).steps
            spent = Counter(record.decodes)
            spent.update(record.prompts)
            if had_both:
                self.both.append((spent["long"], spent["chat"], record.left_tokens))
            for name, emitted in decoding.items():
                if name in table.sequences:
                    self.missed += table.sequences[name].emitted_tokens == emitted
            for name in list(waiting):
                if name not in table.sequences or table.sequences[name].computed_tokens:
                    self.begun[name] = step - waiting.pop(name) + 1
            self.engine.core.check()


def test_long_prompts_of_one_tenant_cost_another_nothing_but_its_share() -> None:
    for policy in ("vtc", "hybrid", "drr", "dlpm"):
        load = LongAndShort(policy)
        load.run(150)
        assert len(load.begun) > 15
        assert set(load.begun.values()) == {1}, "each is begun in the first step after it came"
        assert load.missed == 0, "and has its token in each step"
        assert len(load.both) > 100
        assert all(left == 0 for _, _, left in load.both), "all that it leaves goes to the long prompts"
        ahead = 0
        for of_long, of_chat, _ in load.both:
            ahead = max(0, ahead + of_chat - of_long)
            assert ahead <= CAP, f"{policy}: more than its half"


def test_prompts_share_by_weight_within_a_chunk() -> None:
    engine = replica()
    for number in range(6):
        engine.submit(submit(f"a{number}", "a", 3000))
        engine.submit(submit(f"b{number}", "b", 3000, weight=3.0))
    spent: Counter[str] = Counter()
    for _ in range(20):
        engine.step()
        (record,) = engine.core.explain(1).steps
        spent.update(record.prompts)
        assert abs(3 * spent["a"] - spent["b"]) <= 3 * CAP, spent
        assert record.left_tokens == 0


def test_a_prompt_is_capped_while_another_tenant_has_one() -> None:
    engine = replica(cap_tokens=64)
    # `a` stands far below, and would take the whole step.
    engine.submit(submit("a", "a", 3000, weight=50.0))
    engine.submit(submit("b", "b", 3000))
    engine.step()
    before = {name: each.computed_tokens for name, each in engine.core.table.sequences.items()}
    assert before["b"] >= 64, "what is left after the capped chunks is divided as well"
    assert sum(before.values()) == 512


def test_what_the_capped_prompts_leave_goes_on_without_the_cap() -> None:
    engine = replica(cap_tokens=64)
    engine.submit(submit("a", "a", 2000))
    engine.submit(submit("b", "b", 90))
    engine.step()
    assert engine.core.explain(1).steps[0].prompts == {"a": 512 - 90, "b": 90}
    engine.submit(submit("c", "b", 20))
    engine.submit(submit("d", "b", 900))
    engine.step()
    sequences = engine.core.table.sequences
    assert sequences["c"].emitted_tokens == 1, "short prompts before long ones"
    assert 0 < sequences["d"].computed_tokens < 450


def test_a_tenants_newcomers_do_not_starve_its_own_unfinished_prompt() -> None:
    engine = replica(tokens=64, places=32)
    engine.submit(submit("old", "a", 1000, max_tokens=1))
    step = 0
    while "old" in engine.core.table.sequences:
        for number in range(2):
            engine.submit(submit(f"new-{step}-{number}", "a", 40, max_tokens=1))
        engine.step()
        step += 1
        assert step < 100, "it has a quarter of its tenant's tokens"
    assert step > 20


def test_prompts_that_are_begun_do_not_pile_up() -> None:
    engine = replica(tokens=64, places=32)
    for number in range(20):
        engine.submit(submit(f"s{number}", "a", 500))
    for _ in range(12):
        engine.step()
        begun = [each for each in engine.core.table.prefills if each.computed_tokens]
        assert len(begun) <= 3


def test_more_may_run_than_a_step_has_tokens() -> None:
    engine = replica(tokens=8, places=32)
    for number in range(32):
        engine.submit(submit(f"s{number}", "ab"[number % 2], 3, max_tokens=30))
    outcomes: list[SequenceOutcome] = []
    while engine.core.has_work():
        result = engine.step()
        assert result.num_tokens <= 8
        outcomes += [each.outcome for each in result.deltas.get("virtual", []) if each.outcome]
        engine.core.check()
    assert len(outcomes) == 32
    assert sum(outcome.decode.turn_tokens > 10 for outcome in outcomes) > 20
    assert sum(outcome.decode.sat_out_own > 10 for outcome in outcomes) > 10
    assert sum(outcome.decode.sat_out_share > 10 for outcome in outcomes) > 10
    for outcome in outcomes:
        share = outcome.decode
        assert share.floor_tokens + share.turn_tokens == 30
        assert set(share.sat_out_for) <= {"a", "b"} - {outcome.tenant_id}


def test_a_tenant_that_is_served_whole_is_lifted_and_the_lift_is_told_once() -> None:
    engine = replica(slots=4)
    for number in range(8):
        engine.submit(submit(f"many{number}", "many", 3, max_tokens=400))
    engine.submit(submit("one", "one", 3, max_tokens=400))
    lifted: Counter[str] = Counter()
    for _ in range(60):
        for tenant, share in engine.step().shares.items():
            lifted[tenant] += sum(share.lifts.values())
    standings = engine.core.table.standings
    assert lifted["one"] > 50 * COUNTER_SCALE
    assert lifted["many"] <= 10 * COUNTER_SCALE
    assert standings.value(1, "one") >= standings.value(1, "many") - 8 * COUNTER_SCALE
    assert standings.serial(1, "one") == lifted["one"] + 3 * COUNTER_SCALE + 60 * 2 * COUNTER_SCALE


def test_one_that_comes_without_a_word_stands_with_the_lowest() -> None:
    engine = replica(slots=4)
    for number in range(8):
        engine.submit(submit(f"old{number}", "old", 3, max_tokens=400))
    for _ in range(100):
        engine.step()
    for number in range(8):
        engine.submit(submit(f"new{number}", "new", 3, max_tokens=400))
    engine.step()
    standings = engine.core.table.standings
    since = standings.serial(1, "old")
    for _ in range(40):
        engine.step()
    # Its prompts counted, too.
    assert abs(standings.value(1, "new") - standings.value(1, "old")) <= 4 * 2 * COUNTER_SCALE
    assert standings.serial(1, "old") - since >= 30 * 2 * COUNTER_SCALE
