"""The fused decoder in the engine gives the tokens that transformers generates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import HAS_GPU
from tests.workers.execute.model.fused.short_self_test import shorten_self_test
from tests.workers.execute.model.native.decoders import (
    NativeEngine,
    make_checkpoint,
    make_inputs,
    make_request,
    some_of,
)
from tests.workers.execute.model.test_embeddings import embedded
from tests.workers.execute.model.test_embeddings import expected as expected_embedding
from tests.workers.execute.model.test_embeddings import run as embed
from triptych.protocol.errors import ConfigError
from triptych.workers.execute.scheduling.pooling import MEAN, Pooling
from triptych.workers.execute.scheduling.sequence import Sequence

pytest.importorskip("triton")

from triptych.workers.execute.attention.device_step import upload
from triptych.workers.execute.kernels.triton_fp8 import quantize_rows
from triptych.workers.execute.kernels.triton_matmul import invariant_linear, matmul_tile
from triptych.workers.execute.kernels.triton_one_row import one_row_linear
from triptych.workers.execute.kernels.triton_rows import add_norm, gate_mul, norm_queries_keys
from triptych.workers.execute.model.device.buckets import StepSize
from triptych.workers.execute.model.device.mixed_buffers import MixedBuffers
from triptych.workers.execute.model.fused.fp8 import FP8, Fp8Projection, defined_scaled

# What Triton's interpreter computes with numpy where a GPU says nothing.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")

DEVICE = "cuda" if HAS_GPU else "cpu"
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 2},
    "qwen2": SMALL,
    "qwen3": {**SMALL, "tie_word_embeddings": True},
    "mistral": SMALL,
    "smollm3": {**SMALL, "num_hidden_layers": 2, "no_rope_layers": [0, 1]},
    "granite": SMALL,
    "phi3": SMALL,
    "gemma": SMALL,
    "gemma2": {**SMALL, "num_hidden_layers": 2},
    "gemma3_text": {**SMALL, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "olmo2": {**SMALL, "num_hidden_layers": 2},
    "exaone4": {**SMALL, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "ministral3": SMALL,
    "mixtral": SMALL,
    "olmoe": {"num_hidden_layers": 1},
    "qwen3_moe": {**SMALL, "num_hidden_layers": 2},
}
LENGTHS, MAX_TOKENS = (1, 11), 4


@pytest.fixture(autouse=True)
def quick_start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In all tests but one, so that the unchanged self-test runs too."""
    if "[llama]" not in request.node.name:
        shorten_self_test(monkeypatch)


def make_engine(family: str, folder: Path, **options: Any) -> NativeEngine:
    checkpoint = make_checkpoint(family, folder / "checkpoint", **FAMILIES[family])
    return NativeEngine(checkpoint, folder, **{"backend": "fused", "device": DEVICE, **options})


def requests() -> list[Sequence]:
    return [make_request(i, length, MAX_TOKENS) for i, length in enumerate(LENGTHS)]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    engine = make_engine(family, tmp_path)
    expected = [engine.greedy(r.tokens[: r.num_prompt_tokens].tolist(), MAX_TOKENS) for r in requests()]
    assert engine.run(*requests(), prefill_chunk=9) == expected
    assert engine.card.backend == "fused float32"


