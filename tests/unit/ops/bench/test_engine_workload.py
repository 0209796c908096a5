"""Workload files: reproducible runs, and errors that name the request."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from ops.bench.engine.workload import (
    FIRST_TOKEN_ID,
    SHIPPED_WORKLOAD,
    BadWorkload,
    as_orders,
    check_workload,
    load_workload,
    parse_workload,
    sample_workload,
    warm_up_orders,
)

VOCABULARY = 4096


def of(*requests: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"requests": list(requests), **fields}


def test_the_shipped_file_has_the_stated_lengths() -> None:
    workload = load_workload(SHIPPED_WORKLOAD)
    prompts = [request.length for request in workload.requests]
    outputs = [request.output_tokens for request in workload.requests]
    assert len(prompts) == 64
    assert median(prompts) == pytest.approx(96, abs=2)
    assert max(prompts) == 512
    assert median(outputs) == pytest.approx(48, abs=2)
    assert max(outputs) == 256
    gaps = workload.requests[-1].arrival / (len(prompts) - 1)
    assert gaps == pytest.approx(1.0, abs=0.35)


def test_prompts_follow_from_the_seed_and_stay_in_the_vocabulary() -> None:
    workload = load_workload(SHIPPED_WORKLOAD)
    first = as_orders(workload, VOCABULARY, rate_per_s=None)
    assert first == as_orders(workload, VOCABULARY, rate_per_s=None)
    ids = [token_id for order in first for token_id in order["prompt_token_ids"]]
    assert min(ids) >= FIRST_TOKEN_ID
    assert max(ids) < VOCABULARY
    assert len(set(ids)) > VOCABULARY // 2, "the prompts vary"
    starts = {tuple(order["prompt_token_ids"][:4]) for order in first}
    assert len(starts) == len(first), "no two prompts share a prefix"
    assert [len(order["prompt_token_ids"]) for order in first] == [
        request.length for request in workload.requests
    ]


def test_the_prompts_are_the_same_on_every_machine() -> None:
    workload = parse_workload(of({"prompt_tokens": 4, "output_tokens": 1}, seed=1234))
    assert workload.prompt_token_ids(0, 4096) == [3749, 2818, 3285, 2942]


def test_all_at_once_or_at_a_rate() -> None:
    workload = parse_workload(
        of(
            {"prompt_tokens": 1, "output_tokens": 1, "arrival": 3.0},
            {"prompt_tokens": 2, "output_tokens": 1, "arrival": 1.0},
        )
    )
    assert [order["arrival_s"] for order in as_orders(workload, 10, rate_per_s=None)] == [0.0, 0.0]
    paced = as_orders(workload, 10, rate_per_s=2.0)
    assert [(len(each["prompt_token_ids"]), each["arrival_s"]) for each in paced] == [(2, 0.5), (1, 1.5)]


def test_sampled_requests_come_from_the_file_and_follow_from_its_seed() -> None:
    workload = load_workload(SHIPPED_WORKLOAD)
    sampled = sample_workload(workload, 500)
    assert sampled == sample_workload(workload, 500)
    known = {(request.length, request.output_tokens) for request in workload.requests}
    drawn = {(request.length, request.output_tokens) for request in sampled.requests}
    assert drawn <= known
    assert len(drawn) > len(known) / 2
    arrivals = [request.arrival for request in sampled.requests]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] / 499 == pytest.approx(1.0, abs=0.15)
    prompts = as_orders(sampled, VOCABULARY, rate_per_s=None)
    assert len({tuple(order["prompt_token_ids"][:8]) for order in prompts}) > 490, (
        "drawn twice, not said twice"
    )


def test_the_warm_up_tells_no_cache_what_comes() -> None:
    workload = load_workload(SHIPPED_WORKLOAD)
    warm = warm_up_orders(workload, VOCABULARY, requests=16, output_tokens=8)
    real = as_orders(workload, VOCABULARY, rate_per_s=None)
    assert len(warm) == 16
    assert max(order["output_tokens"] for order in warm) == 8
    starts = {tuple(order["prompt_token_ids"][:4]) for order in warm}
    assert starts.isdisjoint(tuple(order["prompt_token_ids"][:4]) for order in real)


def test_kv_for_the_largest_requests_that_run_together() -> None:
    sizes = [(1, 1), (10, 5), (3, 3)]
    workload = parse_workload(of(*({"prompt_tokens": a, "output_tokens": b} for a, b in sizes)))
    assert workload.kv_tokens(2) == 15 + 6
    assert workload.kv_tokens(64) == 15 + 6 + 2


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        ({"prompt_tokens": 0, "output_tokens": 4}, r">= 1 - at `\$\.requests\[1\]\.prompt_tokens`"),
        ({"prompt_tokens": 4, "output_tokens": 0}, r">= 1 - at `\$\.requests\[1\]\.output_tokens`"),
        ({"prompt_tokens": 4}, r"missing required field `output_tokens` - at `\$\.requests\[1\]`"),
        ({"prompt_tokens": True, "output_tokens": 4}, r"`\$\.requests\[1\]\.prompt_tokens`"),
        ({"prompt_tokens": 1.5, "output_tokens": 4}, r"`\$\.requests\[1\]\.prompt_tokens`"),
        ({"output_tokens": 4}, r"neither prompt_tokens nor prompt_token_ids - at `\$\.requests\[1\]`"),
        ({"prompt_token_ids": [], "output_tokens": 4}, r"`\$\.requests\[1\]\.prompt_token_ids`"),
        ({"prompt_token_ids": [1, "a"], "output_tokens": 4}, r"`\$\.requests\[1\]\.prompt_token_ids\[1\]`"),
        (
            {"prompt_token_ids": [1, 2], "prompt_tokens": 3, "output_tokens": 4},
            r"prompt_tokens is 3, prompt_token_ids has 2 - at `\$\.requests\[1\]`",
        ),
        ({"prompt_tokens": 4, "output_tokens": 4, "arrival": -1}, r"`\$\.requests\[1\]\.arrival`"),
        ({"prompt_tokens": 4, "output_tokens": 4, "arrival": float("inf")}, r"arrival .*`\$\.requests\[1\]`"),
        ({"prompt_tokens": 4, "output_tokens": 4, "arrival": "soon"}, r"`\$\.requests\[1\]\.arrival`"),
        ([4, 4], r"Expected `object`, got `array` - at `\$\.requests\[1\]`"),
    ],
)
def test_a_bad_request_is_named(request_: Any, says: str) -> None:
    good = {"prompt_tokens": 4, "output_tokens": 4}
    with pytest.raises(BadWorkload, match=says):
        parse_workload(of(good, request_))


@pytest.mark.parametrize("content", [[], {}, {"requests": []}, {"requests": {}}, of({}, seed=-1)])
def test_what_is_no_workload_is_refused(content: Any) -> None:
    with pytest.raises(BadWorkload):
        parse_workload(content)


def test_a_request_that_the_model_cannot_hold_is_named_with_the_limit() -> None:
    workload = parse_workload(of({"prompt_tokens": 1000, "output_tokens": 25}))
    check_workload(workload, vocabulary=10, context_tokens=1025)
    with pytest.raises(BadWorkload, match=r"request 0: prompt_tokens \(1000\) .* context of 1024 tokens"):
        check_workload(workload, vocabulary=10, context_tokens=1024)


@pytest.mark.parametrize("token_id", [-1, 10])
def test_a_token_that_the_model_does_not_have_is_named(token_id: int) -> None:
    workload = parse_workload(of({"prompt_token_ids": [9, token_id], "output_tokens": 1}))
    with pytest.raises(BadWorkload, match=rf"request 0: prompt_token_ids\[1\] is {token_id}, .* 0\.\.9"):
        check_workload(workload, vocabulary=10, context_tokens=100)


@pytest.mark.parametrize("text", ["{", "\xff", ""])
def test_a_file_that_is_not_json(tmp_path: Path, text: str) -> None:
    path = tmp_path / "workload.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(BadWorkload, match=r"workload\.json is not JSON"):
        load_workload(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadWorkload, match="cannot be read"):
        load_workload(tmp_path / "none.json")


def test_a_bad_request_in_a_file_is_named_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "workload.json"
    path.write_text(json.dumps(of({"prompt_tokens": 0, "output_tokens": 1})), encoding="utf-8")
    with pytest.raises(BadWorkload, match=r"workload\.json: .*`\$\.requests\[0\]\.prompt_tokens`"):
        load_workload(path)
