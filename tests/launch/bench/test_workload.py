"""The load is a function of its options and its seed."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from triptych.launch.bench.options import Lengths, LoadOptions, PromptOptions, ReportOptions
from triptych.launch.bench.workload import arrival_times, make_queries
from triptych.protocol.errors import ConfigError


def queries(count: int = 5, seed: int = 0, vocab_size: int | None = 100, **options: Any) -> list[Any]:
    return make_queries(PromptOptions(**options), count=count, seed=seed, vocab_size=vocab_size)


def test_without_a_rate_all_requests_arrive_at_once() -> None:
    assert arrival_times(LoadOptions(), 3) == [0.0, 0.0, 0.0]


def test_fixed_rate_is_evenly_spaced() -> None:
    assert arrival_times(LoadOptions(request_rate=4, arrival="fixed"), 3) == [0.0, 0.25, 0.5]


def test_poisson_arrivals_have_exponential_gaps_determined_by_the_seed() -> None:
    times = arrival_times(LoadOptions(request_rate=10), 5000)
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(0.1, rel=0.05)
    assert gaps.std() == pytest.approx(0.1, rel=0.05)
    assert times == arrival_times(LoadOptions(request_rate=10), 5000)
    assert times != arrival_times(LoadOptions(request_rate=10, load_seed=1), 5000)


def test_lengths_are_uniform_between_their_limits() -> None:
    drawn = [Lengths.parse("x", "3..6").draw(random) for random in [Random(0)] for _ in range(400)]
    assert {number: drawn.count(number) > 60 for number in drawn} == dict.fromkeys((3, 4, 5, 6), True)


@pytest.mark.parametrize("text", ["", "0", "5..2", "a", "1..b", "..", "-4"])
def test_malformed_length_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="input_len is"):
        PromptOptions(input_len=text)


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (LoadOptions, {"num_prompts": 0}),
        (LoadOptions, {"request_rate": 0}),
        (LoadOptions, {"max_concurrency": 0}),
        (LoadOptions, {"num_warmups": -1}),
        (LoadOptions, {"arrival": "late"}),
        (PromptOptions, {"shared_prefix": -1}),
        (PromptOptions, {"temperature": -1}),
        (ReportOptions, {"ttft_target_ms": -1}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_value_beyond_its_limit_is_refused(options: type[Any], wrong: dict[str, Any]) -> None:
    [(name, value)] = wrong.items()
    with pytest.raises(ConfigError, match=f"{name} is {value!r}"):
        options(**wrong)


def test_random_prompts_have_their_length_and_share_a_prefix() -> None:
    found = queries(20, input_len="3..6", shared_prefix=4, output_len="2..9")
    prompts = [query.request["prompt_token_ids"] for query in found]
    assert {tuple(prompt[:4]) for prompt in prompts} == {tuple(prompts[0][:4])}
    assert {len(prompt) for prompt in prompts} == {7, 8, 9, 10}
    assert {len(prompt) <= 10 and 2 <= query.max_tokens <= 9 for prompt, query in zip(prompts, found, strict=True)} == {
        True
    }
    assert len({tuple(prompt) for prompt in prompts}) == 20
    assert found == queries(20, input_len="3..6", shared_prefix=4, output_len="2..9") != queries(20, seed=1)


def test_prompts_are_words_if_the_vocabulary_is_unknown() -> None:
    [query] = queries(1, vocab_size=None, input_len="6", shared_prefix=2)
    assert len(query.request["prompt"].split()) == 8


def test_dataset_is_repeated(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "max_tokens": 3}, {"messages": [{"role": "user", "content": "b"}]}]
    (tmp_path / "set.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\nplain\n")
    found = queries(5, dataset=str(tmp_path / "set.jsonl"), output_len="7")
    assert [query.request.get("prompt") for query in found] == ["a", None, "plain", "a", None]
    assert [query.max_tokens for query in found] == [3, 7, 7, 3, 7]


@pytest.mark.parametrize(("text", "words"), [("", "has no prompts"), ('{"prompt": 3}', "line 1: prompt must be")])
def test_bad_dataset_is_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "set").write_text(text)
    with pytest.raises(ConfigError, match=words):
        queries(dataset=str(tmp_path / "set"))
    with pytest.raises(ConfigError, match="No such file"):
        queries(dataset=str(tmp_path / "none"))
