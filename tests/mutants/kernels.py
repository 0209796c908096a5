"""Mutants of the GPU's kernels; their tests run them in Triton's interpreter."""

from __future__ import annotations

from tests.mutants.mutations import mutations_of

ATTENTION = "kernels/gpu/varlen_attention.py"
DECODE = "kernels/gpu/decode_attention.py"
VARLEN_TEST = "tests/unit/kernels/gpu/test_varlen_attention.py"
DECODE_TEST = "tests/unit/kernels/gpu/test_decode_attention.py"
RAGGED = f"{VARLEN_TEST}::test_prompts_chunks_and_decodes_are_attended_as_by_the_twin"
SMALL_TILES = f"{VARLEN_TEST}::test_tiles_may_be_smaller_than_a_program_takes"
EDGES = f"{DECODE_TEST}::test_contexts_about_the_ends_of_blocks_are_attended_as_by_the_twin"
CUT = f"{DECODE_TEST}::test_a_context_that_is_cut_is_attended_as_a_whole_one"
FAR = f"{DECODE_TEST}::test_a_block_beyond_two_to_the_31_numbers_is_found"
DRAW, DRAW_TEST = "kernels/gpu/draw.py", "tests/unit/kernels/gpu/test_draw.py"
ROTATE, ROTATE_TEST = "kernels/gpu/rotary_write.py", "tests/unit/kernels/gpu/test_rotary_write.py"
NORM, NORM_TEST = "kernels/gpu/add_norm.py", "tests/unit/kernels/gpu/test_add_norm.py"

KERNEL_MUTATIONS = mutations_of(
    [
        (ATTENTION, "attention: a token sees the next one", "(distance >= 0)", "(distance >= -1)", RAGGED),
        (ATTENTION, "attention: a window is one token wider", "distance < window", "distance <= window", RAGGED),
        (ATTENTION, "attention: what lies before a window is read", "(positions >= lowest) & ", "", EDGES),
        (ATTENTION, "attention: keys beyond the context are read", " & (positions < end)", "", EDGES),
        (ATTENTION, "attention: heads of the cache are not told apart", "key_cache += kv_head * key_head", "key_cache += 0", RAGGED),
        (ATTENTION, "attention: rows of queries are taken to touch", "*query.stride()[:2], *key", "heads * dim, dim, *key", RAGGED),
        (ATTENTION, "attention: a padded group shifts the heads", "head = kv_head * group + member", "head = kv_head * members + member", RAGGED),
        (ATTENTION, "attention: a chunk starts at its context's beginning", "distance = (position + token)", "distance = (token)", RAGGED),
        (ATTENTION, "attention: what was summed is not rescaled", "sums * rescale[:, None]", "sums", RAGGED),
        (ATTENTION, "attention: padded tokens of a tile are written", "is_row = (token < count) & ", "is_row = (token < 99) & ", SMALL_TILES),
        (ATTENTION, "attention: a row of padding is not zeroed", "tl.where(total == 0, 1.0, total)", "total", EDGES),
        (ATTENTION, "attention: every part has the sink", "tl.where(part == 0, sink, top), tl.where(part == 0, 1.0, total)", "sink, total + 1", CUT),
        (ATTENTION, "attention: places are 32-bit numbers", "mask=is_key, other=0)", "mask=is_key, other=0).to(tl.int32)", FAR),
        (DECODE, "attention: parts are combined as if of one weight", "weights = tl.exp2(exponent - tl.max(exponent, 0))", "weights = tl.where(is_part, 1.0, 0.0)", CUT),
        (DECODE, "attention: parts that were not written are combined", "is_part = start + part * each < context", "is_part = part < parts", CUT),
    ]
)  # fmt: skip
SAMPLING_KERNEL_MUTATIONS = mutations_of(
    [
        (
            DRAW,
            "gpu: the hash mixes a key less",
            "(bits * MIX) ^ second",
            "bits * MIX",
            f"{DRAW_TEST}::test_the_noise_is_the_twins",
        ),
        (
            DRAW,
            "gpu: a threshold is one step too high",
            "return _rank(low.to(tl.int32)).to(tl.float32, bitcast=True)",
            "return _rank((low + 1).to(tl.int32)).to(tl.float32, bitcast=True)",
            f"{DRAW_TEST}::test_a_cut_leaves_what_the_twins_leaves",
        ),
        (
            DRAW,
            "gpu: of equal tokens the last is taken",
            "token = tl.min(tl.where(values == tl.max(values, 0), tokens, vocabulary), 0)",
            "token = tl.max(tl.where(values == tl.max(values, 0), tokens, 0), 0)",
            f"{DRAW_TEST}::test_the_first_of_equal_tokens_is_taken",
        ),
        (
            DRAW,
            "gpu: what lies beyond the vocabulary is read",
            "raw = tl.load(logits + tokens, mask=tokens < vocabulary, other=NO_CHANCE).to(tl.float32)",
            "raw = tl.load(logits + tokens).to(tl.float32)",
            f"{DRAW_TEST}::test_every_mixture_of_options_gives_the_twins_tokens",
        ),
        (
            ROTATE,
            "gpu: padding is written",
            "    if slot >= 0:\n",
            "    if slot >= -1:\n",
            f"{ROTATE_TEST}::test_rotation_is_the_twins",
        ),
        (
            "kernels/gpu/write_slots.py",
            "gpu: padding is written by the plain write",
            "    if slot >= 0:\n",
            "    if slot >= -1:\n",
            f"{ROTATE_TEST}::test_a_write_is_the_twins",
        ),
        (
            ROTATE,
            "gpu: rotated the other way round",
            "turned_other = (second * cosine + first * sine)",
            "turned_other = (second * cosine - first * sine)",
            f"{ROTATE_TEST}::test_only_what_has_a_norm_is_normalised",
        ),
        (
            NORM,
            "gpu: the norm is of the residual that was not rounded",
            "(total.to(tl.float32) + added.to(tl.float32)).to(total.dtype)",
            "total.to(tl.float32) + added.to(tl.float32)",
            f"{NORM_TEST}::test_addition_and_norm_are_the_twins",
        ),
        (
            NORM,
            "gpu: the mean is of the padded width",
            "tl.sum(whole * whole, 0) / width",
            "tl.sum(whole * whole, 0) / padded",
            f"{NORM_TEST}::test_addition_and_norm_are_the_twins",
        ),
    ]
)
