"""lm_eval's scores: those that `local-completions` gets from a gateway equal those of its `hf` backend on the weights.

python lm_eval_scores.py http://127.0.0.1:8000 CHECKPOINT
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"}
from lm_eval import simple_evaluate

TOLERANCE = 1e-3  # of the sum over an option's tokens: the backends add in another order
ASK = "<|user|>{}<|end|><|assistant|>"
DOCUMENTS = [
    {"question": "What does len do?", "options": ["Return the number of items in a container.", "Print."], "gold": 0},
    {"question": "What does abs do?", "options": ["Nothing.", "Return the absolute value of the argument."], "gold": 1},
    {"question": "Größe?", "options": ["groß", "klein — oder nicht", " 你好"], "gold": 0},
]  # fmt: skip


def tasks(folder: Path) -> list[dict[str, Any]]:
    """Options that are compared, and texts that are scored as a whole; made from one JSONL file."""
    lines = [json.dumps({**document, "text": ASK.format(document["question"])}) for document in DOCUMENTS]
    (folder / "documents.jsonl").write_text("\n".join(lines))
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "documents.jsonl")}}}
    compared = {
        "task": "options", "output_type": "multiple_choice", "test_split": "test", "doc_to_text": "{{text}}",
        "doc_to_choice": "{{options}}", "doc_to_target": "{{gold}}", "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }  # fmt: skip
    whole = {
        "task": "texts", "output_type": "loglikelihood_rolling", "test_split": "test", "doc_to_text": "",
        "doc_to_target": "{{options[gold]}}", "metric_list": [{"metric": "word_perplexity"}],
    }  # fmt: skip
    return [{**source, **compared}, {**source, **whole}]


def evaluate(model: str, arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
    found = simple_evaluate(model, model_args=arguments, tasks=tasks(folder), log_samples=True, bootstrap_iters=0)
    assert found is not None
    return dict(found)


def responses(found: dict[str, Any], task: str) -> list[list[float]]:
    """For each document, the numbers returned by the model: logprobs, and whether each option was the greedy one."""
    samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    return [[float(number) for response in flat(sample["filtered_resps"]) for number in response] for sample in samples]


def flat(values: list[Any]) -> list[Any]:
    """A response is one number for a rolling score, and a pair for an option."""
    return [value if isinstance(value, (list, tuple)) else [value] for value in values]


def main(url: str, checkpoint: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain = evaluate("hf", {"pretrained": checkpoint, "device": "cpu", "dtype": "float32"}, folder)
        ours = evaluate(
            "local-completions",
            {"model": "demo", "base_url": f"{url}/v1/completions", "tokenizer": checkpoint, "num_concurrent": 2,
             "tokenizer_backend": "huggingface", "max_length": plain_length(checkpoint)},
            folder,
        )  # fmt: skip
    for task in ("options", "texts"):
        expected, got = responses(plain, task), responses(ours, task)
        print(task, json.dumps({"hf": expected, "local-completions": got}))
        for one, other in zip(expected, got, strict=True):
            assert len(one) == len(other), (one, other)
            assert all(math.isclose(a, b, abs_tol=TOLERANCE) for a, b in zip(one, other, strict=True)), (one, other)
    for metric in ("acc,none", "acc_norm,none"):
        assert plain["results"]["options"][metric] == ours["results"]["options"][metric], metric


def plain_length(checkpoint: str) -> int:
    return int(json.loads((Path(checkpoint) / "config.json").read_text())["max_position_embeddings"])


if __name__ == "__main__":
    main(*sys.argv[1:])
