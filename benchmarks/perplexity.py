"""What each numeric format costs a model in quality: ``python benchmarks/perplexity.py --model DIR``.

Scores English text, the language reference that comes with Python (``pydoc_data.topics``), through the whole pipeline:
each stretch of it is a request with ``prompt_logprobs`` and without an answer. The first half of its tokens is context
only, so that no token is scored without any. Each format is compared with transformers' modules in float32:

* ``perplexity``: e to the mean negative logprob of a token; ``of_exact``: divided by that of the comparison,
* ``mean_difference``: of the logprob of a token, without its sign,
* ``same_choice``: the share of places where the likeliest token is the same.

With ``--shuffle``, the model is one like Llama, and its channels are put into another order first, see ``shuffled.py``.

Prints one JSON line; a table goes to standard error.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.report import environment, publish
from benchmarks.shuffled import shuffled
from triptych import Driver
from triptych.driver.stream import Completion
from triptych.workers.execute.model.checkpoint.find import find_checkpoint

REFERENCE = "float32, transformers"
FORMATS: dict[str, dict[str, Any]] = {
    REFERENCE: {"backend": "transformers", "dtype": "float32"},
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, pages int8": {"dtype": "bfloat16", "kv_dtype": "int8"},
    "int8": {"dtype": "bfloat16", "quantization": "int8", "kv_dtype": "model"},
    "int8, pages int8": {"dtype": "bfloat16", "quantization": "int8", "kv_dtype": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4", "kv_dtype": "model"},
    "int4, pages int8": {"dtype": "bfloat16", "quantization": "int4", "kv_dtype": "int8"},
}


class Scores(NamedTuple):
    """Of all scored tokens, in order."""

    logprobs: np.ndarray  # float64 [T]
    choices: np.ndarray  # int64 [T]: the likeliest token in the place of each


def main() -> None:
    arguments = parse()
    with TemporaryDirectory() as scratch:
        name = Path(arguments.model).name
        if arguments.shuffle:
            arguments.model = str(shuffled(find_checkpoint(arguments.model), Path(scratch) / "shuffled"))
        report(arguments, name)


def report(arguments: argparse.Namespace, model: str) -> None:
    results = {}
    exact = score(arguments, FORMATS[REFERENCE])
    for name in arguments.formats:
        scores = exact if name == REFERENCE else score(arguments, FORMATS[name])
        results[name] = compare(scores, exact)
        print(f"{name:24}", *(f"{key} {value:<10}" for key, value in results[name].items()), file=sys.stderr)
    config = {name: getattr(arguments, name) for name in ("stretches", "characters", "shuffle")}
    found = {"what": "perplexity", **environment("torch", "transformers"), "config": {"model": model, **config}}
    publish({**found, "tokens": len(exact.logprobs), "formats": results})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="as of triptych serve")
    parser.add_argument("--shuffle", action="store_true", help="the channels of the model first")
    parser.add_argument("--stretches", type=int, default=24, help="of text, spread over all of it")
    parser.add_argument("--characters", type=int, default=2000, help="of a stretch")
    parser.add_argument("--formats", nargs="*", default=list(FORMATS), choices=list(FORMATS))
    return parser.parse_args()


def score(arguments: argparse.Namespace, settings: dict[str, Any]) -> Scores:
    text = "\n".join(topics[name] for name in sorted(topics))
    starts = np.linspace(0, len(text) - arguments.characters, arguments.stretches, dtype=int)
    prompts = [text[start : start + arguments.characters] for start in starts]
    with Driver(arguments.model, **settings) as driver:
        answers = driver.generate_all(prompts, max_tokens=0, prompt_logprobs=1, truncation="right")
    scored = [token for answer in answers for token in second_half(answer)]
    logprobs, choices = zip(*((token.logprob, token.alternatives[0][0]) for token in scored), strict=True)
    return Scores(np.array(logprobs), np.array(choices))


def second_half(answer: Completion) -> list[Any]:
    tokens = answer.prompt_logprobs or []
    return tokens[len(tokens) // 2 :]


def compare(scores: Scores, exact: Scores) -> dict[str, float]:
    return {
        "perplexity": round(float(np.exp(-scores.logprobs.mean())), 4),
        "of_exact": round(float(np.exp(exact.logprobs.mean() - scores.logprobs.mean())), 4),
        "mean_difference": round(float(np.abs(scores.logprobs - exact.logprobs).mean()), 4),
        "same_choice": round(float((scores.choices == exact.choices).mean()), 4),
    }


if __name__ == "__main__":
    main()
