"""Where a sequence goes on, what its grammar decides is as if it had stayed."""

from __future__ import annotations

from msgspec.structs import replace

from engine.grammar.constraint import Constraint
from engine.grammar.source import of_schema
from engine.messages import Submit
from tests.support.schemas import END, Drawn


def test_an_answer_that_had_no_room_for_its_end_stays_without_one_where_it_goes_on() -> None:
    drawn = Drawn()
    grammar = of_schema({"type": "string", "minLength": 12}).grammar
    assert grammar.kept_tokens
    submit = Submit("s", "s", "acme", [1], 9, 9, grammar=grammar)
    stayed = Constraint.of(submit, drawn.open(grammar), [], END)
    assert not stayed.closes
    # The shortest end has a blank for each character; a model's own tokens are longer.
    said = [5]
    stayed.take(5, 1, 9)
    for emitted in (2, 3, 4):
        said.append(max(drawn.allowed(stayed.state), key=lambda token_id: len(drawn.text([token_id]))))
        assert stayed.take(said[-1], emitted, 9) is None
    goes_on = Constraint.of(submit, drawn.open(grammar), said, END)
    assert goes_on.state.closing(9 - len(said)), "by now there is room"
    assert not goes_on.closes
    assert Constraint.of(replace(submit, max_tokens=90), drawn.open(grammar), said, END).closes