def test_mean_of_hidden_states_is_not_divided_as_logits_are(tmp_path: Path) -> None:
    """The last norm divides both for logits that are scaled, which a length of 1 would hide."""
    engine = make_engine("granite", tmp_path)
    sequence = embedded(0, 11, engine.card.embedding_size, Pooling(MEAN, normalizes=False))
    found = embed(engine.runner, sequence, prefill_chunk=9)[sequence.key]
    np.testing.assert_allclose(found, expected_embedding(engine.model.base_model, sequence), atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_weights_are_stored_once(family: str, tmp_path: Path) -> None:
    """Merged matrices share memory with the model of the self-test, and a tied head is the embedding itself."""
    from triptych.workers.execute.model.checkpoint.mapped import Checkpoint
    from triptych.workers.execute.model.fused.weights import Format, FusedLoader

    folder = make_checkpoint(family, tmp_path / "checkpoint", **FAMILIES[family])
    from transformers import AutoConfig

    from triptych.workers.execute.model.spec.describe import describe_decoder

    checkpoint = Checkpoint(folder)
    spec = describe_decoder(AutoConfig.from_pretrained(folder), checkpoint.shapes())
    counts: list[tuple[int, int]] = []
    weights = FusedLoader(
        spec, checkpoint, format_=Format(torch.float32), device=torch.device("cpu"),
        progress=lambda done, total: counts.append((done, total)),
    ).load()  # fmt: skip
    total = len(spec.tensors())
    assert counts == [(done, total) for done in range(1, total + 1)]
    assert all(torch.equal(weights.views[name], checkpoint[name]) for name in spec.tensors())
    storages = {view.untyped_storage().data_ptr(): view.untyped_storage().nbytes() for view in weights.views.values()}
    assert sum(storages.values()) == sum(4 * checkpoint[name].numel() for name in spec.tensors())


@pytest.mark.parametrize("family", ["qwen2", "mixtral"])
def test_deterministic_tokens_do_not_depend_on_batch_mates_or_chunks(family: str, tmp_path: Path) -> None:
    engine = make_engine(family, tmp_path, deterministic=True)
    assert engine.card.backend == "fused float32 deterministic"
    alone = [engine.run(request)[0] for request in requests()]
    assert engine.run(*requests(), prefill_chunk=7) == alone
    assert engine.run(*requests(), num_speculative_tokens=3, propose=some_of(alone)) == alone


@pytest.mark.usefixtures("rows_by_themselves")
def test_deterministic_logits_of_proposals_are_those_of_decodes(tmp_path: Path) -> None:
    """To the bit, launched by themselves or as the padded step of a graph."""
    runner: Any = make_engine("qwen2", tmp_path, deterministic=True).runner
    ids = [make_request(index, 12, 1).tokens for index in range(2)]

    @torch.inference_mode()
    def logits(first: tuple[int, int], second: tuple[int, int], **changes: Any) -> list[torch.Tensor]:
        inputs = make_inputs([(ids[0], *first), (ids[1], *second)], num_pages=4)
        inputs = dataclasses.replace(inputs, **changes)
        steps = [upload(inputs, torch.device(DEVICE))]
        if inputs.checks_proposals:
            size = StepSize(0, 16, 8)
            buffers = MixedBuffers([size], 4, device=torch.device(DEVICE))
            buffers.fill(inputs, size)
            steps.append(buffers.step(size))
        return [runner._forward(step, step.token_ids)[: len(inputs.token_ids)].clone() for step in steps]

    logits((0, 5), (0, 6))
    decoded = [logits((start, 1), (6, 1), num_decodes=2)[0] for start in range(5, 9)]
    for checked in logits((5, 4), (6, 1), sampled=[make_request(0, 1, 1)] * 5):
        assert torch.equal(checked, torch.stack([*(rows[0] for rows in decoded), decoded[0][1]]))


def test_fp8_gives_tokens_within_the_self_test_limit(tmp_path: Path) -> None:
    """Random weights give near ties, so only the limit of the self-test applies, and that there are tokens."""
    engine = make_engine("llama", tmp_path, quantization="fp8", dtype="bfloat16" if HAS_GPU else "float32")
    assert engine.card.backend == "fused fp8"
    assert [len(tokens) for tokens in engine.run(*requests())] == [MAX_TOKENS] * len(LENGTHS)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"quantization": "int8"}, "int8"),
        ({"quantization": "fp8", "deterministic": True}, "deterministic rules out"),
        ({"quantization": "fp8", "backend": "transformers"}, "transformers"),
        ({"deterministic": True, "backend": "transformers"}, "transformers"),
    ],
    ids=str,
)
def test_impossible_options_are_refused(options: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        make_engine("llama", tmp_path, **options)


def test_lack_of_device_memory_at_the_first_run_does_not_lead_to_another_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the process: the next one may find the memory that a killed predecessor still held."""

    def ask_for_too_much(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("triptych.workers.execute.model.fused.decoder.rotate_and_write", ask_for_too_much)
    with pytest.raises(torch.OutOfMemoryError):
        make_engine("llama", tmp_path)


def test_kernels_that_fail_at_their_first_run_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``auto`` the next backend is used, as for a family whose logits differ."""

    def ask_for_too_much(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr("triptych.workers.execute.model.fused.decoder.rotate_and_write", ask_for_too_much)
    with pytest.raises(ConfigError, match=r"failed at the first run: RuntimeError: out of resource: shared memory"):
        make_engine("qwen2", tmp_path)


@pytest.mark.parametrize(("family", "module"), [("qwen3", "weights"), ("mixtral", "experts")])
def test_decodes_of_one_token_that_are_wrong_are_refused(
    family: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have products of their own, which the self-test runs too."""

    def double(*arguments: Any, **options: Any) -> torch.Tensor:
        return one_row_linear(*arguments, **options).mul_(2)

    monkeypatch.setattr(f"triptych.workers.execute.model.fused.{module}.one_row_linear", double)
    with pytest.raises(ConfigError, match="its logits differ from transformers'"):
        make_engine(family, tmp_path)


def test_prompt_in_steps_of_one_token(tmp_path: Path) -> None:
    """All but the last of them sample nothing."""
    engine, request = make_engine("qwen2", tmp_path), make_request(0, 5, 2)
    expected = engine.greedy(request.tokens[:5].tolist(), 2)
    assert engine.run(request, prefill_chunk=1) == [expected]


def test_fp8_experts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it has experts, which the fused decoder does not support in fp8"):
        make_engine("mixtral", tmp_path, quantization="fp8")


def test_sinks_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("gpt_oss", tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match="its heads attend to sinks, which the fused decoder does not support"):
        NativeEngine(folder, tmp_path, backend="fused", device=DEVICE)


@pytest.mark.parametrize(
    ("family", "overrides", "why"),
    [
        ("qwen3_5_text", {}, "it has recurrent layers"),
        ("qwen2_moe", {}, "all tokens share an expert"),
        ("helium", {}, "it has other rotary positions or gated heads"),
        ("arcee", {}, "it has layer norms, parallel layers or no gates"),
        ("gpt2", {}, "it has layer norms, parallel layers or no gates"),
        ("olmoe", {"clip_qkv": 0.5}, "it clips queries or has another activation"),
        ("hunyuan_v1_dense", {}, "it norms heads after their rotation"),
    ],
)
def test_features_of_the_cpu_kernels_alone_are_refused(
    family: str, overrides: dict[str, Any], why: str, tmp_path: Path
) -> None:
    folder = make_checkpoint(family, tmp_path / "checkpoint", **overrides)
    with pytest.raises(ConfigError, match=f"{why}, which the fused decoder does not support"):
        NativeEngine(folder, tmp_path, backend="fused", device=DEVICE)


def test_fp8_error_matches_three_mantissa_bits() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(64, 32) * torch.logspace(-3, 3, 64)[:, None], torch.randn(9, 32)
    parts = [Fp8Projection.quantize(weight[:48]), Fp8Projection.quantize(weight[48:])]
    product = Fp8Projection.merge(parts, None, torch.float32)(x)
    expected = x @ weight.T
    errors = (product - expected).norm(dim=0) / expected.norm(dim=0)
    assert errors.mean() < 0.05
    assert errors.max() < 0.15  # of every output, small ones too


@pytest.mark.parametrize("num_tokens", [1, 7])
def test_scaled_product_of_the_device_accepts_its_inputs(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tested by torch's own checks of layouts, scales and types on a fake CUDA device."""
    monkeypatch.setattr("triptych.workers.execute.model.fused.fp8.scaled", defined_scaled)
    with FakeTensorMode():
        half: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        parts = [Fp8Projection.quantize(torch.empty(n, 64, **half)) for n in (96, 32)]
        projection = Fp8Projection.merge(parts, torch.empty(128, **half), torch.bfloat16)
        output = projection(torch.empty(num_tokens, 64, **half))
        assert (output.shape, output.dtype, output.device.type) == ((num_tokens, 128), torch.bfloat16, "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_quantizing_kernel_equals_the_definition(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(99, 200, device=DEVICE) * torch.logspace(-14, 10, 99, device=DEVICE)[:, None]).to(dtype)
    x[3] = 0
    x = x[:, 8:]
    # Interpreted, Triton loses a carry as it rounds to eight bits: there it is asked not to round.
    values, scales = quantize_rows(x, FP8 if HAS_GPU else torch.float32, greatest=448.0, least_scale=1e-12)
    expected = defined_scaled(x)
    assert torch.equal(scales, expected.scales)
    assert torch.equal(values.to(FP8).float(), expected.values.float())


class Divisors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the divisors of all divisions."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Any] = []

    def __torch_dispatch__(self, operator: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator.overloadpacket is torch.ops.aten.div:
            self.found.append(args[1])
        return operator(*args, **(kwargs or {}))


def test_fp8_divides_by_tensors_so_that_all_devices_round_alike() -> None:
    """A GPU does not divide by a host number: it multiplies by the reciprocal, which differs in the last bit."""
    with Divisors() as divisors:
        defined_scaled(torch.empty(3, 32, device="meta"))
    assert [getattr(divisor, "device", None) for divisor in divisors.found] == [torch.device("meta")] * 2


def test_nan_rows_stay_nan_in_fp8() -> None:
    x = torch.ones(2, 32, device=DEVICE)
    x[1, 5] = torch.nan
    values, scales = quantize_rows(x, FP8 if HAS_GPU else torch.float32, greatest=448.0, least_scale=1e-12)
    assert (values.float() * scales).isnan().any(dim=1).tolist() == [False, True]


@pytest.mark.usefixtures("rows_by_themselves")
def test_invariant_product_of_a_row_does_not_depend_on_the_number_of_rows() -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(n, 80, device=DEVICE) for n in (70, 50))
    bias = torch.randn(50, device=DEVICE)
    whole = invariant_linear(x, weight, bias)
    torch.testing.assert_close(whole, torch.nn.functional.linear(x, weight, bias), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(invariant_linear(x[a:b], weight, bias), whole[a:b]) for a, b in ((0, 1), (66, 70)))


@pytest.mark.usefixtures("rows_by_themselves")
def test_invariant_product_of_a_row_does_not_depend_on_the_tile_height() -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(n, 300, device=DEVICE) for n in (200, 150))
    tile = matmul_tile(200, 150, torch.float32)
    assert tile.num_rows == 128
    few = invariant_linear(x, weight, tile=tile._replace(num_rows=64, num_warps=4))
    assert torch.equal(invariant_linear(x, weight, tile=tile), few)


@pytest.mark.gpu
@pytest.mark.parametrize("num_outputs", [4096, 12288])
@pytest.mark.parametrize("num_inputs", [4096, 12288])
def test_invariant_product_of_a_row_equals_that_of_the_row_alone(num_inputs: int, num_outputs: int) -> None:
    """With realistic sizes and the served type, with few rows and with many."""
    torch.manual_seed(0)
    x, weight = (torch.randn(n, num_inputs, device=DEVICE).bfloat16() for n in (600, num_outputs))
    whole = invariant_linear(x, weight)
    for start, end in ((0, 1), (1, 65), (65, 130), (300, 599)):
        assert torch.equal(invariant_linear(x[start:end], weight), whole[start:end])


@pytest.mark.parametrize(("adds", "multiplier"), [(True, 1.0), (True, 0.25), (False, 1.0)])
def test_norm_adds_and_stores_the_sum(adds: bool, multiplier: float) -> None:
    torch.manual_seed(0)
    x, residual = (torch.randn(5, 72, device=DEVICE) for _ in range(2))
    weight = torch.rand(72, device=DEVICE)
    total = multiplier * x + residual if adds else x.clone()
    output = add_norm(x, residual, weight, 1e-6, adds=adds, multiplier=multiplier)
    torch.testing.assert_close(residual, total, rtol=0, atol=0)
    torch.testing.assert_close(output, torch.nn.functional.rms_norm(total, (72,), weight, 1e-6))


def test_norm_of_the_added_term() -> None:
    torch.manual_seed(0)
    x, residual = (torch.randn(5, 72, device=DEVICE) for _ in range(2))
    weight = torch.rand(72, device=DEVICE)
    total = residual + 0.5 * torch.nn.functional.rms_norm(x, (72,), weight, 1e-6)
    output = add_norm(x, residual, None, 1e-6, added_weight=weight, multiplier=0.5)
    torch.testing.assert_close(residual, total)
    assert output is residual


def test_norm_over_all_queries_and_all_keys() -> None:
    torch.manual_seed(0)
    qkv, weights = torch.randn(3, 96 + 32 + 32, device=DEVICE), [torch.rand(n, device=DEVICE) for n in (96, 32)]
    queries, keys, values = (part.clone() for part in torch.split(qkv, [96, 32, 32], dim=1))
    norm_queries_keys(qkv, (weights[0], weights[1]), 1e-6)
    expected = [
        torch.nn.functional.rms_norm(x, x.shape[1:], w, 1e-6) for x, w in zip((queries, keys), weights, strict=True)
    ]
    torch.testing.assert_close(qkv, torch.cat([*expected, values], dim=1))


@pytest.mark.parametrize(
    ("name", "activation"),
    [("silu", torch.nn.functional.silu), ("gelu_tanh", partial(torch.nn.functional.gelu, approximate="tanh"))],
)
def test_gate_mul(name: str, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
    both = 10 * torch.randn(3, 2 * 100, device=DEVICE)
    gate, up = both.chunk(2, dim=1)
    torch.testing.assert_close(gate_mul(both, name), activation(gate) * up)
