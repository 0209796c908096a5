"""Charges for what happened."""

from __future__ import annotations

from msgspec.structs import replace

from engine.messages import Delta, SequenceOutcome
from gateway.domain.usage import SequenceUse, Use, charge, use_of, use_of_outcomes
from tenants.types import Amounts


def outcome(index: int, computed: int, emitted: int, *, prompt: int = 10, cached: int = 0) -> SequenceOutcome:
    return SequenceOutcome(
        sequence_id=f"r.{index}", request_id="r", tenant_id="t", finish="stop", prompt_tokens=prompt,
        cached_tokens=cached, computed_tokens=computed, emitted_tokens=emitted, index=index,
    )  # fmt: skip


def ended(*outcomes: SequenceOutcome) -> list[SequenceUse]:
    uses = []
    for each in outcomes:
        use = SequenceUse(each.prompt_tokens)
        use.ended(each)
        uses.append(use)
    return uses


def test_a_prompt_is_charged_once_for_all_its_choices_and_output_for_each() -> None:
    use = use_of(ended(outcome(0, 10, 5), outcome(1, 10, 7), outcome(2, 10, 1)), 3, dispatched=True)
    assert (use.input_tokens, use.output_tokens) == (10, 13)
    assert use.computed_tokens == 30, "service counts what was really computed"


def test_every_prompt_of_a_batch_is_charged() -> None:
    use = use_of(ended(outcome(0, 10, 1), outcome(1, 10, 1), outcome(2, 4, 1, prompt=4)), 1, dispatched=True)
    assert (use.input_tokens, use.output_tokens) == (24, 3)


def test_a_prompt_that_was_computed_in_part_is_charged_in_part() -> None:
    use = use_of(ended(outcome(0, 6, 0), outcome(1, 0, 0)), 2, dispatched=True)
    assert (use.input_tokens, use.output_tokens) == (6, 0)


def test_cached_tokens_are_input_that_nobody_computed() -> None:
    use = use_of(ended(outcome(0, 2, 1, cached=8)), 1, dispatched=True)
    assert (use.input_tokens, use.cached_tokens) == (10, 8)
    # The second choice found what the first computed: that is no discount on the first.
    use = use_of(ended(outcome(0, 10, 1), outcome(1, 2, 1, cached=8)), 2, dispatched=True)
    assert (use.input_tokens, use.cached_tokens) == (10, 0)


def test_without_the_engines_word_what_arrived_counts() -> None:
    use = SequenceUse(10)
    assert use_of([use], 1, dispatched=True).input_tokens == 0, "nothing came: nothing is known"
    use.received(Delta("r.0", gpu_us=900))
    assert use_of([use], 1, dispatched=True) == Use(0, 0, 0, 0, True, 900), "it computed, and emitted nothing"
    use.received(Delta("r.0", 0, [1, 2, 3], cached_tokens=4, gpu_us=1_100))
    use.received(Delta("r.0", 3, [1, 2], cached_tokens=4, gpu_us=1_500))
    assert use_of([use], 1, dispatched=True) == Use(10, 6, 4, 5, True, 1_500)


def test_the_engines_word_replaces_what_arrived() -> None:
    use = SequenceUse(10)
    use.received(Delta("r.0", 0, [1, 2, 3]))
    use.ended(outcome(0, 10, 8))
    assert use.output_tokens == 8


def test_never_more_is_charged_than_was_held() -> None:
    held = Amounts(input_tokens=10, output_tokens=20, cost_nanousd=100, requests=1)
    assert charge(Use(11, 11, 0, 21, True), 101, held) == held
    assert charge(Use(5, 5, 0, 3, True), 7, held) == Amounts(5, 3, 7, 1)
    assert charge(Use(0, 0, 0, 0, False), 0, held) == Amounts(0, 0, 0, 0), "no request either"


def test_device_time_is_rounded_up_once_and_may_pass_what_was_held() -> None:
    held = Amounts(input_tokens=10, output_tokens=20, requests=1, gpu_ms=2)
    assert charge(Use(10, 10, 0, 20, True, gpu_us=2_001), 0, held).gpu_ms == 3
    assert charge(Use(10, 10, 0, 20, True, gpu_us=2_000), 0, held).gpu_ms == 2


def test_choices_that_never_began_say_nothing_of_what_was_cached() -> None:
    begun, waits = SequenceUse(10), SequenceUse(10)
    begun.received(Delta("r.0", 0, [1], cached_tokens=8))
    assert use_of([begun, waits], 2, dispatched=True).cached_tokens == 8


def test_a_restarted_gateway_sums_up_as_the_first_would_have() -> None:
    outcomes = [outcome(1, 10, 7), outcome(0, 10, 5), outcome(2, 4, 2, prompt=4)]
    whole = [*outcomes, outcome(3, 4, 1, prompt=4)]
    assert use_of_outcomes(whole, [10, 4], 2) == use_of(
        ended(outcome(0, 10, 5), outcome(1, 10, 7), outcome(2, 4, 2, prompt=4), outcome(3, 4, 1, prompt=4)),
        2,
        dispatched=True,
    )
    # One sequence never got to an engine; nothing else is known of it.
    assert use_of_outcomes(outcomes, [10, 4], 2) == Use(14, 24, 0, 14, True)
    assert use_of_outcomes([], [10, 4], 2) == Use(0, 0, 0, 0, False)


def test_of_a_sequence_that_moved_the_outcome_with_most_tokens_counts_once() -> None:
    left = replace(outcome(0, 10, 4), finish="cancelled", gpu_us=500)
    went_on = replace(outcome(0, 6, 9, cached=4), gpu_us=900)
    beside = outcome(1, 0, 3, cached=10)
    use = use_of_outcomes([went_on, beside, left], [10], 2)
    assert (use.input_tokens, use.output_tokens, use.cached_tokens, use.gpu_us) == (10, 12, 4, 900)
    assert use_of_outcomes([replace(left, gpu_us=700), left], [10], 1).gpu_us == 700
