"""Sampling: distributions equal transformers', and seed and index alone decide the draw."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import fields, replace

import numpy as np
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
from engine.model.sampler import (
    GRAPH_WANTS,
    RowSampling,
    Wants,
    adjusted,
    choose,
    covering,
    greedy_tokens,
    read,
)
from kernels.sampling import draw, kept, noise
from tests.support import plain_sampler
from tests.support.sampling_rows import inputs_of, last_token_of, sample
from tests.support.stand_in_device import DEVICE, StandIn, needs_stand_in
from tests.support.step_work import SequenceSlice, mask_of

VOCABULARY = 50
Way = Callable[[torch.Tensor, RowSampling, Wants], torch.Tensor]
OPTIONS = {
    "temperature": SamplingParams(temperature=0.7),
    "high temperature": SamplingParams(temperature=2.5),
    "top_k": SamplingParams(top_k=5),
    "top_k of one": SamplingParams(top_k=1),
    "top_k beyond the vocabulary": SamplingParams(top_k=VOCABULARY + 7),
    "top_p": SamplingParams(top_p=0.9),
    "small top_p": SamplingParams(top_p=0.3),
    "min_p": SamplingParams(min_p=0.1),
    "logit_bias": SamplingParams(logit_bias={3: 2.0, 4: -1.0}),
    "repetition": SamplingParams(repetition_penalty=1.7),
    "frequency and presence": SamplingParams(frequency_penalty=0.5, presence_penalty=-0.7),
    "all": SamplingParams(
        temperature=0.8, top_k=12, top_p=0.85, min_p=0.05, logit_bias={3: 2.0}, repetition_penalty=1.2
    ),
}


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


def row(
    sampling: SamplingParams,
    *,
    seed: int = 0,
    prompt: tuple[int, ...] = (1, 2),
    output: list[int] | None = None,
    allowed: Collection[int] = (),
) -> SequenceSlice:
    mask = mask_of(allowed, VOCABULARY) if allowed else None
    return replace(last_token_of(prompt, output or []), sampling=sampling, seed=seed % 2**63, mask=mask)


def compiled(logits: torch.Tensor, columns: RowSampling, wants: Wants) -> torch.Tensor:
    return choose(logits, columns, wants).token_ids


def by_torch(logits: torch.Tensor, columns: RowSampling, wants: Wants) -> torch.Tensor:
    return draw(adjusted(logits, columns, wants), columns)


def chosen(logits: torch.Tensor, rows: list[SequenceSlice], way: Way = compiled) -> list[int]:
    token_ids: list[int] = way(logits, *inputs_of(rows, logits)).tolist()
    return token_ids


def plain(logits: torch.Tensor, rows: list[SequenceSlice]) -> list[int]:
    """The reference's tokens."""
    token_ids = []
    for values, one in zip(logits.numpy(), rows, strict=True):
        prompt, output = one.token_ids[: one.num_prompt_tokens], one.token_ids[one.num_prompt_tokens :]
        scores = plain_sampler.noisy(values, one.sampling, one.seed, prompt, output, one.mask)
        token_ids.append(int(scores.argmax()))
    return token_ids


def random_rows(generator: random.Random, count: int) -> list[SequenceSlice]:
    pick = generator.choice
    return [
        row(
            SamplingParams(
                temperature=pick((0.0, 0.3, 1.0, 2.0)),
                top_k=pick((0, 0, 1, 5, 30, 200)),
                top_p=pick((1.0, 1.0, 0.0, 0.5, 0.9, 0.99)),
                min_p=pick((0.0, 0.0, 0.05, 0.5, 1.0)),
                repetition_penalty=pick((1.0, 1.3, 0.8)),
                frequency_penalty=pick((0.0, 0.5)),
                logit_bias=pick(({}, {3: 5.0, VOCABULARY: 100.0, 7: -100.0})),
                logprobs=pick((None, 0, 3)),
            ),
            seed=generator.getrandbits(63),
            output=[generator.randrange(VOCABULARY) for _ in range(generator.randint(0, 9))],
            allowed=pick(((), (), generator.sample(range(VOCABULARY), pick((1, 2, 25, VOCABULARY))))),
        )
        for _ in range(count)
    ]


