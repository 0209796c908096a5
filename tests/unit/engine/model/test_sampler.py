"""Sampling: distributions equal transformers', and seed and index alone decide the draw."""

from __future__ import annotations

import logging
import random

import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.messages import SamplingParams
from engine.model.sampler import TOP_P_CANDIDATES, SamplingRow, greedy_tokens, probabilities, sample, uniform

VOCABULARY = 50


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


def row(
    sampling: SamplingParams,
    *,
    seed: int = 0,
    prompt: tuple[int, ...] = (1, 2),
    output: list[int] | None = None,
) -> SamplingRow:
    return SamplingRow([*prompt, *(output or [])], len(prompt), sampling, seed)


def chosen(logits: torch.Tensor, rows: list[SamplingRow], **options: int) -> list[int]:
    return [sampled.token_id for sampled in sample(logits.clone(), rows, **options)]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=2.5),
        SamplingParams(top_k=5),
        SamplingParams(top_k=1),
        SamplingParams(top_k=VOCABULARY + 7),
        SamplingParams(top_p=0.9),
        SamplingParams(top_p=0.3),
        SamplingParams(min_p=0.1),
        SamplingParams(temperature=0.8, top_k=12, top_p=0.85, min_p=0.05),
    ],
)
def test_the_distribution_is_the_one_of_transformers_warpers(params: SamplingParams) -> None:
    logits = random_logits(6)
    expected = TemperatureLogitsWarper(params.temperature)(None, logits)
    if params.top_k:
        expected = TopKLogitsWarper(params.top_k)(None, expected)
    if params.top_p < 1:
        expected = TopPLogitsWarper(params.top_p)(None, expected)
    if params.min_p:
        expected = MinPLogitsWarper(params.min_p)(None, expected)
    got = probabilities(logits, [params] * 6)
    torch.testing.assert_close(got, expected.double().softmax(-1), atol=1e-6, rtol=1e-5)


def test_rows_of_one_batch_keep_their_own_parameters() -> None:
    params = [
        SamplingParams(),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.4, temperature=1.5),
        SamplingParams(min_p=0.2),
        SamplingParams(top_k=7, top_p=0.5),
    ]
    logits = random_logits(len(params))
    together = probabilities(logits.clone(), params)
    for index, alone in enumerate(params):
        torch.testing.assert_close(together[index], probabilities(logits[index : index + 1], [alone])[0])


@pytest.mark.parametrize("top_p", [0.0, 1e-9])
def test_a_vanishing_top_p_leaves_the_best_token(top_p: float) -> None:
    logits = random_logits(4)
    got = probabilities(logits.clone(), [SamplingParams(top_p=top_p)] * 4)
    assert got.argmax(-1).tolist() == logits.argmax(-1).tolist()
    assert (got > 0).sum(-1).tolist() == [1] * 4


def test_top_p_one_removes_nothing_and_top_p_keeps_the_token_that_crosses_it() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    for top_p, kept in ((1.0, 3), (0.81, 3), (0.79, 2), (0.51, 2), (0.49, 1)):
        got = probabilities(logits.clone(), [SamplingParams(top_p=top_p)])
        assert int((got > 0).sum()) == kept, top_p


