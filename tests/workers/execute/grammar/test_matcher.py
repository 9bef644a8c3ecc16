"""Masks compared with an independent oracle: a token is allowed if ``re`` can still complete the text."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.workers import tokenizer_zoo
from tests.workers.grammars import make_card, model_dir
from triptych.protocol.reasoning import END, START, Calls, Channels, Tags
from triptych.workers.execute.grammar.matcher import (
    GrammarCompiler,
    GrammarError,
    GrammarMatcher,
    ReasoningLimit,
    has_others,
    ids_of,
)
from triptych.workers.summarize.detokenizer import make_detokenizer
from triptych.workers.summarize.vocabulary import Vocabulary

BYTES_OR_FALLBACK = ("byte_level", "in_a_sequence", "llama2", "gemma")


def lark(choices: list[str]) -> str:
    return f"start: {' | '.join(map(json.dumps, choices))}"


def make_matcher(folder: Path, tokenizer: Tokenizer, grammar: str) -> GrammarMatcher:
    return GrammarCompiler(model_dir(folder, tokenizer), make_card(tokenizer)).compile(grammar)


def allowed_after(matcher: GrammarMatcher, tokens: list[int]) -> list[int]:
    return list(map(int, ids_of(matcher.allowed_after(np.array(tokens, np.int32)))))


@pytest.mark.parametrize("name", BYTES_OR_FALLBACK)
def test_allowed_tokens_begin_a_choice(tmp_path: Path, name: str) -> None:
    tokenizer = tokenizer_zoo.ALL[name]()
    choices = ["the café", "doesn't", "高い", " yes"]
    matcher = make_matcher(tmp_path, tokenizer, lark(choices))
    vocabulary = Vocabulary(tokenizer)
    expected = [
        token_id
        for token_id in range(tokenizer.get_vocab_size(with_added_tokens=True))
        if token_id not in vocabulary.special_ids
        and (piece := vocabulary.token_bytes(token_id))
        and any(choice.encode().startswith(piece) for choice in choices)
    ]
    assert allowed_after(matcher, []) == expected


class SlowMatcher:
    """Takes as long to consume tokens as it takes another thread to begin the same, if it can."""

    def __init__(self) -> None:
        self.consumed: list[int] = []
        self._both = threading.Barrier(2)

    def consume_tokens(self, tokens: list[int]) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            self._both.wait(0.05)
        self.consumed += tokens

    def unsafe_compute_mask_ptr(self, pointer: int, num_bytes: int) -> None: ...

    def is_error(self) -> bool:
        return False


def test_tokens_are_consumed_once_if_two_threads_ask_at_once() -> None:
    slow: Any = SlowMatcher()
    matcher = GrammarMatcher(slow, 32)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda _: allowed_after(matcher, [3, 1]), range(2)))
    assert slow.consumed == [3, 1]


@pytest.mark.parametrize("name", BYTES_OR_FALLBACK)
@pytest.mark.parametrize("seed", range(5))
def test_random_walk_ends_in_a_match(tmp_path: Path, name: str, seed: int) -> None:
    tokenizer = tokenizer_zoo.ALL[name]()
    matcher = make_matcher(tmp_path, tokenizer, r"start: /([a-zé高]{2,8} ?){1,5}[😀👋]!/")
    rng, tokens = np.random.default_rng(seed), list[int]()
    eos = make_card(tokenizer).eos_token_ids[0]
    vocabulary = Vocabulary(tokenizer)
    detokenizer = make_detokenizer(vocabulary, context=vocabulary.amid_text)
    text = ""
    while (token_id := int(rng.choice(allowed_after(matcher, tokens)))) != eos:
        tokens.append(token_id)
        text += detokenizer.push(token_id)
        assert len(tokens) < 200
    text += detokenizer.flush()
    assert re.fullmatch(r"([a-zé高]{2,8} ?){1,5}[😀👋]!", text), text


def test_end_is_allowed_only_after_a_match_and_alone_after_a_complete_one(
    tmp_path: Path,
) -> None:
    tokenizer = tokenizer_zoo.byte_level()
    a, b, eos = (tokenizer_zoo.id_of(tokenizer, token) for token in ("a", "b", "</s>"))
    matcher = make_matcher(tmp_path, tokenizer, lark(["a", "ab"]))
    assert eos not in allowed_after(matcher, [])
    assert {eos, b} <= set(allowed_after(matcher, [a]))
    assert allowed_after(matcher, [a, b]) == [eos]


def test_ids_beyond_the_tokenizer_and_special_tokens_are_never_allowed(tmp_path: Path) -> None:
    tokenizer = tokenizer_zoo.byte_level()
    matcher = make_matcher(tmp_path, tokenizer, r"start: /(.|\n)+/")
    allowed = allowed_after(matcher, [])
    assert max(allowed) < tokenizer.get_vocab_size(with_added_tokens=True) < make_card(tokenizer).vocab_size
    assert not Vocabulary(tokenizer).special_ids.intersection(allowed)


def test_restored_matcher_allows_the_same_tokens(tmp_path: Path) -> None:
    tokenizer = tokenizer_zoo.llama2()
    compiler = GrammarCompiler(model_dir(tmp_path, tokenizer), make_card(tokenizer))
    first, tokens = compiler.compile('start: /[a-z ]{200,300}/ "."'), list[int]()
    rng = np.random.default_rng(1)
    for _ in range(8):
        tokens.append(int(rng.choice(allowed_after(first, tokens))))
        again = compiler.compile('start: /[a-z ]{200,300}/ "."')
        assert allowed_after(again, tokens) == allowed_after(first, tokens)


def test_token_outside_the_grammar_is_a_lasting_error(tmp_path: Path) -> None:
    tokenizer = tokenizer_zoo.byte_level()
    matcher = make_matcher(tmp_path, tokenizer, lark(["aa"]))
    for _ in range(2):
        with pytest.raises(GrammarError, match="doesn't satisfy the grammar"):
            matcher.allowed_after(np.array([tokenizer_zoo.id_of(tokenizer, "b")], np.int32))


def reasoning_matcher(
    folder: Path, *, is_open: bool, budget: int | None = None
) -> tuple[GrammarMatcher, dict[str, int]]:
    """A matcher of "ab" after optional reasoning, and the ids of some tokens."""
    tokenizer = Tokenizer.from_str(tokenizer_zoo.byte_level().to_str())
    tokenizer.add_tokens([START, END])
    ids = {token: tokenizer_zoo.id_of(tokenizer, token) for token in ("a", "b", "x", "</s>", START, END)}
    reasoning = Tags(ids[START], ids[END], is_open, budget)
    return GrammarCompiler(model_dir(folder, tokenizer), make_card(tokenizer)).compile(lark(["ab"]), reasoning), ids


@pytest.mark.parametrize("is_open", [True, False])
def test_anything_but_the_end_is_allowed_in_reasoning_and_the_form_begins_after_it(
    tmp_path: Path, is_open: bool
) -> None:
    matcher, ids = reasoning_matcher(tmp_path, is_open=is_open)
    tokens = [] if is_open else [ids[START]]
    for token in ("x", "a", "b", "</s>", "x"):
        allowed = allowed_after(matcher, tokens)
        assert ids["</s>"] not in allowed
        assert {ids["a"], ids["x"], ids[START], ids[END]} <= set(allowed)
        tokens += [ids[token]] if token != "</s>" else []
    tokens += [ids[END]]
    assert ids["a"] in allowed_after(matcher, tokens)
    assert ids["x"] not in allowed_after(matcher, tokens)
    assert allowed_after(matcher, [*tokens, ids["a"]]) == [ids["b"]]
    assert allowed_after(matcher, [*tokens, ids["a"], ids["b"]]) == [ids["</s>"]]


def test_answer_begins_with_reasoning_or_with_the_form(tmp_path: Path) -> None:
    matcher, ids = reasoning_matcher(tmp_path, is_open=False)
    first = allowed_after(matcher, [])
    assert {ids["a"], ids[START]} <= set(first)
    assert not {ids["b"], ids["x"], ids[END], ids["</s>"]}.intersection(first)
    assert allowed_after(matcher, [ids["a"]]) == [ids["b"]]


@pytest.mark.parametrize("is_open", [True, False])
def test_restored_matcher_knows_where_the_reasoning_ended(tmp_path: Path, is_open: bool) -> None:
    _, ids = reasoning_matcher(tmp_path, is_open=is_open)
    answer = [ids[token] for token in (*([] if is_open else [START]), "x", "a", END, "a", "b")]
    followed, _ = reasoning_matcher(tmp_path, is_open=is_open)
    for length in range(len(answer) + 1):
        restored, _ = reasoning_matcher(tmp_path, is_open=is_open)
        assert allowed_after(restored, answer[:length]) == allowed_after(followed, answer[:length])


@pytest.mark.parametrize("budget", [0, 3])
@pytest.mark.parametrize("is_open", [True, False])
def test_reasoning_ends_when_its_budget_is_spent(tmp_path: Path, is_open: bool, budget: int) -> None:
    matcher, ids = reasoning_matcher(tmp_path, is_open=is_open, budget=budget)
    limit = ReasoningLimit(Tags(ids[START], ids[END], is_open, budget), 1000)
    tokens = [] if is_open else [ids[START]]
    for _ in range(budget):
        assert {ids["x"], ids[END]} <= set(allowed_after(matcher, tokens))
        assert limit.allowed_after(np.array(tokens, np.int32)) is None
        tokens.append(ids["x"])
    assert allowed_after(matcher, tokens) == [ids[END]]
    forced = limit.allowed_after(np.array(tokens, np.int32))
    assert forced is not None
    assert ids_of(forced).tolist() == [ids[END]]
    tokens.append(ids[END])
    assert ids["a"] in allowed_after(matcher, tokens)
    assert limit.allowed_after(np.array(tokens, np.int32)) is None
    assert limit.is_over


def test_limit_is_over_if_the_answer_does_not_reason(tmp_path: Path) -> None:
    _, ids = reasoning_matcher(tmp_path, is_open=False)
    limit = ReasoningLimit(Tags(ids[START], ids[END], is_open=False, budget=0), 1000)
    assert limit.allowed_after(np.array([], np.int32)) is None
    assert not limit.is_over
    assert limit.allowed_after(np.array([ids["a"]], np.int32)) is None
    assert limit.is_over


def test_budget_does_not_cut_a_call_in_two() -> None:
    """Qwen 3.5 may call a tool without ending its reasoning: within the call, the end tag was the only choice."""
    start, end, call, x = 1, 2, 3, 4
    limit = ReasoningLimit(Tags(start, end, is_open=True, budget=3, call=call), 64)
    assert limit.allowed_after(np.array([x, call], np.int32)) is None
    assert limit.allowed_after(np.array([x, call, x, x, x], np.int32)) is None


def test_form_is_in_the_final_channel(tmp_path: Path) -> None:
    tokenizer = tokenizer_zoo.byte_level()
    a, b, f, m, x, c, end = (tokenizer_zoo.id_of(tokenizer, token) for token in ("a", "b", "f", "m", "x", "c", "</s>"))
    compiler = GrammarCompiler(model_dir(tmp_path, tokenizer), make_card(tokenizer))
    matcher = compiler.compile(lark(["ab"]), Channels(channel=c, final=f, message=m))
    tokens: list[int] = []
    for token in (c, x, m, f, m, x, c, f, x):  # another channel, its message, and the head of the final one
        assert end not in allowed_after(matcher, tokens)
        assert {a, b, c, f, m, x} <= set(allowed_after(matcher, tokens))
        tokens.append(token)
    tokens.append(m)
    assert a in allowed_after(matcher, tokens)
    assert not {b, x, m}.intersection(allowed_after(matcher, tokens))
    assert allowed_after(matcher, [*tokens, a, b]) == [end]


def test_answer_in_channels_may_end_with_a_call(tmp_path: Path) -> None:
    """Only a message to a tool may take the place of the form: not a thought, nor a preamble to the user."""
    tokenizer = tokenizer_zoo.byte_level()
    f, m, s, t, c, end = (tokenizer_zoo.id_of(tokenizer, token) for token in ("f", "m", "s", "t", "c", "</s>"))
    compiler = GrammarCompiler(model_dir(tmp_path, tokenizer), make_card(tokenizer))
    calls = Calls(turn=s, to=t, call=end)
    matcher = compiler.compile(lark(["ab"]), Channels(channel=c, final=f, message=m, calls=calls))
    tokens: list[int] = []
    for token in (c, m, t, s, t, c, m):  # a thought, in which the word may occur, and the head of a call
        assert end not in allowed_after(matcher, tokens)
        tokens.append(token)
    assert {end, t, s} <= set(allowed_after(matcher, tokens))
    assert end not in allowed_after(matcher, [*tokens, s, c, m])


def test_grammar_that_does_not_compile_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(GrammarError, match="unknown name"):
        make_matcher(tmp_path, tokenizer_zoo.byte_level(), "start: foo")


@pytest.mark.parametrize(("others", "expected"), [([3, 9], False), ([3, 9, 9, 700], False), ([3], True), ([], True)])
def test_other_allowed_tokens_are_detected(others: list[int], expected: bool) -> None:
    bits = np.packbits(np.isin(np.arange(32), [3, 9]), bitorder="little")
    assert has_others(bits, np.array(others, np.int64)) is expected
    assert ids_of(bits).tolist() == [3, 9]
