"""A learned table in words: every state, what is unlike hybrid, and a verdict, also where it loses."""

from __future__ import annotations

from gateway.flow.learned.actions import HYBRID, Actions
from gateway.flow.learned.macro_state import NUM_STATES
from gateway.flow.learned.report import UNLIKE_WORDS, state_words, table_as_json, unlike_hybrid, verdict
from gateway.flow.learned.table_file import Judged
from tests.support.learned_tables import STRICT_SLOTS, learned_table


def test_every_macro_state_is_there_with_what_it_does_otherwise() -> None:
    shown = table_as_json(learned_table({0: HYBRID, 5: STRICT_SLOTS}))
    assert [each["state"] for each in shown["states"]] == list(range(NUM_STATES))
    assert [state_words(each) for each in shown["states"][:2]] == ["as hybrid", "never seen: as hybrid"]
    assert shown["states"][5]["unlike_hybrid"] == [
        "50% of the sequences get decode tokens in a step",
        "50% of a step's tokens",
        "the long lane may hold 30% of an engine",
        "memory is set aside for 250 thousandths of the predicted output",
        "requests move up a tier after 50% of the time",
    ]
    assert shown["states"][5]["words"] == "a queue; KV cache free; arrivals rising"
    assert shown["fit"]["most_seen"] == {"queued_per_place": 8.0, "kv_share": 0.95, "trend": 6.0}


def test_every_action_has_words() -> None:
    assert UNLIKE_WORDS.keys() == set(Actions.__struct_fields__)
    assert unlike_hybrid(HYBRID) == []
    strict = unlike_hybrid(Actions(admission=1.0, partial_prefills=1))
    assert strict == [
        "at most 1 unfinished prompts of a tenant",
        "requests are refused whose expected time, times 1, is beyond their target",
    ]


def test_the_verdict_says_where_it_does_not_win() -> None:
    assert verdict(Judged(40.0, 50.0, 2.0)) == (
        "it wins on requests that it had not seen: its sum is 40, that of hybrid 50, 10 less (spread 2)"
    )
    within, worse = verdict(Judged(49.0, 50.0, 2.0)), verdict(Judged(51.0, 50.0, 2.0))
    assert within.startswith("it does not win")
    assert within.endswith("the difference is within the spread (2)")
    assert worse.startswith("it does not win")
    assert worse.endswith("it is no better")
    assert verdict(None) == "it was not judged on requests that it had not seen"
