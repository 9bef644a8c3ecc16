"""Tiny checkpoints run by the compiled decoder, and transformers' results for them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests import tiny
from tests.workers.execute.factories import Propose, make_scheduler, run
from tests.workers.execute.kernels.levels import FASTEST, WHOLE_LEVELS, load_cached
from tests.workers.execute.model.native.families import FAMILIES
from triptych.protocol.arrays import Float32, Int32
from triptych.protocol.config import CacheConfig, ModelConfig, SchedulerConfig
from triptych.protocol.sampling import SamplingParams
from triptych.workers.execute.engine import Engine
from triptych.workers.execute.kernels.compile import available_levels
from triptych.workers.execute.kernels.structures import Format
from triptych.workers.execute.model.build import build_runner
from triptych.workers.execute.model.checkpoint.stored_weights import open_tensors
from triptych.workers.execute.model.facts import no_progress
from triptych.workers.execute.model.native.decoder import NativeDecoder
from triptych.workers.execute.model.native.weights import PackedWeights
from triptych.workers.execute.model.spec.describe import describe_decoder
from triptych.workers.execute.model.spec.ropes import find_ropes
from triptych.workers.execute.model.threads import Thresholds
from triptych.workers.execute.scheduling.sequence import Sequence
from triptych.workers.execute.scheduling.states import Segment
from triptych.workers.execute.step import StepCut, StepInputs

PAGE_SIZE, NUM_PAGES = 16, 64
FEW_PAGES = 12  # enough for a sequence of 150 tokens
PLAIN_FORMATS = tuple(format_ for format_ in Format if format_ not in (Format.MXFP4, Format.FINE_INT4))


def make_checkpoint(family: str, folder: Path, **overrides: Any) -> Path:
    """A random float32 checkpoint of a dense family; biases are random too, because a new model's are zero."""
    return tiny.saved(folder, partial(_build, family, **overrides), f"native {family} {overrides}")


def _build(family: str, **overrides: Any) -> PreTrainedModel:
    sizes = {**tiny.LLAMA_LIKE, **FAMILIES[family], **overrides}
    config = AutoConfig.for_model(family, **{name: size for name, size in sizes.items() if size is not ...})
    torch.manual_seed(0)
    from_config: Any = AutoModelForCausalLM.from_config
    model: PreTrainedModel = from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or name.endswith("bias"):
            spread = torch.rand(parameter.shape) - 0.5
            parameter.data = spread if name.endswith("bias") else 1 + spread
    for name, buffer in model.named_buffers():
        if name.endswith("bias"):  # of routers
            buffer.copy_(torch.rand(buffer.shape) / 5 - 0.1)
    return model


def make_pair(folder: Path) -> tuple[Path, Path]:
    """A checkpoint, and one of only its first layers that gives the same results: the other layers add nothing."""
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    whole = make_checkpoint("llama", folder / "whole", num_hidden_layers=20, **sizes)
    first = make_checkpoint("llama", folder / "first", num_hidden_layers=2, **sizes)
    tensors = load_file(whole / "model.safetensors")
    for name, tensor in tensors.items():
        is_first = name.startswith(("model.layers.0.", "model.layers.1."))
        if not is_first and name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    save_file(tensors, whole / "model.safetensors", metadata={"format": "pt"})
    known = load_file(first / "model.safetensors")
    save_file({name: tensors[name] for name in known}, first / "model.safetensors", metadata={"format": "pt"})
    return whole, first


def in_four_bits(checkpoint: Path, size: int = 64) -> Path:
    """The checkpoint, changed so that int4 represents the weights of all layers exactly, in groups of this size."""
    with changed_tensors(checkpoint) as tensors:
        layers = [name for name in tensors if (".layers." in name or ".h." in name) and not name.endswith("bias")]
        tensors |= {name: in_sixteenths(tensors[name], size) for name in layers if tensors[name].dim() == 2}
        # [experts, inputs, outputs]; the weights of a convolution are not quantised.
        stacks = [name for name in layers if tensors[name].dim() == 3 and "conv1d" not in name]
        tensors |= {name: torch.stack([in_sixteenths(each.T, size).T for each in tensors[name]]) for name in stacks}
    return checkpoint


