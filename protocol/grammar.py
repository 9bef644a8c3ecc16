"""What prepare, which validates a grammar, and execute, which runs it, must agree on. Neither imports the other."""

from __future__ import annotations

from typing import Any

from .model_card import ModelCard

MAX_SOURCE_BYTES = 256 << 10  # of a schema, a regular expression or a grammar, as UTF-8
# Of JSON: a space, or line breaks and indentation. Without a bound a small model produces white space until max_tokens.
# What a schema's own "x-guidance" says of white space takes precedence.
JSON_WHITESPACE = r"\x20|\x0A{1,2}[\x20\x09]{0,20}"
# For llguidance, on top of its defaults: a state takes one to two kilobytes, and errors must not quote a schema.
PARSER_LIMITS: dict[str, Any] = {"max_lexer_states": 50_000, "verbose_errors": False}


def tokenizer_options(card: ModelCard) -> dict[str, Any]:
    """Arguments of ``LLTokenizer`` besides the tokenizer: the mask's width and the tokens that end an answer.

    The model may have more ids than its tokenizer; those are in the mask but never allowed.
    """
    return {"n_vocab": card.vocab_size, "eos_token": list(card.eos_token_ids)}
