"""The demo model on the compiled decoder: all its answers are right, and 8 or 4 bits cost almost nothing."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from tests.workers.execute.model.native.decoders import NativeEngine, make_inputs
from triptych.launch.demo_model.entries import PHRASINGS, load_entries
from triptych.launch.demo_model.training.conversations import Conversation, ordered_pairs
from triptych.launch.demo_model.training.evaluate import MAX_NEW_TOKENS, load_checkpoint
from triptych.launch.demo_model.training.tokenizer import ConversationEncoder
from triptych.protocol.config import DEMO_CHECKPOINT
from triptych.protocol.sampling import SamplingParams
from triptych.workers.execute.kernels.memory import Arena
from triptych.workers.execute.model.facts import no_progress
from triptych.workers.execute.model.native.build import NativeSetting
from triptych.workers.execute.model.native.proven import load_native
from triptych.workers.execute.model.tokenizer import load_tokenizer
from triptych.workers.execute.scheduling.sequence import Sequence

NUM_PAGES = 2048
NUM_TURNS = 120  # of the perplexity


@cache
def encoder() -> ConversationEncoder:
    return ConversationEncoder(load_checkpoint()[1])


@cache
def entry_turns() -> tuple[list[list[int]], list[list[int]]]:
    """The prompts and the answers of all entries, each in one of the phrasings."""
    turns = ordered_pairs(load_entries())
    num_entries = len(turns) // len(PHRASINGS)
    encoded = [
        encoder().encode(Conversation(None, (turns[i + i % len(PHRASINGS) * num_entries],))) for i in range(num_entries)
    ]
    starts = [row.is_answer.index(True) for row in encoded]
    prompts = [list(row.token_ids[:start]) for row, start in zip(encoded, starts, strict=True)]
    answers = [list(row.token_ids[start:]) for row, start in zip(encoded, starts, strict=True)]
    return prompts, answers


def num_exact(engine: NativeEngine) -> int:
    """How many entries are answered word for word, end of sequence included, in one batch."""
    prompts, answers = entry_turns()
    eos = frozenset(engine.card.eos_token_ids)
    requests = [ask(i, prompt, eos) for i, prompt in enumerate(prompts)]
    outputs = engine.run(*requests, max_num_seqs=len(prompts), num_pages=NUM_PAGES)
    return sum(output == answer for output, answer in zip(outputs, answers, strict=True))


def ask(index: int, prompt: list[int], stop_ids: frozenset[int]) -> Sequence:
    tokens = np.zeros(len(prompt) + MAX_NEW_TOKENS, np.int32)
    tokens[: len(prompt)] = prompt
    return Sequence(
        key=(index, 0),
        tokens=tokens,
        num_prompt_tokens=len(prompt),
        num_tokens=len(prompt),
        params=SamplingParams(max_tokens=MAX_NEW_TOKENS),
        seed=0,
        arrival=index,
        stop_ids=stop_ids,
    )


@pytest.mark.parametrize(("dtype", "quantization", "kv_dtype", "least"), [
    ("float32", "none", "auto", 411), ("bfloat16", "none", "auto", 411), ("bfloat16", "int8", "auto", 405),
    ("bfloat16", "int4", "auto", 405), ("bfloat16", "none", "int8", 411),
])  # fmt: skip
def test_answers_are_exact(
    dtype: str, quantization: str, kv_dtype: str, least: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("demo")
    options: dict[str, Any] = {"dtype": dtype, "quantization": quantization}
    engine = NativeEngine(DEMO_CHECKPOINT, folder, num_pages=NUM_PAGES, kv_dtype=kv_dtype, **options)
    assert num_exact(engine) >= least


def answer_losses(quantization: str, kv_dtype: str = "auto") -> np.ndarray:
    """For every token of some answers, the negative logarithm of its probability.

    Not for those of the prompts, which the model was not trained on: it takes most of them to be impossible.
    """
    native = load_native(
        DEMO_CHECKPOINT,
        load_tokenizer(DEMO_CHECKPOINT),
        dtype="bfloat16",
        setting=NativeSetting(
            quantization=quantization,
            page_size=16,
            has_eight_bit_pages=kv_dtype == "int8",
            threads=None,
            progress=no_progress,
        ),
    )
    decoder = native.make_decoder(64, 1024, 0, Arena)
    losses = []
    for prompt, answer in list(zip(*entry_turns(), strict=True))[:NUM_TURNS]:
        ids = np.array(prompt + answer, np.int32)
        logits = torch.from_numpy(decoder.run(make_inputs([(ids, 0, len(ids))], num_pages=64)).logits)
        places = torch.arange(len(prompt), len(ids))
        expected = torch.from_numpy(ids)[places].long()
        losses.append(torch.nn.functional.cross_entropy(logits[places - 1], expected, reduction="none"))
    return torch.cat(losses).double().numpy()


def test_eight_bits_change_the_perplexity_of_answers_by_less_than_a_hundred_thousandth() -> None:
    exact = answer_losses("none")
    others = (answer_losses(*types) for types in (("int8",), ("none", "int8"), ("int4",)))
    weights, pages, four_bits = (abs(np.exp((each - exact).mean()) - 1) for each in others)
    assert weights < 1e-5
    assert pages < 1e-5
    assert four_bits > 1e-5, "this test would not notice much"
