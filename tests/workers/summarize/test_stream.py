"""An answer is the same however its tokens arrive, and ends where it should."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers import tokenizer_zoo
from tests.workers.tokenizer_zoo import OTHERS, id_of
from triptych.protocol.sampling import SamplingParams
from triptych.workers.summarize.stream import OutputStream
from triptych.workers.summarize.vocabulary import Vocabulary

BYTES = Vocabulary(tokenizer_zoo.byte_level())
EOS = 1
NO_LONG_RUNS = tokenizer_zoo.SENTENCES[:3]  # of byte tokens, which are decoded in parts (see test_detokenizer)
KINDS = {
    "byte_level": BYTES,
    "llama2": Vocabulary(OTHERS["llama2"]()),
    "word_piece": Vocabulary(OTHERS["word_piece"]()),
}


def make_stream(
    vocabulary: Vocabulary = BYTES, *, eos: int | None = EOS, final: tuple[int, ...] = (), **params: Any
) -> OutputStream:
    stop_ids = frozenset(params.get("stop_token_ids", ())) | ({eos} if eos is not None else set())
    return OutputStream(vocabulary, SamplingParams(**params), stop_token_ids=stop_ids, final_ids=frozenset(final))


def ids_of(text: str, vocabulary: Vocabulary = BYTES) -> list[int]:
    ids: list[int] = vocabulary.tokenizer.encode(text).ids
    return ids


def test_end_token_is_in_the_ids_and_not_in_the_text() -> None:
    stream = make_stream(skip_special_tokens=False)
    stream.push([*ids_of("A fox"), EOS])
    assert (stream.text, stream.finish_reason, stream.matched) == ("A fox", "stop", EOS)
    assert stream.token_ids[-1] == EOS


def test_stop_token_that_is_a_word_is_hidden_unless_requested() -> None:
    *words, dot = ids_of("A fox.")
    for include, text in ((False, "A fox"), (True, "A fox.")):
        stream = make_stream(stop_token_ids=(dot,), include_stop_str=include)
        stream.push([*words, dot, *words])
        assert (stream.text, stream.matched, stream.num_tokens) == (text, dot, len(words) + 1)


def test_stop_string_ends_the_answer_and_drops_later_tokens() -> None:
    stream, ids = make_stream(stop=("brown",)), ids_of("The quick brown fox jumps")
    stream.push(ids)
    kept = stream.num_tokens
    assert (stream.text, stream.finish_reason, stream.matched) == ("The quick ", "stop", "brown")
    assert stream.token_ids == ids[:kept]
    assert "brown" in BYTES.tokenizer.decode(ids[:kept])
    assert "brown" not in BYTES.tokenizer.decode(ids[: kept - 1])


def test_stop_string_may_be_kept() -> None:
    stream = make_stream(stop=("brown",), include_stop_str=True)
    stream.push(ids_of("The quick brown fox"))
    assert stream.text == "The quick brown"


def test_min_tokens_ignores_earlier_stop_strings_and_stop_tokens() -> None:
    ids = [*ids_of("ox"), EOS, *ids_of("ox")]
    stream = make_stream(stop=("ox",), min_tokens=len(ids_of("ox")) + 2)
    stream.push(ids)
    assert (stream.text, stream.num_tokens) == ("ox", len(ids))
    assert stream.matched == "ox"


@pytest.mark.parametrize(
    ("min_tokens", "text", "stop"), [(2, "", "fox"), (3, "", "fox"), (4, "f", "oxe"), (5, "foxes", None)]
)
def test_stop_string_may_begin_before_min_tokens(min_tokens: int, text: str, stop: str | None) -> None:
    """As in vLLM: what counts is where it ends."""
    stream = make_stream(stop=("fox", "oxe"), min_tokens=min_tokens)
    stream.push([id_of(BYTES.tokenizer, letter) for letter in "foxes"])
    stream.finish("length")
    assert (stream.text, stream.matched) == (text, stop)


def test_end_of_a_form_ends_the_answer_before_min_tokens() -> None:
    """As in execute, where a form that allows nothing else ends earlier."""
    stream = make_stream(final=(EOS,), min_tokens=99, skip_special_tokens=False)
    stream.push([*ids_of("A fox"), EOS])
    assert (stream.text, stream.finish_reason, stream.matched) == ("A fox", "stop", EOS)


def test_tail_is_the_text_that_became_final_at_the_end() -> None:
    stream, ids = make_stream(stop=("fox jumps",)), ids_of("a fox")
    stream.push(ids)
    assert stream.delta(0) == (ids, "a ")
    stream.finish("length")
    assert (stream.delta(0).text, stream.tail, stream.text) == ("a ", "fox", "a fox")


def test_incomplete_character_is_shown_at_the_end() -> None:
    stream = make_stream()
    stream.push(ids_of("ok 👋")[:-1])
    stream.finish("length")
    assert (stream.delta(0).text, stream.tail) == ("ok ", "�")


def test_stop_string_in_the_last_held_back_text_counts() -> None:
    vocabulary = KINDS["llama2"]
    stream = make_stream(vocabulary, stop=("é",))
    stream.push([id_of(vocabulary.tokenizer, token) for token in ("a", "<0xC3>", "<0xA9>")])
    assert not stream.is_finished
    stream.finish("length")
    assert (stream.text, stream.finish_reason, stream.matched) == ("a", "stop", "é")


def test_first_end_is_kept() -> None:
    stream = make_stream()
    stream.push([EOS])
    stream.finish("abort")
    stream.push(ids_of("more"))
    assert (stream.finish_reason, stream.text, stream.token_ids) == ("stop", "", [EOS])


def test_no_tokens_are_an_empty_answer() -> None:
    stream = make_stream(max_tokens=0)
    stream.finish("length")
    assert (stream.text, stream.delta(0), stream.finish_reason) == ("", ([], ""), "length")


def test_ignored_end_tokens_are_ordinary() -> None:
    stream = make_stream(eos=None, skip_special_tokens=False)
    stream.push([*ids_of("A"), EOS, *ids_of("B")])
    assert (stream.text, stream.finish_reason) == ("A</s>B", None)


def an_answer(
    rng: random.Random, vocabulary: Vocabulary, sentences: tuple[str, ...] = tokenizer_zoo.SENTENCES
) -> list[int]:
    sentence = rng.choice(sentences)
    soup = [rng.randrange(vocabulary.tokenizer.get_vocab_size() + 3) for _ in range(rng.randrange(12))]
    return [*ids_of(sentence, vocabulary)[: rng.randrange(40)], *soup, *ids_of(sentence, vocabulary)]


@settings(max_examples=300, deadline=None)
@given(rng=st.randoms(use_true_random=False), kind=st.sampled_from(sorted(KINDS)), min_tokens=st.integers(0, 8))
def test_restored_stream_continues_at_any_token(rng: random.Random, kind: str, min_tokens: int) -> None:
    params: dict[str, Any] = {
        "stop": ("fox", "ß", "do"),
        "min_tokens": min_tokens,
        "skip_special_tokens": rng.random() < 0.5,
    }
    token_ids = an_answer(rng, KINDS[kind])
    whole, again = make_stream(KINDS[kind], **params), make_stream(KINDS[kind], **params)
    seen = ""
    for stop in sorted(rng.choices(range(len(token_ids) + 1), k=4)):
        start = whole.num_tokens
        whole.push(token_ids[start:stop])
        seen += whole.delta(start).text
    offset = whole.num_tokens
    again.push(token_ids)
    again.finish("length")
    assert again.delta(0, offset) == (whole.token_ids, seen)
    assert again.text == seen + again.delta(offset).text + again.tail


@pytest.mark.parametrize("kind", KINDS)
def test_text_without_stop_strings_is_the_full_decode(kind: str) -> None:
    rng, vocabulary = random.Random(kind), KINDS[kind]
    for _ in range(200):
        stream, token_ids = make_stream(vocabulary, eos=None), an_answer(rng, vocabulary, NO_LONG_RUNS)
        stream.push(token_ids)
        stream.finish("length")
        assert stream.text == vocabulary.tokenizer.decode(token_ids)


def test_error_stays_an_error_even_with_a_stop_string_in_the_held_back_text() -> None:
    """There a line break is a byte token, which is held back until another one follows."""
    vocabulary = KINDS["llama2"]
    ids = [*ids_of("A fox", vocabulary), id_of(vocabulary.tokenizer, "<0x0A>")]
    for reason, end in (("error", "error"), ("length", "stop")):
        stream = make_stream(vocabulary, stop=("\n", "oxen"))
        stream.push(ids)
        stream.finish(reason)
        assert stream.finish_reason == end
        assert stream.text == ("A fox\n" if end == "error" else "A fox")
