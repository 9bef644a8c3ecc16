"""Adapters on the compiled kernels: results equal merged weights, with the same bits in any batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from transformers import AutoConfig

from tests.adapters import ALL_LINEAR, ATTENTION, make_adapter, merge
from tests.workers.execute.kernels.levels import WHOLE_LEVELS
from tests.workers.execute.model.native.decoders import (
    EVERY_STEP,
    PLAIN_FORMATS,
    in_four_bits,
    levels_and_formats,
    make_checkpoint,
    make_decoder,
    make_inputs,
)
from tests.workers.execute.model.native.logits import exact_logits, random_tokens
from triptych.protocol.arrays import Int32
from triptych.protocol.errors import ConfigError
from triptych.protocol.lora import LoraModule
from triptych.workers.execute.kernels.compile import available_levels
from triptych.workers.execute.kernels.structures import Format
from triptych.workers.execute.model.checkpoint.stored_weights import open_tensors
from triptych.workers.execute.model.lora import load_adapters
from triptych.workers.execute.model.native.decoder import NativeDecoder
from triptych.workers.execute.model.native.lora import PackedAdapter, PackedAdapters
from triptych.workers.execute.model.spec.describe import describe_decoder

NUM_PAGES, NUM_TOKENS = 12, 60
TOLERANCES = {Format.FLOAT32: 2e-5, Format.BFLOAT16: 0.06, Format.INT8: 0.2, Format.INT4: 0.2}  # of the greatest logit
PHI3 = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
GPT_2 = ("c_attn", "c_proj", "c_fc")
GPT_NEOX = ("query_key_value", "dense", "dense_4h_to_h")
# For a family: its sizes, the adapted modules, and their rank.
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...], int]] = {
    "all of llama": ("llama", {}, ALL_LINEAR, 8),
    "queries and values": ("qwen3", {"head_dim": 48, "hidden_size": 100}, ("q_proj", "v_proj"), 16),
    "odd sizes": ("llama", {"hidden_size": 100, "intermediate_size": 70, "vocab_size": 77}, ALL_LINEAR, 3),
    "biases, a high rank": ("llama", {"attention_bias": True, "mlp_bias": True}, ALL_LINEAR, 40),
    "no gates": ("arcee", {"intermediate_size": 70, "hidden_size": 100}, ALL_LINEAR, 8),
    "up alone": ("granite", {"residual_multiplier": 0.3}, ("up_proj",), 5),
    "norms of what is added": ("gemma2", {}, ALL_LINEAR, 8),
    "attention beside experts": ("mixtral", {"num_experts_per_tok": 4}, ATTENTION, 8),  # all of them: no near choices
    "transposed": ("gpt2", {"hidden_size": 96, "num_attention_heads": 6, "n_inner": 70}, GPT_2, 8),
    "heads by heads": ("gpt_neox", {"hidden_size": 192, "head_dim": 48, "intermediate_size": 70}, GPT_NEOX, 8),
    "merged tensors": ("phi3", {"intermediate_size": 70, "hidden_size": 100}, PHI3, 17),
}


def make_adapted(checkpoint: Path, adapters: list[Path], level: str, format_: Format, **options: Any) -> NativeDecoder:
    config = AutoConfig.from_pretrained(checkpoint)
    spec = describe_decoder(config, open_tensors(checkpoint).shapes())
    loaded = load_adapters(LoraModule(folder.name, folder) for folder in adapters)
    packed = PackedAdapters([PackedAdapter(spec, adapter, format_) for adapter in loaded])
    return make_decoder(
        checkpoint, level, format_,
        num_pages=NUM_PAGES, thresholds=EVERY_STEP, adapters=packed,
        **{"num_threads": 2, **options},
    )  # fmt: skip


def run_chunks(decoder: NativeDecoder, tokens: Int32, sizes: list[int], adapter: int) -> npt.NDArray[np.float32]:
    """Logits [tokens, V] of one sequence in chunks."""
    pieces, start = [], 0
    for size in sizes:
        inputs = make_inputs([(tokens, start, size)], num_pages=NUM_PAGES)
        pieces.append(decoder.run(replace(inputs, adapters=np.array([adapter], np.int32))).logits.copy())
        start += size
    return np.concatenate(pieces)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_merged_weights_in_float64(case: str, tmp_path: Path) -> None:
    family, sizes, targets, rank = CASES[case]
    checkpoint = in_four_bits(make_checkpoint(family, tmp_path / "model", **{"initializer_range": 0.1, **sizes}))
    adapter = make_adapter(tmp_path / "a", checkpoint, targets=targets, rank=rank)
    tokens = random_tokens(NUM_TOKENS)
    exact = [exact_logits(each, tokens) for each in (checkpoint, merge(checkpoint, adapter, tmp_path / "merged"))]
    greatest = np.abs(exact[1]).max()
    assert np.abs(exact[1] - exact[0]).max() > 0.1 * greatest, "the adapter has an effect"
    for level, format_ in levels_and_formats(list(CASES).index(case)):
        decoder = make_adapted(checkpoint, [adapter], level, format_)
        for index, expected in enumerate(exact):
            difference = np.abs(run_chunks(decoder, tokens, [40, 1, 19], index) - expected).max()
            assert difference < TOLERANCES[format_] * greatest, f"{level} {format_.name} {index}"


def test_adapter_of_experts_is_refused(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("qwen3_moe", tmp_path / "model")
    adapter = make_adapter(tmp_path / "a", checkpoint, targets=("q_proj", "up_proj"))
    with pytest.raises(
        ConfigError, match=r"it changes model.layers.0.mlp.experts.0.up_proj, which is not a linear layer"
    ):
        make_adapted(checkpoint, [adapter], available_levels()[0], Format.FLOAT32)


@pytest.mark.parametrize("level", WHOLE_LEVELS)
@pytest.mark.parametrize("format_", PLAIN_FORMATS, ids=lambda f: f.name.lower())
def test_logits_have_the_same_bits_in_any_chunks_and_batches(level: str, format_: Format, tmp_path: Path) -> None:
    checkpoint = make_checkpoint("mistral", tmp_path / "model", sliding_window=20)
    folders = [
        make_adapter(tmp_path / "a", checkpoint, rank=8, seed=1),
        make_adapter(tmp_path / "b", checkpoint, rank=20, seed=2, targets=("q_proj", "down_proj")),
    ]
    decoder = make_adapted(checkpoint, folders, level, format_)
    plain = make_decoder(checkpoint, level, format_, num_pages=NUM_PAGES, num_threads=2, thresholds=EVERY_STEP)
    tokens = random_tokens(NUM_TOKENS)
    alone = [run_chunks(decoder, tokens, [NUM_TOKENS], adapter) for adapter in range(3)]
    bare = plain.run(make_inputs([(tokens, 0, NUM_TOKENS)], num_pages=NUM_PAGES)).logits
    assert np.array_equal(alone[0], bare), "without an adapter nothing changes"
    assert not np.array_equal(alone[1], alone[0]), "with one it does"
    for sizes in ([1] * NUM_TOKENS, [7] * 8 + [4], [25, 25, 10], [59, 1]):
        for adapter in range(3):
            assert np.array_equal(run_chunks(decoder, tokens, sizes, adapter), alone[adapter]), sizes
    together = decoder.run(
        replace(
            make_inputs([(tokens, 0, 30), (tokens, 0, 17), (tokens, 0, 40), (tokens, 0, 9)], num_pages=NUM_PAGES),
            adapters=np.array([1, 0, 2, 1], np.int32),
        )
    ).logits
    expected = [alone[1][:30], alone[0][:17], alone[2][:40], alone[1][:9]]
    assert np.array_equal(together, np.concatenate(expected))
    single = make_adapted(checkpoint, folders, level, format_, num_threads=1)
    assert np.array_equal(run_chunks(single, tokens, [NUM_TOKENS], 2), alone[2])


@pytest.mark.parametrize("format_", PLAIN_FORMATS, ids=lambda f: f.name.lower())
def test_decoder_takes_up_adapters_between_steps(format_: Format, tmp_path: Path) -> None:
    """With the bits of one that has had them from the start, and with the pages of the steps before."""
    checkpoint = make_checkpoint("llama", tmp_path / "model")
    folders = [
        make_adapter(tmp_path / "a", checkpoint, rank=8, seed=1),
        make_adapter(tmp_path / "b", checkpoint, rank=20, seed=2, targets=("q_proj", "down_proj")),
    ]
    level, tokens = available_levels()[0], random_tokens(NUM_TOKENS)
    whole, late = (make_adapted(checkpoint, each, level, format_) for each in (folders, []))
    word = np.zeros(1, np.int64)
    late.reserve(num_tokens=NUM_TOKENS, num_rows=NUM_TOKENS)
    late.show_progress(word)
    start = run_chunks(late, tokens[:40], [40], 0)
    first, second = whole.adapters.places
    for places, numbers in (
        ([None, second], {0: 0, 2: 2}),
        ([first, None], {0: 0, 1: 1}),
        ([second, first], {1: 2, 2: 1}),
    ):
        late.adapt(PackedAdapters(places))
        for number, same in numbers.items():
            word[0] = 0
            assert np.array_equal(run_chunks(late, tokens, [40, 20], number), run_chunks(whole, tokens, [40, 20], same))
            assert word[0] > 0, "progress is shown as before"
    late.adapt(PackedAdapters([]))
    assert np.array_equal(run_chunks(late, tokens[:40], [40], 0), start)
