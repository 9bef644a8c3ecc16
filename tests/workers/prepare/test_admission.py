"""An admitted prompt always fits into the context and the pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cards import CARD
from triptych.protocol.errors import InvalidRequest, RequestTooLong
from triptych.protocol.model_card import ModelCard
from triptych.protocol.sampling import SamplingParams
from triptych.workers.prepare.admission import Admission, admit, embedding_size_of, truncate, with_instruction
from triptych.workers.prepare.request import GenerationRequest, Truncation

SMALL_POOL = replace(CARD, num_pages=4)  # 16 tokens


def admit_prompt(
    num_tokens: int, *, card: ModelCard = CARD, truncation: Truncation = "none", **params: Any
) -> Admission:
    token_ids = np.arange(num_tokens, dtype=np.int32)
    return admit(token_ids, truncation=truncation, params=SamplingParams(**params), card=card)


@pytest.mark.parametrize(
    ("max_tokens", "capacity"), [(5, 5), (22, 22), (23, 22), (None, 22), (0, 0)], ids=lambda value: str(value)
)
def test_output_ends_at_max_tokens_or_at_the_context(max_tokens: int | None, capacity: int) -> None:
    assert admit_prompt(10, max_tokens=max_tokens).capacity == capacity


def test_output_ends_where_the_pool_ends() -> None:
    assert admit_prompt(10, card=SMALL_POOL, max_tokens=None).capacity == 6


@pytest.mark.parametrize(("card", "limit"), [(CARD, 31), (SMALL_POOL, 15)], ids=["context", "pool"])
def test_prompt_must_leave_space_for_one_token(card: ModelCard, limit: int) -> None:
    assert admit_prompt(limit, card=card).capacity == 1
    with pytest.raises(RequestTooLong, match=f"prompt has {limit + 1} tokens, the limit is {limit}"):
        admit_prompt(limit + 1, card=card)


@pytest.mark.parametrize("num_pages", [3, 7, 8, 30])
@pytest.mark.parametrize("num_beams", [2, 3])
@pytest.mark.parametrize("num_tokens", [1, 4, 6, 11])
def test_beams_are_as_long_as_all_of_them_fit_into_the_pool(num_pages: int, num_beams: int, num_tokens: int) -> None:
    """Counted page by page: full pages of the prompt are shared, all others are needed by each beam."""
    card = replace(CARD, num_pages=num_pages)
    num_shared = num_tokens // card.page_size
    own = [-(-end // card.page_size) - num_shared for end in range(card.max_model_len + 1)]
    ends = [end for end, each in enumerate(own) if num_shared + num_beams * max(each, 0) <= num_pages]
    longest = max(ends, default=0)
    if longest <= num_tokens:
        with pytest.raises(RequestTooLong):
            admit_prompt(num_tokens, card=card, num_beams=num_beams)
    else:
        assert (
            admit_prompt(num_tokens, card=card, num_beams=num_beams, max_tokens=None).capacity == longest - num_tokens
        )


CUTS: list[tuple[Truncation, list[int]]] = [
    ("left", [3, 4, 5, 6]),
    ("right", [0, 1, 2, 3]),
    ("middle", [0, 1, 5, 6]),
    ("none", [0, 1, 2, 3, 4, 5, 6]),
]


@pytest.mark.parametrize(("how", "kept"), CUTS, ids=[how for how, _ in CUTS])
def test_prompt_is_truncated_on_the_requested_side(how: Truncation, kept: list[int]) -> None:
    token_ids, num_truncated = truncate(np.arange(7, dtype=np.int32), 4, how)
    assert token_ids.tolist() == kept
    assert num_truncated == 7 - len(kept)


def test_prompt_that_fits_is_never_truncated() -> None:
    assert admit_prompt(31, truncation="left", max_tokens=10).num_truncated == 0


def test_truncated_prompt_leaves_space_for_max_tokens() -> None:
    admission = admit_prompt(40, truncation="left", max_tokens=10)
    assert (len(admission.token_ids), admission.num_truncated, admission.capacity) == (22, 18, 10)


def test_truncated_prompt_keeps_half_the_context() -> None:
    admission = admit_prompt(40, truncation="right", max_tokens=1000)
    assert (len(admission.token_ids), admission.capacity) == (16, 16)


@pytest.mark.parametrize(("token_id", "where"), [(-1, 0), (100, 2)], ids=["below", "above"])
def test_id_outside_the_vocabulary_is_refused_with_its_index(token_id: int, where: int) -> None:
    token_ids = np.zeros(4, dtype=np.int32)
    token_ids[where] = token_id
    with pytest.raises(InvalidRequest, match=rf"prompt_token_ids\[{where}\] is {token_id}, the limits are 0 and 99"):
        admit(token_ids, truncation="none", params=SamplingParams(), card=CARD)


@pytest.mark.parametrize("params", [{"stop_token_ids": [100]}, {"logit_bias": {100: 1.0}}], ids=lambda p: next(iter(p)))
def test_parameter_with_an_id_outside_the_vocabulary_is_refused(params: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="holds 100, the limits are 0 and 99") as caught:
        admit_prompt(3, **params)
    assert caught.value.param == next(iter(params))


def test_first_and_last_id_are_in_the_vocabulary() -> None:
    params = SamplingParams(stop_token_ids=(0, 99), logit_bias={0: 1.0, 99: 1.0})
    assert admit(np.array([0, 99], np.int32), truncation="none", params=params, card=CARD)


@settings(deadline=None)
@given(
    num_tokens=st.integers(1, 100),
    truncation=st.sampled_from(["left", "right", "middle"]),
    max_tokens=st.none() | st.integers(1, 60),
    num_pages=st.integers(2, 10),
    page_size=st.sampled_from([1, 2, 4, 16]),
)
def test_admitted_prompt_fits_the_context_and_the_pool(
    num_tokens: int, truncation: Truncation, max_tokens: int | None, num_pages: int, page_size: int
) -> None:
    card = replace(CARD, num_pages=num_pages, page_size=page_size)
    admission = admit_prompt(num_tokens, card=card, truncation=truncation, max_tokens=max_tokens)
    num_kept = len(admission.token_ids)
    assert num_kept + admission.num_truncated == num_tokens
    assert min(num_kept, admission.capacity) >= 1
    assert num_kept + admission.capacity <= min(card.max_model_len, num_pages * page_size)


def test_request_may_limit_its_own_prompt() -> None:
    ids = np.arange(10, dtype=np.int32)
    params = SamplingParams(max_tokens=2)
    cut = admit(ids, truncation="left", params=params, card=CARD, max_prompt_tokens=4)
    assert (cut.token_ids.tolist(), cut.num_truncated) == ([6, 7, 8, 9], 6)
    with pytest.raises(RequestTooLong, match="10 tokens, max_prompt_tokens is 4"):
        admit(ids, truncation="none", params=params, card=CARD, max_prompt_tokens=4)


@pytest.mark.parametrize(
    ("request_", "card", "reason"),
    [
        (GenerationRequest(prompt="a", embedding=True), replace(CARD, why_no_embeddings="it is blind"), "it is blind"),
        (GenerationRequest(prompt="a"), replace(CARD, can_generate=False), "no head"),
        (
            GenerationRequest(prompt="a", sampling=SamplingParams(max_tokens=0, prompt_logprobs=1)),
            replace(CARD, can_generate=False),
            "no head",
        ),
    ],
    ids=["no embeddings", "no answers", "no logprobs"],
)
def test_what_the_model_cannot_do_is_refused(request_: GenerationRequest, card: ModelCard, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        embedding_size_of(request_, card)
    assert caught.value.param == "embedding"


@pytest.mark.parametrize(
    ("request_", "found"),
    [
        (GenerationRequest(prompt="a", embedding=True), "document: a"),
        (GenerationRequest(prompt="a", embedding=True, prompt_name=""), "a"),
        (GenerationRequest(prompt="a", embedding=True, prompt_name="query"), "query: a"),
        (GenerationRequest(prompt_token_ids=np.array([5], np.int32), embedding=True), None),
        (GenerationRequest(prompt="a"), "a"),
    ],
    ids=["default", "none", "by name", "token ids", "answer"],
)
def test_instruction_is_put_before_a_text_to_embed(request_: GenerationRequest, found: str | None) -> None:
    prompts = {"query": "query: ", "document": "document: "}
    card = replace(CARD, embedding_size=8, prompts=prompts, default_prompt="document")
    assert with_instruction(request_, card).prompt == found
    with pytest.raises(InvalidRequest, match="known are: query, document"):
        with_instruction(GenerationRequest(prompt="a", embedding=True, prompt_name="other"), card)


def test_model_without_a_head_still_counts_tokens() -> None:
    request = GenerationRequest(prompt="a", sampling=SamplingParams(max_tokens=0))
    assert embedding_size_of(request, replace(CARD, can_generate=False)) == 0