WAYS = pytest.mark.parametrize("way", [compiled, by_torch])


@WAYS
def test_every_token_is_that_of_the_rules_in_float64(way: Way) -> None:
    """All options in all mixtures; every second batch has many equal logits."""
    generator = random.Random(5)
    for number in range(60):
        rows = random_rows(generator, generator.randint(1, 9))
        logits = random_logits(len(rows), number) * generator.choice((0.1, 1.0, 4.0))
        logits = logits.round() + 0.0 if number % 2 else logits  # one kind of zero: their order is free
        assert chosen(logits, rows, way) == plain(logits, rows), number


@pytest.mark.parametrize(("vocabulary", "spread"), [(1_500, 0.01), (3_001, 2.5), (1_500, 40.0)])
def test_the_compiled_pass_is_torchs_in_vocabularies_of_many_blocks(vocabulary: int, spread: float) -> None:
    logits = torch.randn(9, vocabulary, generator=torch.Generator().manual_seed(3)) * spread
    logits[::3, 100:] = float("-inf")
    for params in OPTIONS.values():
        rows = [row(params, seed=seed) for seed in range(9)]
        assert chosen(logits, rows) == chosen(logits, rows, by_torch)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_cuts_are_transformers_warpers(name: str) -> None:
    params, logits = OPTIONS[name], random_logits(6)
    expected = TemperatureLogitsWarper(params.temperature)(None, logits)
    if params.top_k:
        expected = TopKLogitsWarper(params.top_k)(None, expected)
    if params.top_p < 1:
        expected = TopPLogitsWarper(params.top_p)(None, expected)
    if params.min_p:
        expected = MinPLogitsWarper(params.min_p)(None, expected)
    for values, mine in zip(expected, logits, strict=True):
        probabilities = plain_sampler.probabilities(mine.double().numpy(), params)
        np.testing.assert_allclose(probabilities, values.double().softmax(-1).numpy(), atol=1e-6)
    columns, _ = inputs_of([row(params)] * 6, logits)
    distances = (logits - logits.amax(-1, keepdim=True)) / params.temperature
    assert torch.equal(kept(logits, distances, columns).expand_as(logits), expected.isfinite())


@WAYS
@pytest.mark.parametrize("over", ["seeds", "token_index"])
@pytest.mark.parametrize("name", OPTIONS)
def test_draws_follow_the_distribution(name: str, over: str, way: Way) -> None:
    """Chi-square of 4,000 draws from one row of logits. All is fixed, so this never flickers."""
    params, draws, output = OPTIONS[name], 4_000, [3, 5, 5]
    logits = random_logits(1, 8)[:, :12] / 2
    columns, wants = inputs_of([row(params, seed=9, output=output)] * draws, logits.expand(draws, -1))
    setattr(columns, over, torch.arange(draws))
    counts = np.bincount(way(logits.expand(draws, -1), columns, wants), minlength=12)
    scores = plain_sampler.adjusted(logits[0].numpy(), params, (1, 2), output)
    expected = plain_sampler.probabilities(scores, params) * draws
    assert (counts[expected == 0] == 0).all()
    likely = expected >= 5
    statistic = float(((counts - expected)[likely] ** 2 / expected[likely]).sum())
    freedom = int(likely.sum()) - 1
    assert statistic <= freedom + 4 * (2 * freedom) ** 0.5


def test_the_noise_is_finite_and_that_of_the_reference() -> None:
    seeds, indices = torch.tensor([0, 5, 2**63 - 1, 2**32]), torch.tensor([0, 3, 2**31 - 1, 0])
    numbers = noise(seeds, indices, 20_000)
    assert -3 < float(numbers.min()) < -2
    assert 9 < float(numbers.max()) < 23
    for mine, seed, index in zip(numbers, seeds.tolist(), indices.tolist(), strict=True):
        np.testing.assert_allclose(mine[:2_000], plain_sampler.noise(seed, index, 2_000), atol=2e-6)


