from __future__ import annotations

from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tiny import FAMILIES, LLAMA_LIKE, RECURRENT, REFUSED, build_tiny_model, needs_states
from triptych.protocol.errors import ConfigError
from triptych.workers.execute.attention.cpu import CpuAttention
from triptych.workers.execute.attention.interface import AttentionForm, LayerCache, PagedAttention
from triptych.workers.execute.attention.reference import ReferenceAttention
from triptych.workers.execute.model.checkpoint.find import check_layer_types
from triptych.workers.execute.model.lora import Adapter, LowRank
from triptych.workers.execute.model.modules import self_test
from triptych.workers.execute.model.modules.lora import TorchAdapters
from triptych.workers.execute.model.modules.self_test import switch_to_pages
from triptych.workers.execute.model.pool import LayerShape

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("kernel", [ReferenceAttention, CpuAttention])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_right_family_is_accepted(family: str, dtype: torch.dtype, kernel: type[PagedAttention]) -> None:
    model: Any = build_tiny_model(family)
    memory = switch_to_pages(model.to(dtype), kernel(), max_model_len=512)
    assert sorted(memory.pages) == list(range(model.config.num_hidden_layers))
    assert memory.pages[0].dtype == dtype
    assert not memory.states.shapes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_of_any_size_are_accepted(dtype: torch.dtype) -> None:
    """torch multiplies with all experts at once only if their rows are multiples of 16 bytes."""
    sizes = {**LLAMA_LIKE, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 14}
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **sizes))
    assert switch_to_pages(model.to(dtype).eval(), CpuAttention(), max_model_len=512).pages


@needs_states
@pytest.mark.parametrize(
    ("family", "dtype"), [*product(RECURRENT, DTYPES[:2]), ("qwen3_5_text", torch.float16), ("mamba2", torch.float16)]
)
def test_recurrent_family_is_accepted(family: str, dtype: torch.dtype) -> None:
    model: Any = build_tiny_model(family)
    check_layer_types(model.config)
    pages, states = switch_to_pages(model.to(dtype), CpuAttention(), max_model_len=512)
    modules = {key.module for key in states.shapes}
    assert modules == set(range(len(modules)))
    assert max(len(pages), len(modules)) <= model.config.num_hidden_layers <= len(pages) + len(modules) + 1
    assert states.stepwise == (modules if family in ("mamba", "jamba") else set())


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("falcon", "does not let its attention be replaced"),
        ("bloom", "does not let its attention be replaced"),
        ("minimax", "calls the attention function 2 times in a step and has 3 layers"),
        ("llama4_text", "its logits differ by .* the limit is"),
        ("doge", "the layer makes an attention mask of its own"),
    ],
)
def test_wrong_family_is_refused_by_its_results(family: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"model family '{family}' .*{reason}"):
        switch_to_pages(build_tiny_model(family), CpuAttention(), max_model_len=512)


def test_wrong_family_is_refused_by_its_config_before_weights_are_read() -> None:
    with pytest.raises(ConfigError, match="layers of type"):
        check_layer_types(build_tiny_model("llama4_text").config)


def test_every_listed_wrong_family_is_tried() -> None:
    assert set(REFUSED) == {"falcon", "bloom", "minimax", "llama4_text", "doge"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wrong_kernel_is_detected(dtype: torch.dtype) -> None:
    class Forgetful(ReferenceAttention):
        """Attends only to the step's own tokens."""

        def attend(self, cache: LayerCache, query: torch.Tensor, form: AttentionForm) -> torch.Tensor:
            return super().attend(cache, query, form._replace(sliding_window=2))

    model: Any = build_tiny_model("llama")
    with pytest.raises(ConfigError, match="its logits differ"):
        switch_to_pages(model.to(dtype), Forgetful(), max_model_len=512)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernel_is_refused_whose_outputs_are_no_numbers_for_a_single_token(dtype: torch.dtype) -> None:
    """In half precision, as many may differ. In the only layer, as in the last one, it spoils no other token."""

    class Masked(ReferenceAttention):
        """As a kernel that lets the first token of a sequence attend to nothing."""

        def attend(self, cache: LayerCache, query: torch.Tensor, form: AttentionForm) -> torch.Tensor:
            outputs = super().attend(cache, query, form)
            outputs[torch.from_numpy(self._inputs.positions == 0)] = torch.nan
            return outputs

    config = AutoConfig.for_model("llama", **{**LLAMA_LIKE, "num_hidden_layers": 1})
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ConfigError, match="its logits differ by nan"):
        switch_to_pages(model.to(dtype), Masked(), max_model_len=512)


def make_wavering() -> Any:
    """In bfloat16, the tokens of this model choose other experts whenever something is rounded differently."""
    sizes = {**LLAMA_LIKE, "num_local_experts": 32, "num_hidden_layers": 6}
    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt_oss", **sizes)
    return AutoModelForCausalLM.from_config(config).bfloat16().eval()


def test_rounding_sensitive_model_is_compared_in_float32() -> None:
    model = make_wavering()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    places = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    update = LowRank(torch.randn(8, 64), torch.randn(64, 8) / 100)
    adapters = TorchAdapters(model, [Adapter("a", {"model.layers.2.self_attn.q_proj": update})])
    memory = switch_to_pages(model, CpuAttention(), max_model_len=512, adapters=adapters)
    assert {shape.dtype for shape in memory.pages.values()} == {torch.bfloat16}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == places  # no copies are left


def test_first_comparison_decides_if_memory_for_float32_is_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_wavering()
    monkeypatch.setattr(self_test, "available_bytes", lambda device: 5 * model.num_parameters())
    with pytest.raises(ConfigError, match="its logits differ by"):
        switch_to_pages(model, CpuAttention(), max_model_len=512)


@pytest.mark.parametrize("max_model_len", [100, 101])
def test_window_that_layers_do_not_pass_on_is_refused_where_it_matters(max_model_len: int) -> None:
    model = build_tiny_model("llama")
    model.config.sliding_window = 100
    refused = pytest.raises(ConfigError, match="sliding window of 100 tokens that layer 0 does not pass on")
    with refused if max_model_len > 100 else nullcontext():
        switch_to_pages(model, CpuAttention(), max_model_len=max_model_len)


def test_attention_shapes_are_recorded_per_layer() -> None:
    memory = switch_to_pages(build_tiny_model("llama"), CpuAttention(), max_model_len=512)
    assert memory.pages[1] == LayerShape(num_kv_heads=2, key_dim=16, value_dim=16, dtype=torch.float32)
