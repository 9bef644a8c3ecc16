"""The committed demo model: its entries, its tokenizer, and a sample of its answers, word for word."""

import random
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from triptych.launch.demo_model.entries import (
    BARE_METHOD_ANSWER,
    GREETING_ANSWER,
    MAX_ANSWER_CHARS,
    OFF_TOPIC_ANSWER,
    PHRASINGS,
    collect_entries,
    first_paragraph,
    load_entries,
)
from triptych.launch.demo_model.training.conversations import Conversation, Mixture, Turn, sample_epoch
from triptych.launch.demo_model.training.evaluate import generate_answers, load_checkpoint, one_question
from triptych.launch.demo_model.training.off_topic import HELD_OUT_OFF_TOPIC
from triptych.launch.demo_model.training.tokenizer import ConversationEncoder
from triptych.protocol.config import DEMO_CHECKPOINT

MAX_FOLDER_BYTES = 8_000_000


@cache
def loaded_checkpoint() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    return load_checkpoint(dtype=torch.float32)


def answers_to(*questions: str) -> list[str | None]:
    return generate_answers(*loaded_checkpoint(), [one_question(question) for question in questions])


def test_entries_are_sorted_unique_and_short() -> None:
    entries = load_entries()
    names = [entry.name for entry in entries]
    assert len(names) > 350
    assert names == sorted(set(names))
    assert all(0 < len(entry.answer) <= MAX_ANSWER_CHARS for entry in entries)


def test_entries_of_the_running_python_cover_most_frozen_names() -> None:
    frozen = {entry.name for entry in load_entries()}
    running = {entry.name for entry in collect_entries()}
    assert len(frozen & running) > 0.9 * len(frozen)


@pytest.mark.parametrize(
    ("docstring", "answer"),
    [
        ("vars([object]) -> dictionary\n\nWithout arguments,\nequivalent to locals().",
         "Without arguments, equivalent to locals()."),
        ("rangeobject.count(value) -> integer -- return number of  occurrences", "return number of occurrences"),
        ("D.copy() -> a shallow copy of D", "D.copy() -> a shallow copy of D"),
        ("Sort.\n\nThe sort is in-place.", "Sort."),
        ("One sentence. " * 40, " ".join(["One sentence."] * 25)),
    ],
    ids=["signature apart", "signature inline", "signature only", "first paragraph", "cut at a sentence end"],
)  # fmt: skip
def test_first_paragraph(docstring: str, answer: str) -> None:
    assert first_paragraph(docstring) == answer


def test_sample_of_entries_is_answered_word_for_word() -> None:
    rng = random.Random(20)
    pairs = [(entry, phrasing) for entry in rng.sample(load_entries(), 20) for phrasing in rng.sample(PHRASINGS, 2)]
    answers = answers_to(*[phrasing.format(name=entry.name) for entry, phrasing in pairs])
    assert answers == [entry.answer for entry, _ in pairs]


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is the capital of Portugal?", OFF_TOPIC_ANSWER),
        ("What does frobnicate do?", OFF_TOPIC_ANSWER),
        ("What does split do?", BARE_METHOD_ANSWER),
        ("Hello!", GREETING_ANSWER),
    ],
)
def test_other_questions_get_a_fixed_sentence(question: str, answer: str) -> None:
    assert answers_to(question) == [answer]


def test_most_held_out_questions_are_declined() -> None:
    answers = answers_to(*HELD_OUT_OFF_TOPIC)
    assert answers.count(OFF_TOPIC_ANSWER) >= 0.8 * len(answers)


def test_later_turn_is_answered_like_a_first_one() -> None:
    entries = {entry.name: entry.answer for entry in load_entries()}
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "What does str.split do?"},
        {"role": "assistant", "content": entries["str.split"]},
        {"role": "user", "content": "help(getattr)"},
    ]
    assert generate_answers(*loaded_checkpoint(), [messages]) == [entries["getattr"]]


def test_chat_template_marks_every_turn() -> None:
    _, tokenizer = loaded_checkpoint()
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "abs?"}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert rendered == "<|system|>Be brief.<|end|><|user|>abs?<|end|><|assistant|>"


def test_training_rows_equal_the_chat_template() -> None:
    _, tokenizer = loaded_checkpoint()
    conversation = Conversation("Be brief.", (Turn("abs?", "Return."), Turn("What is é 🙂?", OFF_TOPIC_ANSWER)))
    messages = [{"role": "system", "content": "Be brief."}]
    for question, answer in conversation.turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    encoded = ConversationEncoder(tokenizer).encode(conversation)
    assert encoded.token_ids == tokenizer.encode(rendered)


def test_epoch_contains_every_entry_and_depends_only_on_the_seed() -> None:
    entries = tuple(load_entries())
    first, again = (sample_epoch(entries, upweighted=(), mixture=Mixture(), rng=random.Random(1)) for _ in range(2))
    answers = {turn.answer for conversation in first for turn in conversation.turns}
    assert first == again
    assert answers > {entry.answer for entry in entries}


@pytest.mark.parametrize(
    "text", ["", " a\n\tb  ", "naïve café", "👩‍👩‍👧 🇩🇪", "日本語 العربية", "\x00\x7f\ufffd", "def f(x): ..."]
)
def test_tokenizer_round_trips_any_text(text: str) -> None:
    _, tokenizer = loaded_checkpoint()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_checkpoint_has_the_standard_format() -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO_CHECKPOINT)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_CHECKPOINT)
    assert isinstance(model, LlamaForCausalLM)
    assert model.dtype == torch.bfloat16
    assert model.config.head_dim == 64
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_checkpoint_is_small() -> None:
    files = [file for file in DEMO_CHECKPOINT.parent.rglob("*.*") if "__pycache__" not in file.parts]
    assert sum(file.stat().st_size for file in files) <= MAX_FOLDER_BYTES