@WAYS
def test_ties_at_a_cut_are_kept_whole(way: Way) -> None:
    """As top-k does; and top-p ends with the score that reaches it exactly."""
    draws = 300
    for logits, params, expected in (
        ([3.0, 1.0, 3.0, 3.0], SamplingParams(top_k=2), {0, 2, 3}),
        ([0.0, 0.0, -9.0, -9.0], SamplingParams(top_p=0.9), {0, 1}),
        ([0.0, 0.0, 0.0, 0.0], SamplingParams(top_p=0.0), {0, 1, 2, 3}),
        (np.log([0.5, 0.25, 0.25]), SamplingParams(top_p=0.5), {0}),
        (np.log([0.5, 0.25, 0.25]), SamplingParams(top_p=0.51), {0, 1, 2}),
        ([2.0, 1.0, 0.0, float("-inf")], SamplingParams(top_p=1.0, top_k=4), {0, 1, 2}),
    ):
        rows = [row(params, seed=seed) for seed in range(draws)]
        assert set(chosen(torch.tensor([list(logits)] * draws).float(), rows, way)) == expected, params


@WAYS
def test_the_draw_depends_on_seed_and_index_and_on_nothing_else(way: Way) -> None:
    """Alone, in company of rows with other options, in another place: the same token, the same logprobs."""
    generator = random.Random(3)
    for size in range(2, 12):
        rows, logits = random_rows(generator, size), random_logits(size, size)
        together = chosen(logits, rows, way)
        order = generator.sample(range(size), size)
        assert chosen(logits[order], [rows[i] for i in order], way) == [together[i] for i in order]
        for i in range(size):
            assert chosen(logits[i : i + 1], rows[i : i + 1], way) == together[i : i + 1]
        reports = sample(logits, rows)
        assert [report for i in range(size) for report in sample(logits[i : i + 1], [rows[i]])] == reports
    mine, sampling = random_logits(1, seed=9), SamplingParams(temperature=1.3, top_p=0.95)
    over_indices = {chosen(mine, [row(sampling, seed=77, output=[5] * i)], way)[0] for i in range(40)}
    over_seeds = {chosen(mine, [row(sampling, seed=seed)], way)[0] for seed in range(40)}
    assert len(over_indices) > 3
    assert len(over_seeds) > 3


@WAYS
def test_what_a_step_wants_launches_more_and_changes_no_token(way: Way) -> None:
    logits, rows = random_logits(8), [row(SamplingParams(temperature=0.0)), row(SamplingParams())] * 4
    columns, wants = inputs_of(rows, logits)
    assert wants == Wants(draws=True)
    expected = way(logits, columns, wants)
    columns.output_counts = torch.ones(8, VOCABULARY, dtype=torch.int32)
    columns.in_prompt = torch.ones(8, VOCABULARY, dtype=torch.bool)
    columns.masks = torch.full((8, 1), -1)
    assert torch.equal(way(logits, columns, Wants(True, True, True, 3, True)), expected)


def test_a_step_wants_what_any_of_its_rows_does() -> None:
    assert Wants.of([SamplingParams(temperature=0.0, top_k=3, top_p=0.5, min_p=0.1)]) == Wants()
    mixed = [SamplingParams(top_k=3, logprobs=2), SamplingParams(top_p=0.5, presence_penalty=1.0, logprobs=4)]
    assert Wants.of(mixed) == Wants(penalties=True, draws=True, logprobs=4)
    assert Wants.of([SamplingParams(min_p=0.1, logit_bias={1: 1.0})]) == Wants(bias=True, draws=True)