def test_a_wide_top_p_set_in_a_large_vocabulary_is_transformers_too() -> None:
    """Rows whose set is among the first candidates, and rows where nearly the whole vocabulary counts."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(4, 3 * TOP_P_CANDIDATES, generator=generator) * torch.tensor(
        [[9.0], [0.1], [1.0], [0.0]]
    )
    logits[3] += torch.linspace(0, 0.5, 3 * TOP_P_CANDIDATES)
    top_p = [0.9, 0.95, 0.5, 0.99]
    got = probabilities(logits.clone(), [SamplingParams(top_p=p) for p in top_p])
    kept = (got > 0).sum(-1).tolist()
    assert min(kept) < TOP_P_CANDIDATES < 2 * TOP_P_CANDIDATES < max(kept)
    for index, p in enumerate(top_p):
        expected = TopPLogitsWarper(p)(None, logits[index : index + 1]).double().softmax(-1)
        torch.testing.assert_close(got[index : index + 1], expected, atol=1e-6, rtol=1e-5)


def test_top_p_stops_at_the_token_that_reaches_it_exactly() -> None:
    halves = probabilities(torch.zeros(1, 2), [SamplingParams(top_p=0.5)])
    assert sorted(halves[0].tolist()) == [0.0, 1.0]


def test_draws_follow_the_distribution() -> None:
    """Inversion of evenly spread uniform numbers: the counts of 4,000 draws are near their expectation."""
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()[None]
    draws = 4_000
    rows = [row(SamplingParams(), seed=seed) for seed in range(draws)]
    counts = torch.bincount(torch.tensor(chosen(logits.expand(draws, -1), rows)), minlength=4)
    # Five standard deviations of a binomial count; the seeds are fixed, so this never flickers.
    for count, probability in zip(counts.tolist(), (0.5, 0.25, 0.15, 0.1), strict=True):
        assert abs(count - draws * probability) < 5 * (draws * probability * (1 - probability)) ** 0.5


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = torch.full((500, 4), float("-inf"))
    logits[:, [0, 2]] = 0.0
    rows = [row(SamplingParams(), seed=seed) for seed in range(500)]
    assert set(chosen(logits, rows)) == {0, 2}


def test_the_uniform_numbers_are_in_the_open_interval_and_differ() -> None:
    numbers = [uniform(seed, index) for seed in (0, 1, -1, 2**63, 2**80) for index in range(300)]
    assert 0 < min(numbers) < 0.01
    assert 0.99 < max(numbers) < 1
    assert len(set(numbers)) >= 1_200, "2**80 and 0 share their low 64 bits, the others differ"


def test_the_draw_depends_on_seed_and_index_and_on_nothing_else() -> None:
    """Alone, in company, in another row, greedy neighbours or not: the same token."""
    generator = random.Random(3)
    sampling = SamplingParams(temperature=1.3, top_p=0.95)
    mine = random_logits(1, seed=9)
    for index in range(12):
        watched = row(sampling, seed=77, output=[5] * index)
        alone = chosen(mine, [watched])[0]
        others = [
            row(
                generator.choice((sampling, SamplingParams(temperature=0.0), SamplingParams(top_k=3))), seed=s
            )
            for s in range(generator.randint(1, 9))
        ]
        place = generator.randint(0, len(others))
        logits = torch.cat([random_logits(place, 1), mine, random_logits(len(others) - place, 2)])
        assert chosen(logits, [*others[:place], watched, *others[place:]])[place] == alone
    over_indices = {chosen(mine, [row(sampling, seed=77, output=[5] * i)])[0] for i in range(40)}
    over_seeds = {chosen(mine, [row(sampling, seed=seed)])[0] for seed in range(40)}
    assert len(over_indices) > 3
    assert len(over_seeds) > 3


@pytest.mark.parametrize("temperature", [0.0, 1e-7])
def test_greedy_takes_the_best_whatever_the_other_limits(temperature: float) -> None:
    logits = random_logits(5)
    params = SamplingParams(temperature=temperature, top_k=2, top_p=0.1, min_p=0.5)
    assert chosen(logits, [row(params)] * 5) == logits.argmax(-1).tolist()


def test_the_repetition_penalty_is_transformers_over_prompt_and_output() -> None:
    logits = random_logits(3)
    prompt, output = (4, 9, 9, 11), [20, 21, 4]
    params = SamplingParams(repetition_penalty=1.7, temperature=0.0, logprobs=0)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[*prompt, *output]] * 3), logits.clone())
    work = logits.clone()
    sampled = sample(work, [row(params, prompt=prompt, output=output)] * 3)
    torch.testing.assert_close(work, expected)
    assert [token.token_id for token in sampled] == expected.argmax(-1).tolist()


def test_presence_and_frequency_penalties_count_output_tokens_only() -> None:
    logits = random_logits(1)
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, temperature=0.0)
    expected = logits.clone()
    expected[0, 7] -= 0.5 + 3 * 0.25
    expected[0, 8] -= 0.5 + 0.25
    sample(logits, [row(params, prompt=(7, 3, 3), output=[7, 8, 7, 7])])
    torch.testing.assert_close(logits, expected)


def test_penalties_of_one_row_leave_the_others_alone() -> None:
    logits = random_logits(3)
    before = logits.clone()
    params = SamplingParams(
        repetition_penalty=2.0, presence_penalty=1.0, logit_bias={3: -100.0}, temperature=0.0
    )
    sample(logits, [row(SamplingParams()), row(params, output=[3, 4]), row(SamplingParams(temperature=0.0))])
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    assert not torch.equal(logits[1], before[1])


def test_logit_bias_can_force_or_ban_a_token_and_ignores_ids_outside_of_the_vocabulary() -> None:
    logits = random_logits(1)
    best = int(logits.argmax())
    greedy = {"temperature": 0.0}
    assert chosen(logits, [row(SamplingParams(logit_bias={best: -100.0}, **greedy))]) != [best]
    assert chosen(logits, [row(SamplingParams(logit_bias={13: 100.0}, **greedy))]) == [13]
    for seed in range(20):
        assert chosen(logits, [row(SamplingParams(logit_bias={13: 100.0}), seed=seed)]) == [13]
    outside = SamplingParams(logit_bias={VOCABULARY: 100.0, -1: 100.0, 10**6: 100.0}, **greedy)
    assert chosen(logits, [row(outside)]) == [best]


def test_logprobs_are_the_models_own_whatever_the_sampling_does() -> None:
    logits = random_logits(3)
    expected = logits.log_softmax(-1)
    params = [
        SamplingParams(temperature=0.0, logprobs=0),
        SamplingParams(temperature=2.0, top_k=1, logit_bias={5: 100.0}, logprobs=4),
        SamplingParams(temperature=0.0),
    ]
    sampled = sample(logits.clone(), [row(one) for one in params])
    assert sampled[0].logprob == pytest.approx(float(expected[0].max()))
    assert sampled[0].top == []
    assert sampled[1].token_id == 5
    assert sampled[1].logprob == pytest.approx(float(expected[1, 5]))
    best = expected[1].topk(4)
    assert [token_id for token_id, _ in sampled[1].top] == best.indices.tolist()
    assert [value for _, value in sampled[1].top] == pytest.approx(best.values.tolist())
    assert sampled[2].logprob is None
    assert sampled[2].top == []


def test_more_alternatives_than_tokens_are_all_tokens() -> None:
    sampled = sample(torch.zeros(1, 3), [row(SamplingParams(temperature=0.0, logprobs=20))])
    assert len(sampled[0].top) == 3


def test_nan_is_impossible_and_a_hopeless_row_ends_the_sequence(caplog: pytest.LogCaptureFixture) -> None:
    logits = random_logits(4)
    before = logits.clone()
    logits[0, int(logits[0].argmax())] = float("nan")
    logits[1] = float("nan")
    logits[2, 17] = float("inf")
    for temperature in (0.0, 1.0):
        rows = [row(SamplingParams(temperature=temperature, logprobs=1), seed=s) for s in range(4)]
        with caplog.at_level(logging.WARNING):
            sampled = sample(logits.clone(), rows, fallback_token_id=2)
        tokens = [token.token_id for token in sampled]
        assert tokens[0] != int(before[0].argmax())
        assert tokens[1:3] == [2, 17]
        assert tokens[3] == chosen(before, rows)[3], "a sound row does not feel its neighbours"
        assert all(token.logprob is not None and token.logprob <= 0 for token in sampled)
    assert "3 rows of logits that are not finite" in caplog.text


def test_the_compiled_greedy_pass_gives_the_tokens_of_the_long_way() -> None:
    logits = random_logits(9, seed=4)
    plain = row(SamplingParams(temperature=0.0))
    assert greedy_tokens(logits) == logits.argmax(-1).tolist()
    assert chosen(logits, [plain] * 9) == logits.argmax(-1).tolist()
    reported = row(SamplingParams(temperature=0.0, logprobs=0))  # takes the long way
    assert chosen(logits, [*[plain] * 8, reported]) == logits.argmax(-1).tolist()


def test_the_compiled_greedy_pass_leaves_repair_to_the_long_way(caplog: pytest.LogCaptureFixture) -> None:
    logits = random_logits(3)
    best = logits.argmax(-1).tolist()
    logits[1] = float("nan")
    assert greedy_tokens(logits) is None
    with caplog.at_level(logging.WARNING):
        assert chosen(logits, [row(SamplingParams(temperature=0.0))] * 3, fallback_token_id=7) == [
            best[0],
            7,
            best[2],
        ]
    assert "not finite" in caplog.text
