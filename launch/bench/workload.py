"""Which prompts are sent, how long their answers are, and when each arrives: a function of options and seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from ...protocol.errors import ConfigError
from ..prompts import PROMPT_FIELDS, Job, jobs_from_lines
from .options import Lengths, LoadOptions, PromptOptions

# For unknown vocabularies: words that are one token each in nearly every vocabulary built from English text.
_WORDS = (
    "the of and to in is was for on that by this with you it not or be are from at as your all have new more an we can"
    " if has but our one other do no they he up may what which their out use any there see only so his when here who"
)


@dataclass(frozen=True, slots=True)
class Query:
    """One request of the load."""

    request: dict[str, Any]  # prompt, prompt_token_ids or messages, as for ``Client.submit``
    max_tokens: int


def make_queries(options: PromptOptions, *, count: int, seed: int, vocab_size: int | None) -> list[Query]:
    """``count`` queries, from the dataset (repeated as needed) or random.

    If ``vocab_size`` is known, random prompts are token ids of exactly the length asked for; otherwise they are words,
    about one token each, and the server reports how many.

    Raises:
        ConfigError: the dataset cannot be read, or one of its lines is not a prompt.
    """
    random, lengths = Random(seed), Lengths.parse("output_len", options.output_len)
    if options.dataset is not None:
        jobs = _read(Path(options.dataset))
        chosen = [jobs[index % len(jobs)].request for index in range(count)]
        return [_from_row(row, lengths.draw(random)) for row in chosen]
    prefix = _random_tokens(random, options.shared_prefix, vocab_size)
    input_len = Lengths.parse("input_len", options.input_len)
    queries = []
    for _ in range(count):
        tokens = prefix + _random_tokens(random, input_len.draw(random), vocab_size)
        request = {"prompt": " ".join(map(str, tokens))} if vocab_size is None else {"prompt_token_ids": tokens}
        queries.append(Query(request, lengths.draw(random)))
    return queries


def arrival_times(options: LoadOptions, count: int) -> list[float]:
    """Seconds from the start, one per request, in order. Poisson arrivals have exponential gaps."""
    rate = options.request_rate
    if rate is None:
        return [0.0] * count
    if options.arrival == "fixed":
        return [index / rate for index in range(count)]
    random = Random(options.load_seed + 1)  # not the same numbers as the lengths
    gaps = (random.expovariate(rate) for _ in range(count - 1))
    return list(accumulate(gaps, initial=0.0))


def _random_tokens(random: Random, count: int, vocab_size: int | None) -> list[Any]:
    return random.choices(_WORDS.split() if vocab_size is None else range(vocab_size), k=count)


def _read(path: Path) -> Sequence[Job]:
    try:
        with path.open("rb") as lines:
            jobs = jobs_from_lines(lines)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", param="dataset") from error
    if not jobs:
        raise ConfigError(f"{path} has no prompts: all lines are blank", param="dataset")
    for job in jobs:
        if job.error is not None:
            raise ConfigError(f"{path}: {job.error.message}", param="dataset")
    return jobs


def _from_row(row: dict[str, Any], drawn: int) -> Query:
    prompt = {name: row[name] for name in PROMPT_FIELDS if name in row}
    return Query(prompt, row.get("max_tokens") or drawn)