def test_choosing_reads_nothing_back_and_changes_no_input() -> None:
    """Tensors on the device "meta" have no values: whatever reads one raises."""
    logits, rows = random_logits(6), random_rows(random.Random(1), 6)
    columns, _ = inputs_of(rows, logits)
    everything = Wants(True, True, True, 3, mask=True)
    there = RowSampling(**{each.name: getattr(columns, each.name).to("meta") for each in fields(columns)})
    far = choose(logits.to("meta"), there, everything)
    with pytest.raises(RuntimeError):
        read(far, [3] * 6)
    before, given = (
        logits.clone(),
        {each.name: getattr(columns, each.name).clone() for each in fields(columns)},
    )
    near = choose(logits, columns, everything)
    assert torch.equal(logits, before)
    assert all(torch.equal(getattr(columns, name), value) for name, value in given.items())
    for each in fields(far):
        if each.name != "unsound":
            assert getattr(far, each.name).shape == getattr(near, each.name).shape
            assert getattr(far, each.name).dtype == getattr(near, each.name).dtype


def test_a_captured_choice_covers_what_is_wanted() -> None:
    draws, everything = GRAPH_WANTS
    assert [covering(each) for each in (Wants(), Wants(draws=True))] == [draws, draws]
    for wants in (Wants(bias=True), Wants(penalties=True), Wants(logprobs=0), Wants(mask=True), everything):
        assert covering(wants) == everything
    assert covering(beyond := Wants(draws=True, logprobs=21)) == beyond


@WAYS
@pytest.mark.parametrize("unlikely", [-3e38, float("-inf")])
def test_what_a_mask_excludes_is_never_chosen(unlikely: float, way: Way) -> None:
    """Even if the model gives the others no chance at all."""
    logits = torch.full((1, VOCABULARY), 9.0)
    logits[:, 20:] = unlikely
    for params in OPTIONS.values():
        rows = [row(params, seed=seed, allowed=(25, 31, 32, 49)) for seed in range(20)]
        assert set(chosen(logits.expand(20, -1), rows, way)) <= {25, 31, 32, 49}, params


@needs_stand_in
def test_on_a_device_no_token_depends_on_what_else_is_captured() -> None:
    """One launch where rows only draw; the logits may be in half precision."""
    rows, logits = random_rows(random.Random(2), 12), random_logits(12)
    logits[3], logits[5, 7] = float("nan"), float("inf")
    columns, wants = inputs_of(rows, logits)
    reported = [one.sampling.logprobs for one in rows]
    expected = read(choose(logits, columns, wants, fallback_token_id=4), reported)
    with StandIn() as device:
        there = RowSampling(**{each.name: getattr(columns, each.name).to(DEVICE) for each in fields(columns)})
        for graph in (wants, covering(wants)):
            found = choose(logits.to(DEVICE), there, graph, fallback_token_id=4)
            assert read(found, reported) == expected
            assert found.unsound is not None
            assert found.unsound.tolist() == [place in (3, 5) for place in range(12)]
        half, device.launches = logits.bfloat16(), Counter()
        least = choose(half.to(DEVICE), there, covering(Wants()), fallback_token_id=4)
        assert device.launches.total() == 1
        assert (
            least.token_ids.tolist()
            == choose(half, columns, Wants(draws=True), fallback_token_id=4).token_ids.tolist()
        )


@WAYS
@pytest.mark.parametrize("temperature", [0.0, 1e-7])
def test_greedy_takes_the_best_whatever_the_other_limits(temperature: float, way: Way) -> None:
    logits = random_logits(5)
    params = SamplingParams(temperature=temperature, top_k=2, top_p=0.1, min_p=0.5)
    assert (
        chosen(logits, [*[row(params)] * 4, row(SamplingParams())], way)[:4] == logits[:4].argmax(-1).tolist()
    )


def test_the_repetition_penalty_is_transformers_over_prompt_and_output() -> None:
    logits = random_logits(3)
    prompt, output = (4, 9, 9, 11), [20, 21, 4]
    params = SamplingParams(repetition_penalty=1.7, temperature=0.0)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[*prompt, *output]] * 3), logits.clone())
    got = adjusted(logits, *inputs_of([row(params, prompt=prompt, output=output)] * 3, logits))
    torch.testing.assert_close(got, expected)


