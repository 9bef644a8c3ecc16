"""Small tokenizers of every kind that decodes differently, trained on a few sentences."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SENTENCES = (
    "The quick brown fox jumps over the lazy dog, doesn't it? Yes: it does!",
    "def getattr(object, name): return object.__dict__[name]  # no default",
    "Ein naïver Café-Besitzer aß für 3,50 € einen Döner.",
    "东京タワーは高い。我能吞下玻璃而不伤身体。",
    "مرحبا بالعالم، كيف حالك اليوم؟",
    "family 👨‍👩‍👧‍👦 flag 🏴󠁧󠁢󠁳󠁣󠁴󠁿 wave 👋🏽 e\u0301 done",
)
_SPECIAL = ("<s>", "</s>", "<|user|>")


@cache
def byte_level() -> Tokenizer:
    """Like GPT-2, Llama 3 and Qwen; with special and ordinary added tokens, in and out of its alphabet."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(_SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>"), AddedToken("<思考>"), AddedToken("Ġé", normalized=False)])
    tokenizer.add_special_tokens([AddedToken("<|终|>")])
    return tokenizer


@cache
def byte_level_in_a_sequence() -> Tokenizer:
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return tokenizer


@cache
def llama2() -> Tokenizer:
    """SentencePiece BPE with byte fallback; the space before the first word is dropped."""
    tokenizer = _byte_fallback()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@cache
def gemma() -> Tokenizer:
    """SentencePiece BPE with byte fallback; the text is kept unchanged."""
    tokenizer = _byte_fallback()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


@cache
def metaspace() -> Tokenizer:
    """SentencePiece Unigram, like T5."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=[*_SPECIAL, "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    return tokenizer


@cache
def word_piece() -> Tokenizer:
    """Like BERT: words joined by spaces, punctuation cleaned up."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=[*_SPECIAL, "[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    return tokenizer


@cache
def bpe_suffix() -> Tokenizer:
    """Words end in ``</w>``, which is a space unless nothing follows."""
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(_SPECIAL), end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    return tokenizer


@cache
def undecorated() -> Tokenizer:
    """No decoder: tokens joined by spaces."""
    tokenizer = Tokenizer.from_str(word_piece().to_str())
    tokenizer.decoder = None
    return tokenizer


def id_of(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None, f"{token} is not a token"
    return token_id


BYTE_LEVEL: dict[str, Callable[[], Tokenizer]] = {"byte_level": byte_level, "in_a_sequence": byte_level_in_a_sequence}
OTHERS: dict[str, Callable[[], Tokenizer]] = {
    "llama2": llama2,
    "gemma": gemma,
    "metaspace": metaspace,
    "word_piece": word_piece,
    "bpe_suffix": bpe_suffix,
    "undecorated": undecorated,
}
ALL = {**BYTE_LEVEL, **OTHERS}


def _byte_fallback() -> Tokenizer:
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=[*_SPECIAL, "<unk>", *byte_tokens], limit_alphabet=60, show_progress=False
    )
    trained.train_from_iterator(SENTENCES * 3, trainer)
    return _with_byte_fallback(trained)


def _with_byte_fallback(trained: Tokenizer) -> Tokenizer:
    """The same tokenizer as loaded from a checkpoint: byte tokens are pieces, not special tokens."""
    form = json.loads(trained.to_str())
    form["model"].update(byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    form["added_tokens"] = [token for token in form["added_tokens"] if not token["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(form))
