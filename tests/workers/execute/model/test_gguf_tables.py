"""Models of the architectures that a table of ours reads: their weights and configs are those that were converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.core_model_loading import revert_weight_conversion

pytest.importorskip("gguf")

from tests.workers.execute.model.gguf_tables import CASES, build, write
from triptych.workers.execute.model.gguf.file import GgufFile, open_gguf
from triptych.workers.execute.model.gguf.settings import read_settings
from triptych.workers.execute.model.gguf.tensors import GgufTensors

# Names, numbers of no consequence, what other attributes say, and what the family does not use.
MAY_DIFFER = {
    "architectures", "_name_or_path", "initializer_range", "embedding_initializer_range", "pad_token_id",
    "bos_token_id", "eos_token_id", "dtype", "transformers_version", "num_nextn_predict_layers", "n_inner",
    "rotary_dim", "first_k_dense_replace",
}  # fmt: skip
NOT_USED = {
    "bloom": {"intermediate_size", "max_position_embeddings", "num_key_value_heads"},
    "falcon": {"intermediate_size", "num_key_value_heads"},
    "gpt2": {"intermediate_size", "num_key_value_heads"},
    "gpt_neox": {"num_key_value_heads"},
}
HEAD_DIM_NOT_USED = {"bloom", "falcon", "glm4_moe", "glm4_moe_lite", "gpt2", "phi", "stablelm", "granitemoehybrid"}


def config_of(file: GgufFile) -> Any:
    return read_settings(file, file.path.parent, file.path.name)


def near(made: Any, known: Any) -> bool:
    """Equal but for the rounding of a float32."""
    if isinstance(known, dict):
        return all(near(made.get(key), value) for key, value in known.items())
    return bool(made == (pytest.approx(known, rel=1e-6) if isinstance(known, float) else known))


@pytest.mark.parametrize("name", CASES)
def test_the_model_is_the_one_that_was_converted(name: str, tmp_path: Path) -> None:
    model = build(CASES[name])
    write(tmp_path / "x.gguf", CASES[name], model)
    file = open_gguf([tmp_path / "x.gguf"])
    config = config_of(file)
    made, known = config.to_dict(), model.config.to_dict()
    skipped = MAY_DIFFER | NOT_USED.get(name, set()) | ({"head_dim"} if name in HEAD_DIM_NOT_USED else set())
    assert [
        (key, made.get(key), known[key]) for key in known.keys() - skipped if not near(made.get(key), known[key])
    ] == []
    stored = dict(model.state_dict())
    if config.tie_word_embeddings:
        stored.pop("lm_head.weight", None)
    expected = revert_weight_conversion(model, stored)
    weights = {
        name: weight
        for group in GgufTensors(file, config).read(torch.float32, lambda done, total: None)
        for name, weight in group.items()
    }
    assert weights.keys() == expected.keys()
    assert [n for n in expected if not np.allclose(weights[n], expected[n], rtol=1e-6, atol=1e-6)] == []
