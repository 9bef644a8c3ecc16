"""What execute has computed about a prompt itself: the logprobs of its tokens, or its embedding."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..scores import ScoreColumns, row_words, unpack_scores
from .layout import Journal, split_word
from .requests import RequestView
from .tokens import prompt_words, read_tokens


def has_prompt_results(journal: Journal, view: RequestView) -> bool:
    """Whether what the request asked about its prompt is complete; False if it asked for nothing."""
    if not view.record.asks_about_prompt:
        return False
    if view.record.num_prompt_words == 0:
        return True  # a prompt of one token has no logprobs
    count, check = split_word(journal.tokens_words[view.slot])
    return (count > 0 or check != view.generation) and read_tokens(journal, view) is not None


def read_scores(journal: Journal, view: RequestView) -> ScoreColumns | None:
    """The scores of the prompt's tokens; None if not requested, or not complete yet."""
    num_alternatives = view.record.num_prompt_logprobs
    if num_alternatives is None or not has_prompt_results(journal, view):
        return None
    return unpack_scores(prompt_words(journal, view).copy().reshape(-1, row_words(num_alternatives)))


def read_embedding(journal: Journal, view: RequestView) -> npt.NDArray[np.float32] | None:
    """The embedding of the prompt, float32 [embedding_size]; None if not requested, or not complete yet."""
    if not view.record.embedding_size or not has_prompt_results(journal, view):
        return None
    return prompt_words(journal, view).copy().view(np.float32)