def in_mxfp4(checkpoint: Path, twin: Path) -> Path:
    """The gpt-oss checkpoint with random experts in the published format. ``twin`` has their values."""
    shutil.copytree(checkpoint, twin)
    generator = torch.Generator().manual_seed(1)
    with changed_tensors(checkpoint) as tensors, changed_tensors(twin) as plain:
        for name in [name for name in tensors if tensors[name].dim() == 3]:
            num_experts, num_inputs, num_outputs = tensors.pop(name).shape
            groups = (num_experts, num_outputs, num_inputs // 32)
            numbers = torch.randint(0, 256, (*groups, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(119, 123, groups, dtype=torch.uint8, generator=generator)
            tensors |= {f"{name}_blocks": numbers, f"{name}_scales": scales}
            plain[name] = convert_moe_packed_tensors(numbers, scales, dtype=torch.float32).contiguous()
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    change_config(checkpoint, quantization_config=settings)
    return checkpoint


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@contextmanager
def changed_tensors(checkpoint: Path) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of the checkpoint, which are written back at the end of the block."""
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    yield tensors
    save_file(tensors, file, {"format": "pt"})


def in_sixteenths(weights: torch.Tensor, size: int = 64) -> torch.Tensor:
    """Weights [outputs, inputs] that int4 represents exactly: each is one of 16 multiples, and each group of this size
    contains both ends.
    """
    rounded = torch.empty_like(weights)
    for start in range(0, weights.shape[1], size):
        group = weights[:, start : start + size]
        scale = (group.abs().amax(dim=1, keepdim=True) / 8).bfloat16().to(weights.dtype)
        numbers = torch.round(group / scale).clamp(-8, 7)
        numbers[:, 0], numbers[:, 1:2] = -8, 7
        rounded[:, start : start + size] = numbers * scale
    return rounded


# How transformers computes by definition, in any type.
PLAINLY: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
_MOST_TOKENS = 200
NUM_STATE_ROWS = 4 * _MOST_TOKENS
EVERY_STEP = Thresholds(thread=0, team=0, ahead=1 << 62)  # large enough for several threads, and for planning ahead


def levels_and_formats(number: int) -> Iterator[tuple[str, Format]]:
    """Every format at the fastest level, and one of them at each other level, which differ for consecutive numbers."""
    yield from product([FASTEST], PLAIN_FORMATS)
    for i, level in enumerate(available_levels()[1:]):
        yield level, PLAIN_FORMATS[(number + i) % len(PLAIN_FORMATS)] if level in WHOLE_LEVELS else Format.BFLOAT16


def over_levels(names: str, cases: list[Any]) -> pytest.MarkDecorator:
    """Parametrise a test by ``names``, ``level`` and ``format_``, each case with some levels and formats."""
    values, ids = [], []
    for number, case in enumerate(cases):
        for level, format_ in levels_and_formats(number):
            values.append((*(case if isinstance(case, tuple) else (case,)), level, format_))
            ids.append("-".join(map(str, (*values[-1][:-1], format_.name.lower()))))
    return pytest.mark.parametrize(f"{names}, level, format_", values, ids=ids)


def make_decoder(checkpoint: Path, level: str, format_: Format, **options: Any) -> NativeDecoder:
    """Options are those of ``NativeDecoder``."""
    config = AutoConfig.from_pretrained(checkpoint)
    ropes = [rope.tables(512) for rope in find_ropes(config)]
    weights = pack(checkpoint, level, format_, config)
    return NativeDecoder(
        load_cached(level), weights, ropes, page_size=PAGE_SIZE, num_state_rows=NUM_STATE_ROWS, **options
    )


def make_small_decoder(checkpoint: Path, level: str, format_: Format, num_threads: int = 2) -> NativeDecoder:
    """A decoder with ``FEW_PAGES`` whose steps are shared by its threads."""
    options = {"num_pages": FEW_PAGES, "num_threads": num_threads, "thresholds": EVERY_STEP}
    return make_decoder(checkpoint, level, format_, **options)


def run_chunks(decoder: NativeDecoder, token_ids: Int32, sizes: Iterable[int]) -> Float32:
    """Logits [tokens, V] of one sequence in chunks, on ``FEW_PAGES`` in reverse order."""
    pieces, start = [], 0
    for size in sizes:
        pieces.append(decoder.run(make_inputs([(token_ids, start, size)], num_pages=FEW_PAGES)).logits.copy())
        start += size
    return np.concatenate(pieces)


def pack(
    checkpoint: Path, level: str, format_: Format, config: PretrainedConfig | None = None, **options: Any
) -> PackedWeights:
    """Options are those of ``PackedWeights``."""
    tensors = open_tensors(checkpoint)
    return PackedWeights(
        describe_decoder(config or AutoConfig.from_pretrained(checkpoint), tensors.shapes()),
        tensors,
        library=load_cached(level),
        format_=format_,
        num_threads=2,
        progress=no_progress,
        **options,
    )


def some_of(outputs: list[list[int]]) -> Propose:
    """Proposes the expected tokens, except for every fourth."""

    def propose(sequence: Sequence, max_tokens: int) -> list[int]:
        count = sequence.num_output_tokens
        known = outputs[sequence.key[0]][count : count + max_tokens]
        return [(token + (place % 4 == 0)) % tiny.VOCAB_SIZE for place, token in enumerate(known, count)]

    return propose


class NativeEngine:
    """Sequences in the engine on the compiled decoder; ``greedy`` gives the tokens of transformers."""

    def __init__(
        self, checkpoint: Path, run_dir: Path, *, num_pages: int | None = NUM_PAGES, kv_dtype: str = "auto",
        host_pages: int = 0, draft: Path | None = None, max_num_seqs: int = 8, prefill_chunk: int = 64,
        num_speculative_tokens: int | None = None, **model_options: Any,
    ) -> None:  # fmt: skip
        options = {"backend": "native", "device": "cpu", **model_options}
        self.checkpoint = checkpoint
        self.runner, self.card = build_runner(
            ModelConfig(model=str(checkpoint), **options),
            CacheConfig(num_pages=num_pages, page_size=PAGE_SIZE, kv_dtype=kv_dtype, host_pages=host_pages),
            SchedulerConfig(
                max_num_seqs=max_num_seqs, prefill_chunk=prefill_chunk, num_speculative_tokens=num_speculative_tokens
            ),
            model_dir=checkpoint,
            draft_folder=draft,
            run_dir=run_dir,
        )

    def warm_up_draft(self) -> None:
        assert self.runner.proposer is not None
        self.runner.proposer.warm_up(no_progress, is_first=True)
        self.runner.proposer.measure_costs(self.runner.decode_s)

    @cached_property
    def model(self) -> PreTrainedModel:
        """The same checkpoint in transformers, which most engines are not compared with."""
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(self.checkpoint, dtype=torch.float32, **PLAINLY)
        return model

    def run(self, *sequences: Sequence, num_pages: int = NUM_PAGES, **options: Any) -> list[list[int]]:
        """The output tokens of each sequence, all in one engine."""
        scheduler = make_scheduler(
            *sequences,
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            max_model_len=min(self.card.max_model_len, num_pages * PAGE_SIZE),
            proposer=self.runner.proposer,
            **{"num_snapshots": self.card.num_snapshots, "check_costs": self.runner.check_costs, **options},
        )
        outputs = run(Engine(scheduler, self.runner))
        return [outputs[sequence.key] for sequence in sequences]

    def greedy(self, prompt: Iterable[int], num_tokens: int) -> list[int]:
        return greedy(self.model, prompt, num_tokens)


@torch.inference_mode()
def greedy(model: Any, prompt: Iterable[int], num_tokens: int) -> list[int]:
    """What transformers generates."""
    ids = torch.tensor([list(prompt)])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens, eos_token_id=None
    )
    tokens: list[int] = output[0, ids.shape[1] :].tolist()
    return tokens


@torch.inference_mode()
def greedy_choices(model: Any, prompt: Sequence, output: list[int]) -> list[int]:
    """What transformers chooses after the prompt, and after each token of ``output`` but the last.

    If these are the tokens of ``output``, they are the ones it would generate, found in one pass instead of one each.
    """
    assert len(output) == prompt.params.max_tokens
    ids = torch.tensor([[*prompt.tokens[: prompt.num_prompt_tokens].tolist(), *output[:-1]]])
    choices: list[int] = model(ids, use_cache=False).logits[0, prompt.num_prompt_tokens - 1 :].argmax(-1).tolist()
    return choices


def make_inputs(chunks: list[tuple[Int32, int, int]], *, num_pages: int) -> StepInputs:
    """One step over (token ids, start, count) of each sequence, all sampled, with pages in reverse order."""
    each = num_pages // len(chunks)
    tables = np.array([np.arange(each)[::-1] + 1 + each * s for s in range(len(chunks))], np.int32)
    positions = [np.arange(start, start + size, dtype=np.int32) for _, start, size in chunks]
    slots = [tables[s, p // PAGE_SIZE].astype(np.int64) * PAGE_SIZE + p % PAGE_SIZE for s, p in enumerate(positions)]
    lengths = [size for _, _, size in chunks]
    return StepInputs(
        token_ids=np.concatenate([ids[p] for (ids, _, _), p in zip(chunks, positions, strict=True)]),
        positions=np.concatenate(positions),
        slot_mapping=np.concatenate(slots),
        query_starts=np.cumsum([0, *lengths], dtype=np.int32),
        context_lens=np.array([p[-1] + 1 for p in positions], np.int32),
        block_tables=tables,
        num_decodes=0,
        sample_rows=np.arange(sum(lengths), dtype=np.int32),
        sampled=(),
        cut=StepCut.of(
            [Segment(_state_row(s, a), _state_row(s, a + n), a, n) for s, (_, a, n) in enumerate(chunks)],
            num_decodes=0,
        ),
    )


def _state_row(sequence: int, num_tokens: int) -> int:
    """A row for each state that one of the first sequences may write."""
    return 1 + sequence * _MOST_TOKENS + num_tokens


def make_request(
    index: int, num_tokens: int, max_tokens: int, vocab_size: int = tiny.VOCAB_SIZE, **params: Any
) -> Sequence:
    """A random prompt that depends only on ``index``."""
    tokens = np.zeros(num_tokens + max_tokens, np.int32)
    tokens[:num_tokens] = np.random.default_rng(index).integers(3, vocab_size, num_tokens)
    return Sequence(
        key=(index, 0),
        tokens=tokens,
        num_prompt_tokens=num_tokens,
        num_tokens=num_tokens,
        params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params),
        seed=index,
        arrival=index,
    )


def adapt(sequence: Sequence, adapter: int) -> Sequence:
    """The request with the adapter of this number; 0 for none."""
    sequence.adapter, sequence.cache_salt = adapter, str(adapter)
    return sequence
