"""Counts a checkpoint's exact answers: per phrasing over all entries, and over questions it must decline.

Run ``python -m triptych.launch.demo_model.training.evaluate`` for the committed checkpoint. Generation uses plain
transformers, batched and greedy, so that the table does not depend on the engine it is an oracle for.
"""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from ....protocol.config import DEMO_CHECKPOINT
from ..entries import OFF_TOPIC_ANSWER, PHRASINGS, load_entries
from .conversations import EXTRA_PHRASINGS, Conversation, Turn, ordered_pairs
from .off_topic import HELD_OUT_OFF_TOPIC, invented_name
from .tokenizer import ConversationEncoder

MAX_NEW_TOKENS = 160  # the longest answer has fewer
BATCH_SIZE = 128
HELD_OUT_NAMES_SEED = 2_000_003  # the training never draws from this seed


Chat: TypeAlias = list[dict[str, str]]  # messages with "role" and "content"


class Score(NamedTuple):
    """Exact answers to one group of questions."""

    group: str
    num_exact: int
    num_asked: int


def one_question(question: str) -> Chat:
    """A chat that consists only of ``question``."""
    return [{"role": "user", "content": question}]


def held_out_turns() -> list[Turn]:
    """Questions not in the training data that must all get ``OFF_TOPIC_ANSWER``."""
    rng = random.Random(HELD_OUT_NAMES_SEED)
    entries = tuple(load_entries())
    names = (invented_name(rng, entries) for _ in range(400))
    long_names = [name for name in names if len(name) >= 10][:60]  # the training may have drawn the same short ones
    invented = [rng.choice(PHRASINGS + EXTRA_PHRASINGS).format(name=name) for name in long_names]
    return [Turn(question, OFF_TOPIC_ANSWER) for question in (*HELD_OUT_OFF_TOPIC, *invented)]


def load_checkpoint(
    folder: Path = DEMO_CHECKPOINT, *, dtype: torch.dtype = torch.float32
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The model in evaluation mode, computing in ``dtype`` from the stored bfloat16 weights, and its tokenizer."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    return model, PreTrainedTokenizerFast.from_pretrained(folder)


@torch.inference_mode()
def generate_answers(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, chats: Sequence[Chat]
) -> list[str | None]:
    """The greedy answer to each chat; None if it did not end with EOS."""
    prompts = [_render(tokenizer, chat) for chat in chats]
    answers: dict[int, str | None] = {}
    by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for start in range(0, len(prompts), BATCH_SIZE):
        rows = by_length[start : start + BATCH_SIZE]
        inputs = tokenizer.pad({"input_ids": [prompts[row] for row in rows]}, return_tensors="pt")
        # The stub of generate asks for a protocol that the Llama class does not declare.
        outputs = model.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
        for row, output_ids in zip(rows, outputs[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            answers[row] = _decode_until_eos(tokenizer, output_ids)
    return [answers[row] for row in range(len(prompts))]


@torch.inference_mode()
def answer_margins(model: LlamaForCausalLM, encoder: ConversationEncoder, turns: Sequence[Turn]) -> list[float]:
    """Per turn, the smallest lead (in logits) of a correct answer token over the best wrong one.

    A positive margin means that greedy decoding gives the exact answer, because each correct token leads to the prefix
    that the next one was scored on. One forward pass per batch, so much cheaper than generation.
    """
    margins = [0.0] * len(turns)
    encoded = [encoder.encode(Conversation(None, (turn,))) for turn in turns]
    by_length = sorted(range(len(turns)), key=lambda index: len(encoded[index].token_ids))
    for start in range(0, len(turns), BATCH_SIZE):
        rows = by_length[start : start + BATCH_SIZE]
        longest = len(encoded[rows[-1]].token_ids)
        token_ids = torch.tensor([_padded(encoded[row].token_ids, longest) for row in rows])
        is_answer = torch.tensor([_padded(encoded[row].is_answer, longest) for row in rows], dtype=torch.bool)
        lead = _token_margins(model(input_ids=token_ids).logits[:, :-1].float(), token_ids[:, 1:])
        smallest = lead.masked_fill(~is_answer[:, 1:], float("inf")).amin(dim=1)
        for row, margin in zip(rows, smallest.tolist(), strict=True):
            margins[row] = margin
    return margins


def score_checkpoint(folder: Path, *, dtype: torch.dtype) -> list[Score]:
    """Exact answers per phrasing over all entries, then over the held-out off-topic questions."""
    model, tokenizer = load_checkpoint(folder, dtype=dtype)
    turns = ordered_pairs(load_entries())
    num_entries = len(turns) // len(PHRASINGS)
    groups = [
        (phrasing, turns[index * num_entries : (index + 1) * num_entries]) for index, phrasing in enumerate(PHRASINGS)
    ]
    groups.append(("held-out off-topic", held_out_turns()))
    scores = []
    for group, asked in groups:
        answers = generate_answers(model, tokenizer, [one_question(turn.question) for turn in asked])
        num_exact = sum(answer == turn.answer for answer, turn in zip(answers, asked, strict=True))
        scores.append(Score(group, num_exact, len(asked)))
    return scores


def print_table(folder: Path) -> None:
    """Print the scores in fp32 and bf16 side by side, and the smallest margin of each."""
    scores = {dtype: score_checkpoint(folder, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
    print(f"{'exact answers':<24}{'fp32':>12}{'bf16':>12}")
    for fp32, bf16 in zip(scores[torch.float32], scores[torch.bfloat16], strict=True):
        cells = [f"{score.num_exact}/{score.num_asked}" for score in (fp32, bf16)]
        print(f"{fp32.group:<24}{cells[0]:>12}{cells[1]:>12}")
    smallest = [_smallest_margin(folder, dtype) for dtype in scores]
    print(f"{'smallest logit margin':<24}{smallest[0]:>12.2f}{smallest[1]:>12.2f}")


def _smallest_margin(folder: Path, dtype: torch.dtype) -> float:
    model, tokenizer = load_checkpoint(folder, dtype=dtype)
    return min(answer_margins(model, ConversationEncoder(tokenizer), ordered_pairs(load_entries())))


def _token_margins(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Logit of the target minus the best other one, [rows, length], from [rows, length, vocab] and [rows, length]."""
    right = logits.gather(2, targets[..., None]).squeeze(2)
    is_target = functional.one_hot(targets, logits.shape[2]).bool()
    return right - logits.masked_fill(is_target, float("-inf")).amax(dim=2)


def _render(tokenizer: PreTrainedTokenizerFast, chat: Chat) -> list[int]:
    rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    token_ids: list[int] = tokenizer.encode(rendered, add_special_tokens=False)
    return token_ids


def _decode_until_eos(tokenizer: PreTrainedTokenizerFast, token_ids: list[int]) -> str | None:
    if tokenizer.eos_token_id not in token_ids:
        return None
    return str(tokenizer.decode(token_ids[: token_ids.index(tokenizer.eos_token_id)]))


def _padded(row: Sequence[int], length: int) -> list[int]:
    # Padding on the right is invisible to causal attention, so no mask is needed.
    return [*row, *[0] * (length - len(row))]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Count the exact answers of a demo model checkpoint.")
    parser.add_argument("folder", type=Path, nargs="?", default=DEMO_CHECKPOINT)
    print_table(parser.parse_args().folder)
