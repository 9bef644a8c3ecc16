"""A run directory as the grammar code sees it, and grammars compiled from forms without other processes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tests.workers.tokenizer_zoo import id_of
from triptych.protocol.model_card import ModelCard
from triptych.protocol.tokenizer_files import TokenizerFacts, save_tokenizer


def make_card(tokenizer: Tokenizer, **changes: Any) -> ModelCard:
    card = ModelCard(
        model="zoo",
        model_type="zoo",
        backend="none",
        num_parameters=0,
        dtype="float32",
        device="cpu",
        vocab_size=tokenizer.get_vocab_size(with_added_tokens=True) + 13,  # more than the tokenizer has
        max_model_len=1024,
        eos_token_ids=(id_of(tokenizer, "</s>"),) if tokenizer.token_to_id("</s>") is not None else (0,),
        page_size=16,
        num_pages=64,
        max_num_seqs=8,
        max_live=12,
        load_s=0.0,
    )
    return dataclasses.replace(card, **changes)


def model_dir(folder: Path, tokenizer: Tokenizer, **changes: Any) -> Path:
    """``folder`` with the files that execute writes into a run directory."""
    facts = TokenizerFacts(vocab_size=0, chat_template=None, special_tokens={}, bos_token_id=None)
    save_tokenizer(folder, tokenizer.to_str(), facts)
    make_card(tokenizer, **changes).publish(folder)
    return folder
