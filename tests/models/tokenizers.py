"""Kinds of tokenizer that the incremental text must cope with.

Small real ones, trained here on a few sentences: one for each way in which decoders join tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPECIAL = ["<s>", "</s>", "<|user|>"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog; it isn't tired, is it?",
    "  Two  spaces,\ttabs and\nnew lines. Zahlen: 1234567890 und Ümläute äöüß.",
    "Ça va? Où est l'élève? 你好，世界。我们去学校。 こんにちは世界 Привет мир",
    "👍🏽 👩‍👩‍👧 🎉🎉 the end of the theme, thereby; hello hello world, don't do that.",
] * 3


def byte_level() -> Tokenizer:
    """GPT-2, Llama 3, Qwen: tokens are bytes, so a character may take several."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _train(tokenizer, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Llama 1 and 2, Mistral, Gemma: spaces are a mark, unknown characters are byte tokens."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    _train(
        tokenizer,
        trainers.BpeTrainer(
            vocab_size=480, special_tokens=["<unk>", *byte_tokens], limit_alphabet=60, show_progress=False
        ),
    )
    # Trained as special tokens, so that all are there; in a real vocabulary they are ordinary ones.
    fields = json.loads(tokenizer.to_str())
    fields["added_tokens"] = [
        token for token in fields["added_tokens"] if token["content"] not in byte_tokens
    ]
    return Tokenizer.from_str(json.dumps(fields))


def metaspace() -> Tokenizer:
    """T5, XLNet: a unigram model whose decoder drops the first token's leading space."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    _train(
        tokenizer,
        trainers.UnigramTrainer(
            vocab_size=200, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
        ),
    )
    return tokenizer


def word_piece() -> Tokenizer:
    """BERT's kind: a token's spacing depends on whether it is the first, and on what it is."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    _train(
        tokenizer, trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"], show_progress=False)
    )
    return tokenizer


def word_suffix() -> Tokenizer:
    """GPT-1's kind: a token's trailing space depends on whether it is the last."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder()
    _train(
        tokenizer,
        trainers.BpeTrainer(
            vocab_size=300, end_of_word_suffix="</w>", special_tokens=["<unk>"], show_progress=False
        ),
    )
    return tokenizer


def _train(tokenizer: Tokenizer, trainer: trainers.Trainer) -> None:
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "byte-fallback": byte_fallback,
    "metaspace": metaspace,
    "word-piece": word_piece,
    "word-suffix": word_suffix,
}
