"""Compiled pass that draws tokens: the cuts of top-k, top-p and min-p, then the arg max of score plus noise.

The rule is that of `kernels.sampling.draw`, row by row: a token depends on its own row alone. Masses are
whole numbers, so that their sums do not depend on the order either."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from kernels.cpu.jit import compiled
from kernels.cpu.layers import RANK_OF_MINUS_INFINITY, SEARCHED_AT_ONCE
from kernels.cpu.math import exp_nonpositive, greatest_of, log_of, rank_of

BUCKETS = 1024
BUCKETS_A_UNIT = np.float32(32)
WHOLE = np.float32(2.0**40)
"""Mass of the best token."""
TO_UNIFORM = np.float32(2.0**-31)
BELOW_ONE = np.float32(1 - 2.0**-24)
FIRST_SALT, SECOND_SALT = np.uint32(0x9E3779B1), np.uint32(0x7F4A7C15)
NO_CHANCE = np.float32(-np.inf)


@compiled(inline=True)
def shifted(bits: Any, places: Any) -> Any:
    return np.uint32(bits ^ (bits >> np.uint32(places)))


@compiled()
def key_of(seed: Any, index: Any, salt: Any) -> Any:
    """A row's key: a hash of seed and token index, by MurmurHash3's finaliser."""
    key = np.uint32(0)
    for word in (np.uint32(np.uint32(index) ^ salt), np.uint32(seed >> 32), np.uint32(seed)):
        key = shifted(np.uint32(key ^ word), 16)
        key = shifted(np.uint32(key * np.uint32(0x85EBCA6B)), 13)
        key = shifted(np.uint32(key * np.uint32(0xC2B2AE35)), 16)
    return key


@compiled(inline=True)
def noise_of(token_id: Any, first: Any, second: Any) -> Any:
    """Gumbel noise of a token from its row's keys: minus the logarithm of an exponential number."""
    bits = shifted(np.uint32(np.uint32(np.uint32(token_id) * np.uint32(0x9E3779B1)) + first), 16)
    bits = shifted(np.uint32(np.uint32(bits * np.uint32(0x85EBCA6B)) ^ second), 13)
    bits = shifted(np.uint32(bits * np.uint32(0xC2B2AE35)), 16)
    uniform = (np.float32(np.int32(bits >> np.uint32(1))) + np.float32(0.5)) * TO_UNIFORM
    uniform = min(uniform, BELOW_ONE)
    exponential = -log_of(np.float32(1) - uniform, -uniform)
    return -log_of(exponential, exponential - np.float32(1))


@compiled()
def threshold_of(scores: Any, masses: Any, best: Any, unit: Any, wanted: Any) -> Any:
    """The greatest score such that the masses of those not below it reach `wanted` (at least 1). Buckets of
    1 / 32 `unit` below the best narrow the search; inside of the last bucket the bits are bisected."""
    sums = np.zeros(BUCKETS, np.int64)
    buckets = np.empty(scores.shape[0], np.int16)
    scale = BUCKETS_A_UNIT / unit
    for index in range(scores.shape[0]):
        buckets[index] = np.int16(min((best - scores[index]) * scale, np.float32(BUCKETS - 1)))
    for index in range(scores.shape[0]):
        sums[buckets[index]] += masses[index]
    last, better = 0, np.int64(0)
    while last < BUCKETS - 1 and better + sums[last] < wanted:
        better += sums[last]
        last += 1
    near, near_masses, count = np.empty_like(scores), np.empty_like(masses), 0
    for index in range(scores.shape[0]):
        near[count], near_masses[count] = scores[index], masses[index]
        count += buckets[index] == last
    low = np.int64(RANK_OF_MINUS_INFINITY)
    high = np.int64(rank_of(np.float32(best).view(np.int32))) + 1
    while high - low > 1:
        middle = (low + high) // 2
        threshold = np.int32(rank_of(np.int32(middle))).view(np.float32)
        mass = better
        for index in range(count):
            mass += near_masses[index] if near[index] >= threshold else 0
        if mass >= wanted:
            low = middle
        else:
            high = middle
    return np.int32(rank_of(np.int32(low))).view(np.float32)


@compiled(parallel=True)
def draw(scores: Any, floats: Any, integers: Any, greedy_below: Any, winners: Any, workers: int) -> None:
    """Replaces `winners[row]`, the best token of `scores[row]` (float32, no NaN), by the drawn one where the
    temperature is not below `greedy_below`. `floats`: temperature, top-p, logarithm of min-p; `integers`:
    top-k, seed, token index; each a row of `[3, rows]`."""
    width = scores.shape[1]
    for worker in prange(workers):
        masses = np.empty(width, np.int64)
        values = np.empty(SEARCHED_AT_ONCE, np.float32)
        for row in range(worker, scores.shape[0], workers):
            temperature, top_p, least = floats[0, row], floats[1, row], floats[2, row]
            top_k, seed, token_index = integers[0, row], integers[1, row], integers[2, row]
            if temperature < greedy_below:
                continue
            mine, best, threshold = scores[row], scores[row, winners[row]], NO_CHANCE
            if 0 < top_k < width:
                masses[:] = 1
                threshold = threshold_of(mine, masses, best, np.float32(1), top_k)
            if top_p < 1:
                total = np.int64(0)
                for token in range(width):
                    share = exp_nonpositive((mine[token] - best) / temperature) * WHOLE
                    masses[token] = np.int64(share) if mine[token] >= threshold else 0
                for token in range(width):
                    total += masses[token]
                wanted = max(np.int64(1), np.int64(np.ceil(np.float64(top_p) * np.float64(total))))
                threshold = max(threshold, threshold_of(mine, masses, best, temperature, wanted))
            first = key_of(seed, token_index, FIRST_SALT)
            second = key_of(seed, token_index, SECOND_SALT)
            most = NO_CHANCE
            for start in range(0, width, SEARCHED_AT_ONCE):
                part = mine[start : start + SEARCHED_AT_ONCE]
                for token in range(part.shape[0]):
                    distance = (part[token] - best) / temperature
                    is_kept = part[token] >= threshold and distance >= least
                    noisy = distance + noise_of(start + token, first, second)
                    values[token] = noisy if is_kept else NO_CHANCE
                local = greatest_of(values[: part.shape[0]])
                if local > most:
                    most, place = local, 0
                    while values[place] != local:
                        place += 1
                    winners[row] = start + place
