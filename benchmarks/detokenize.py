"""What does it cost to turn a token into text? Prints one JSON line; µs per token, pushed one at a time."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.report import environment, publish, spread, time_us
from tests.workers import tokenizer_zoo
from triptych.protocol.sampling import SamplingParams
from triptych.workers.summarize.detokenizer import make_detokenizer
from triptych.workers.summarize.stream import OutputStream
from triptych.workers.summarize.vocabulary import Vocabulary

SEED, WARM_UP, REPEATS = 0, 3, 15
NUM_TOKENS = (200, 2000)
STOP = ("\n\nHuman:", "<|im_end|>", "dogs and", "###")


def main() -> None:
    results: dict[str, dict[str, float]] = {}
    for name, tokenizer in (("byte_level", tokenizer_zoo.byte_level()), ("sentencepiece", tokenizer_zoo.llama2())):
        for num_tokens in NUM_TOKENS:
            token_ids = some_tokens(tokenizer, num_tokens)
            for what, run in candidates(tokenizer, token_ids).items():
                results[f"{name}, {what}, {num_tokens} tokens"] = us_per_token(run, num_tokens)
    publish({"what": "detokenize", "unit": "us/token", **about(), "results": results})


def candidates(tokenizer: Tokenizer, token_ids: list[int]) -> dict[str, Callable[[], object]]:
    vocabulary = Vocabulary(tokenizer)
    return {
        "detokenizer": lambda: detokenize(vocabulary, token_ids),
        "stream": lambda: stream(vocabulary, token_ids, ()),
        "stream with 4 stop strings": lambda: stream(vocabulary, token_ids, STOP),
        "DecodeStream of tokenizers": lambda: decode_stream(tokenizer, token_ids),
    }


def some_tokens(tokenizer: Tokenizer, num_tokens: int) -> list[int]:
    """Sentences in random order: they often contain a stop string's first characters, but never its last."""
    rng = random.Random(SEED)
    token_ids: list[int] = []
    while len(token_ids) < num_tokens:
        token_ids += tokenizer.encode(rng.choice(tokenizer_zoo.SENTENCES)).ids
    return token_ids[:num_tokens]


def detokenize(vocabulary: Vocabulary, token_ids: list[int]) -> None:
    push = make_detokenizer(vocabulary).push
    for token_id in token_ids:
        push(token_id)


def stream(vocabulary: Vocabulary, token_ids: list[int], stop: tuple[str, ...]) -> None:
    """One push and one delta per token, as if every token were sent separately."""
    output = OutputStream(vocabulary, SamplingParams(stop=stop), stop_token_ids=frozenset({1}))
    for index, token_id in enumerate(token_ids):
        output.push((token_id,))
        output.delta(index)
    assert output.num_tokens == len(token_ids), "no stop string may be found"


def decode_stream(tokenizer: Tokenizer, token_ids: list[int]) -> None:
    step = DecodeStream(skip_special_tokens=True).step
    for token_id in token_ids:
        step(tokenizer, token_id)


def us_per_token(run: Callable[[], object], num_tokens: int) -> dict[str, float]:
    return spread([us / num_tokens for us in time_us(run, warm_up=WARM_UP, repeats=REPEATS)])


def about() -> dict[str, object]:
    config = {"stop": STOP, "num_tokens": NUM_TOKENS, "vocabulary": "400 to 511 tokens, tests/workers"}
    return {**environment("tokenizers"), "config": config, "seed": SEED, "warm_up": WARM_UP}


if __name__ == "__main__":
    main()