def test_presence_and_frequency_penalties_count_output_tokens_only() -> None:
    logits = random_logits(1)
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, temperature=0.0)
    expected = logits.clone()
    expected[0, 7] -= 0.5 + 3 * 0.25
    expected[0, 8] -= 0.5 + 0.25
    got = adjusted(logits, *inputs_of([row(params, prompt=(7, 3, 3), output=[7, 8, 7, 7])], logits))
    torch.testing.assert_close(got, expected)


def test_penalties_of_one_row_leave_the_others_alone() -> None:
    logits = random_logits(3)
    params = SamplingParams(
        repetition_penalty=2.0, presence_penalty=1.0, logit_bias={3: -100.0}, temperature=0.0
    )
    rows = [row(SamplingParams()), row(params, output=[3, 4]), row(SamplingParams(temperature=0.0))]
    got = adjusted(logits, *inputs_of(rows, logits))
    assert torch.equal(logits[[0, 2]], got[[0, 2]])
    assert not torch.equal(logits[1], got[1])


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
    sampled = sample(logits.clone(), [row(one, allowed=(13,) if one.logit_bias else ()) for one in params])
    assert sampled[0].logprob == pytest.approx(float(expected[0].max()))
    assert sampled[0].top == []
    assert sampled[1].token_id == 13, "the mask is the last word"
    assert sampled[1].logprob == pytest.approx(float(expected[1, 13]))
    best = expected[1].topk(4)
    assert [token_id for token_id, _ in sampled[1].top] == best.indices.tolist()
    assert [value for _, value in sampled[1].top] == pytest.approx(best.values.tolist(), abs=1e-6)
    assert sampled[2].logprob is None
    assert sampled[2].top == []


def test_more_alternatives_than_tokens_are_all_tokens() -> None:
    sampled = sample(torch.zeros(1, 3), [row(SamplingParams(temperature=0.0, logprobs=20))])
    assert len(sampled[0].top) == 3


def test_nan_is_impossible_and_a_hopeless_row_ends_the_sequence(caplog: pytest.LogCaptureFixture) -> None:
    logits = random_logits(4)
    logits[0] -= 50
    before = logits.clone()
    logits[0, int(logits[0].argmax())] = float("nan")
    logits[1] = float("nan")
    logits[2, 17] = float("inf")
    for temperature in (0.0, 1.0):
        rows = [row(SamplingParams(temperature=temperature, logprobs=1), seed=s) for s in range(4)]
        with caplog.at_level(logging.WARNING):
            sampled = sample(logits.clone(), rows, fallback_token_id=2)
        tokens = [token.token_id for token in sampled]
        assert tokens[0] not in (2, int(before[0].argmax()))
        assert tokens[1:3] == [2, 17]
        assert tokens[3] == chosen(before, rows)[3], "a sound row does not feel its neighbours"
        assert all(token.logprob is not None and token.logprob <= 0 for token in sampled)
    assert "3 rows of logits that are not finite" in caplog.text


def test_the_compiled_greedy_pass_gives_the_tokens_of_the_long_way() -> None:
    logits = random_logits(9, seed=4)
    plain = row(SamplingParams(temperature=0.0))
    assert greedy_tokens(logits).tolist() == logits.argmax(-1).tolist()  # type: ignore[union-attr]
    assert chosen(logits, [plain] * 9) == logits.argmax(-1).tolist()
    reported = row(SamplingParams(temperature=0.0, logprobs=0))  # takes the long way
    assert chosen(logits, [*[plain] * 8, reported]) == logits.argmax(-1).tolist()


def test_the_compiled_greedy_pass_leaves_repair_to_the_long_way(caplog: pytest.LogCaptureFixture) -> None:
    logits = random_logits(3)
    best = logits.argmax(-1).tolist()
    logits[1] = float("nan")
    assert greedy_tokens(logits) is None
    with caplog.at_level(logging.WARNING):
        sampled = sample(logits, [row(SamplingParams(temperature=0.0))] * 3, fallback_token_id=7)
    assert [token.token_id for token in sampled] == [best[0], 7, best[2]]
    assert "not finite" in caplog.text
