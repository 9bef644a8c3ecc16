"""Embeddings compared with the base model of transformers, on the compiled kernels and on transformers' modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from tests.adapters import make_adapter, merge
from tests.tiny import make_tiny_model
from tests.workers.execute.factories import make_scheduler
from tests.workers.execute.model.native.decoders import adapt, make_checkpoint, make_request
from triptych.protocol.config import CacheConfig, ModelConfig, SchedulerConfig
from triptych.protocol.errors import ConfigError
from triptych.protocol.model_card import ModelCard
from triptych.workers.execute.engine import Engine
from triptych.workers.execute.model.build import build_runner
from triptych.workers.execute.model.embeddings import Embeddings, describe_embeddings
from triptych.workers.execute.model.step_runner import StepRunner
from triptych.workers.execute.scheduling.pooling import LAST_STATE, MEAN, WEIGHTED_MEAN, Pooling
from triptych.workers.execute.scheduling.sequence import Key, Sequence

PAGE_SIZE, NUM_PAGES = 16, 64
LENGTHS = (1, 17, 60)
# A tied head; logits that are scaled in the last norm; layer norms with biases.
CASES = [("transformers", "qwen3"), ("native", "qwen3"), ("native", "granite"), ("native", "gpt2")]


def build(checkpoint: Path, backend: str, dtype: str = "float32", **options: Any) -> tuple[StepRunner, ModelCard]:
    return build_runner(
        ModelConfig(model="tiny", device="cpu", backend=backend, dtype=dtype, **options),
        CacheConfig(page_size=PAGE_SIZE, num_pages=NUM_PAGES),
        SchedulerConfig(max_num_seqs=4, prefill_chunk=512),
        model_dir=checkpoint,
        run_dir=checkpoint,
    )


def embedded(index: int, length: int, size: int, pooling: Pooling = LAST_STATE) -> Sequence:
    sequence = make_request(index, length, 0)
    sequence.embedding_size, sequence.pooling = size, pooling
    return sequence


def run(runner: StepRunner, *sequences: Sequence, **options: Any) -> dict[Key, np.ndarray[Any, Any]]:
    engine = Engine(make_scheduler(num_pages=NUM_PAGES, page_size=PAGE_SIZE, max_num_seqs=8, **options), runner)
    for sequence in sequences:
        engine.add(sequence)
    found: dict[Key, np.ndarray[Any, Any]] = {}
    while engine.has_work:
        outputs = engine.step()
        assert outputs is not None
        found |= outputs.embeddings
    return found


@torch.inference_mode()
def expected(base: Any, sequence: Sequence) -> np.ndarray[Any, Any]:
    states = base(torch.from_numpy(sequence.tokens.astype(np.int64))[None]).last_hidden_state[0].float().numpy()
    weights = {"mean": np.ones(len(states)), "weightedmean": np.arange(len(states)) + 1}.get(sequence.pooling.mode)
    pooled = states[-1] if weights is None else np.average(states, 0, weights=weights)
    cut = pooled[: sequence.embedding_size]
    return np.asarray(cut / np.linalg.norm(cut) if sequence.pooling.normalizes else cut)


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def parts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[StepRunner, int, Any]:
    """A runner, the size of its embeddings, and the base model in memory."""
    backend, family = request.param
    checkpoint = make_checkpoint(family, tmp_path_factory.mktemp(family))
    runner, card = build(checkpoint, backend)
    assert card.backend.startswith(backend)
    return runner, card.embedding_size, AutoModel.from_pretrained(checkpoint, dtype=torch.float32)


MEANS = [Pooling(MEAN), Pooling(WEIGHTED_MEAN, normalizes=False)]


@pytest.mark.parametrize("pooling", [LAST_STATE, *MEANS], ids=lambda pooling: pooling.mode)
@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_embedding_is_pooled_from_the_normed_states(
    parts: tuple[StepRunner, int, Any], chunk: int, pooling: Pooling
) -> None:
    runner, size, base = parts
    sequences = [embedded(i, length, size - i, pooling) for i, length in enumerate(LENGTHS)]
    mates = [make_request(len(LENGTHS) + i, 20 + i, 10) for i in range(2)]
    found = run(runner, mates[0], *sequences, mates[1], prefill_chunk=chunk)
    assert found.keys() == {sequence.key for sequence in sequences}
    for sequence in sequences:
        np.testing.assert_allclose(found[sequence.key], expected(base, sequence), atol=2e-5)


@pytest.mark.parametrize("pooling", [LAST_STATE, MEANS[0]], ids=lambda pooling: pooling.mode)
@pytest.mark.parametrize(
    ("dtype", "options"), [("bfloat16", {}), ("float32", {"quantization": "int8"})], ids=["bfloat16", "int8"]
)
def test_batch_mates_do_not_change_a_bit(tmp_path: Path, dtype: str, options: dict[str, Any], pooling: Pooling) -> None:
    checkpoint = make_tiny_model("qwen3", tmp_path)
    runner, card = build(checkpoint, "native", dtype, **options)
    base = AutoModel.from_pretrained(checkpoint, dtype=torch.float32)
    sequences = [embedded(i, length, card.embedding_size, pooling) for i, length in enumerate(LENGTHS)]
    mates = [make_request(len(LENGTHS) + i, 20 + i, 10) for i in range(2)]
    together = run(runner, mates[0], *sequences, mates[1], prefill_chunk=512)
    for index, length in enumerate(LENGTHS):
        sequence = embedded(index, length, card.embedding_size, pooling)
        alone = run(runner, sequence, prefill_chunk=7)[sequence.key]
        np.testing.assert_array_equal(alone, together[sequence.key])
        np.testing.assert_allclose(alone, expected(base, sequence), atol=0.03)


@pytest.mark.parametrize(
    ("backend", "options", "tolerance"),
    [
        ("transformers", {}, 2e-5),
        ("native", {}, 2e-5),
        ("native", {"dtype": "bfloat16"}, 0.03),
        ("native", {"quantization": "int8"}, 0.06),
    ],
    ids=["transformers", "native", "bfloat16", "int8"],
)
def test_embeddings_of_adapters_equal_those_of_merged_weights(
    backend: str, options: dict[str, Any], tolerance: float, tmp_path: Path
) -> None:
    """Of different adapters in one step, beside answers, in any chunks."""
    checkpoints = [make_checkpoint("qwen3", tmp_path / "0")]
    adapters = [make_adapter(tmp_path / name, checkpoints[0], rank=8, seed=i) for i, name in enumerate("ab", 1)]
    checkpoints += [merge(checkpoints[0], adapter, tmp_path / str(i)) for i, adapter in enumerate(adapters, 1)]
    bases = [AutoModel.from_pretrained(checkpoint, dtype=torch.float32) for checkpoint in checkpoints]
    runner, card = build(
        checkpoints[0], backend, lora_modules=tuple(f"{path.name}={path}" for path in adapters), **options
    )
    assert card.backend.startswith(backend)
    lengths = [(index % 3, length) for index, length in enumerate([1, 17, 60, 17, 60, 1])]
    for chunk in (7, 512):
        sequences = [adapt(embedded(i, length, card.embedding_size), a) for i, (a, length) in enumerate(lengths)]
        mates = [adapt(make_request(len(lengths) + i, 20 + i, 10), i) for i in range(2)]
        found = run(runner, mates[0], *sequences, mates[1], prefill_chunk=chunk)
        for sequence in sequences:
            own, others = bases[sequence.adapter], [base for i, base in enumerate(bases) if i != sequence.adapter]
            np.testing.assert_allclose(found[sequence.key], expected(own, sequence), atol=tolerance)
            assert all(np.abs(found[sequence.key] - expected(base, sequence)).max() > 2 * tolerance for base in others)


@pytest.mark.parametrize("backend", ["transformers", "native"])
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_checkpoint_of_a_base_model_makes_embeddings(tmp_path: Path, backend: str, is_tied: bool) -> None:
    """Its tensors have no prefix, as those of Qwen3-Embedding, and untied there is no head, as in e5-mistral."""
    checkpoint = make_tiny_model("qwen3", tmp_path, tie_word_embeddings=is_tied)
    base = AutoModel.from_pretrained(checkpoint, dtype=torch.float32)
    tensors = load_file(checkpoint / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(bare, checkpoint / "model.safetensors", {"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3Model"]}))
    runner, card = build(checkpoint, backend)
    assert card.backend.startswith(backend)
    assert card.can_generate == is_tied
    sequence = embedded(0, 17, card.embedding_size)
    np.testing.assert_allclose(run(runner, sequence)[sequence.key], expected(base, sequence), atol=2e-5)


@pytest.mark.parametrize("backend", ["transformers", "native"])
def test_model_for_answers_that_lost_its_head_is_refused(tmp_path: Path, backend: str) -> None:
    checkpoint = make_tiny_model("qwen3", tmp_path, tie_word_embeddings=False)
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="lm_head"):
        build(checkpoint, backend)


NORMALIZE = {"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"}
LAST = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "include_prompt": True}
Found = tuple[str, bool] | str
DESCRIPTIONS: dict[str, tuple[dict[str, Any], list[dict[str, str]], dict[str, Any], Found]] = {
    "last token": ({}, [NORMALIZE], LAST, ("lasttoken", True)),
    "last token, by its name": ({}, [], {"pooling_mode": "lasttoken"}, ("lasttoken", False)),
    "mean": ({}, [NORMALIZE], {"pooling_mode_mean_tokens": True}, ("mean", True)),
    "mean, by its name": ({}, [], {"pooling_mode": "mean"}, ("mean", False)),
    "weighted": ({}, [], {"pooling_mode_weightedmean_tokens": True}, ("weightedmean", False)),
    "root": ({}, [], {"pooling_mode_mean_sqrt_len_tokens": True}, ("mean_sqrt_len_tokens", False)),
    "first token": ({}, [], {"pooling_mode_cls_token": True}, "pooling is cls_token, known is one of lasttoken, mean"),
    "two": ({}, [], {**LAST, "pooling_mode_cls_token": True}, "pooling is lasttoken, cls_token"),
    "more layers": ({}, [{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}], LAST, "Dense"),
    "both directions": ({"use_bidirectional_attention": True}, [], LAST, "not causal"),
    "not causal": ({"is_causal": False}, [], LAST, "not causal"),
    "an unknown mode": ({}, [], {"pooling_mode": 3}, "pooling is 3"),
    "mean without the instruction": ({}, [], {"pooling_mode": "mean", "include_prompt": False}, "include_prompt is"),
    "last token without the instruction": ({}, [], {**LAST, "include_prompt": False}, ("lasttoken", False)),
}


@pytest.mark.parametrize(("config", "behind", "settings", "found"), DESCRIPTIONS.values(), ids=DESCRIPTIONS.keys())
def test_pooling_is_that_of_the_checkpoint(
    tmp_path: Path, config: dict[str, Any], behind: list[dict[str, str]], settings: dict[str, Any], found: Found
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    is_causal = found != "not causal"
    assert (describe_embeddings(tmp_path) == Embeddings()) == is_causal  # without a description
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling")]
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds]
    (tmp_path / "modules.json").write_text(json.dumps([*modules, *behind]))
    assert ("damaged" in describe_embeddings(tmp_path).why_not) == (is_causal and found != "Dense")
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    made = describe_embeddings(tmp_path)
    if isinstance(found, str):
        assert found in made.why_not
    else:
        assert made == Embeddings(Pooling(*found))


def test_instructions_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    prompts = {"query": "Find: ", "document": ""}
    for text, found in {
        '{"prompts": null}': Embeddings(),
        json.dumps({"prompts": prompts, "default_prompt_name": None}): Embeddings(prompts=prompts),
        json.dumps({"prompts": prompts, "default_prompt_name": "query"}): Embeddings(LAST_STATE, prompts, "query"),
    }.items():
        (tmp_path / "config_sentence_transformers.json").write_text(text)
        assert describe_embeddings(tmp_path) == found
    for damaged in ("", "[]", '{"prompts": {"a": 1}}', '{"default_prompt_name": "a"}'):
        (tmp_path / "config_sentence_transformers.json").write_text(damaged)
        assert "damaged" in describe_embeddings(tmp_path).why_not
