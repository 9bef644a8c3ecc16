"""Launches of every Triton kernel, in the shapes of models, for GPUs with more shared memory and with less.

Kernels are imported where they are launched: what compiles or launches them is chosen before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

# Shared memory per block of Hopper, of an A100, of Ada, which has as much as other Ampere and Blackwell, and of Turing.
HOPPER_BYTES, AMPERE_BYTES, WORKSTATION_BYTES, TURING_BYTES = 227 << 10, 163 << 10, 99 << 10, 64 << 10


def every() -> None:
    for launch in every_kernel():
        launch()


def every_kernel() -> list[Callable[[], object]]:
    """A launch of every kernel in the shapes of Qwen3-8B, and of attention in those of other families."""
    from triptych.workers.execute.kernels.triton_chunk import KeySplits
    from triptych.workers.execute.kernels.triton_experts import Choices, choose_experts, sort_pairs, sum_pairs
    from triptych.workers.execute.kernels.triton_fp8 import quantize_rows
    from triptych.workers.execute.kernels.triton_matmul import invariant_linear
    from triptych.workers.execute.kernels.triton_one_row import add_chosen, one_row_linear
    from triptych.workers.execute.kernels.triton_rows import add_norm, gate_mul, norm_queries_keys
    from triptych.workers.execute.kernels.triton_select import draw_rows
    from triptych.workers.execute.kernels.triton_write import rotate_and_write, write_slots

    half = torch.bfloat16
    pages = torch.empty(4, 16, 8, 128, dtype=half)
    slots = torch.zeros(32, dtype=torch.int32)
    rope = (torch.empty(64, 64), torch.empty(64, 64))
    norm = torch.empty(128, dtype=half)
    hidden = torch.empty(32, 4096, dtype=half)

    qkv = torch.empty(32, 48 * 128, dtype=half)
    experts, token = torch.zeros(32, 8, dtype=torch.int32), torch.empty(1, 2048, dtype=half)
    logits, table = torch.empty(32, 1 << 15), torch.zeros(5, 32, dtype=torch.float64)

    def rotate(
        rope: tuple[torch.Tensor, torch.Tensor] | None, norms: tuple[torch.Tensor, torch.Tensor] | None, **growth: Any
    ) -> object:
        return rotate_and_write(
            qkv, pages, pages, slots=slots, positions=slots, rope=rope, norms=norms, norm_eps=1e-6, num_heads=32,
            **growth,
        )  # fmt: skip

    found: list[Callable[[], object]] = [
        lambda: write_slots(torch.empty(32, 8, 128, dtype=half), pages, slots),
        lambda: rotate(rope, None),
        lambda: rotate(rope, (norm, norm)),
        lambda: rotate(None, None),
        lambda: rotate(rope, None, growth=0.1, growth_span=8192),
        lambda: add_norm(hidden, hidden, hidden[0], 1e-6),
        lambda: add_norm(hidden, hidden, hidden[0].float(), 1e-6, added_weight=hidden[0].float()),
        lambda: add_norm(hidden, hidden, None, 1e-6, added_weight=hidden[0]),
        lambda: norm_queries_keys(qkv, (qkv[0, :4096], qkv[0, 4096:5120]), 1e-6),
        lambda: gate_mul(torch.empty(32, 2 * 12288, dtype=half), "silu"),
        lambda: gate_mul(torch.empty(32, 2 * 12288, dtype=half), "gelu_tanh"),
        lambda: choose_experts(torch.empty(32, 128, dtype=half), 8, norms_weights=True),
        lambda: sort_pairs(experts, 128),
        lambda: sum_pairs(torch.empty(256, 2048, dtype=half), 8),
        lambda: quantize_rows(
            torch.empty(32, 12288, dtype=half), torch.float8_e4m3fn, greatest=448.0, least_scale=1e-12
        ),
        lambda: draw_rows(logits, logits[:, 0].clone(), torch.zeros(32, dtype=torch.int64), table, has_cuts=True),
        lambda: invariant_linear(hidden, torch.empty(24576, 4096, dtype=half), torch.empty(24576, dtype=half)),
        lambda: one_row_linear(hidden[:1], qkv.view(48, 4096), norm=hidden[0]),
        lambda: one_row_linear(hidden[:1], torch.empty(24576, 4096, dtype=half), norm=hidden[0], activation="silu"),
        lambda: one_row_linear(
            torch.empty(1, 12288, dtype=half), torch.empty(4096, 12288, dtype=half), residual=hidden[:1]
        ),
        lambda: one_row_linear(
            hidden[:1],
            torch.empty(24576, 4096, dtype=torch.float8_e4m3fn),
            scales=torch.empty(24576, 1),
            norm=hidden[0],
            activation="silu",
        ),
        lambda: one_row_linear(
            token, torch.empty(128, 1536, 2048, dtype=half, device="meta"), experts=experts[:1], norm=token[0],
            activation="silu",
        ),
        lambda: add_chosen(
            torch.empty(8, 768, dtype=half), torch.empty(128, 2048, 768, dtype=half, device="meta"),
            Choices(experts[:1], torch.empty(1, 8)), residual=token,
        ),
    ]  # fmt: skip
    forms: list[dict[str, Any]] = [  # every feature once, combined where possible: each takes seconds
        {},
        {"dim": 256, "softcap": 50.0, "window": 4096, "splits": KeySplits(2048, is_parallel=True)},
        {"dim": 512},
        {"group": 8, "dim": 96, "page_size": 64, "sinks": torch.empty(16, dtype=half), "window": 128,
         "splits": KeySplits(2048, is_parallel=False)},
        {"dtype": torch.float32, "page_size": 256},
    ]  # fmt: skip
    # Without splits, the decode is the same code without the combining parts: one form of it is enough.
    kernels = [(form, kernel) for form in forms for kernel in (1, 2)]
    kernels += [({"dtype": torch.float32, "dim": dim}, kernel) for dim, kernel in ((512, 1), (256, 2))]
    kernels += [({"page_size": 64}, 0), ({"page_size": 64, "splits": KeySplits(256, is_parallel=True)}, 2)]
    found += [partial(attend, kernel, **form) for form, kernel in kernels]
    cases = ((128, "LARGE"), (128, "SMALL"), (64, "LARGE"))
    return found + [partial(attend_on_hopper, 8, *case) for case in cases]


def attend(
    kernel: int, *, dim: int = 128, group: int = 4, page_size: int = 16, dtype: torch.dtype = torch.bfloat16,
    window: int | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None, splits: Any = None,
    shared_bytes: int = HOPPER_BYTES, has_eight_bits: bool = False,
) -> None:  # fmt: skip
    """Kernel 0 is the decode without splits, 1 with 8 of them, 2 that of chunks."""
    from triptych.workers.execute.kernels.sizes import num_scales
    from triptych.workers.execute.kernels.triton_chunk import chunk_attention, chunk_tile
    from triptych.workers.execute.kernels.triton_decode import decode_attention, decode_tile

    query = torch.empty(8, 2 * group, dim, dtype=dtype)
    pages, scales = torch.empty(4, page_size, 2, dim, dtype=torch.int8 if has_eight_bits else dtype), None
    if has_eight_bits:
        scales = torch.empty(4, 2, num_scales(dim), page_size, dtype=torch.bfloat16)
    ints = torch.zeros(16, dtype=torch.int32)
    form: dict[str, Any] = {"scale": 0.1, "window": window, "softcap": softcap, "sinks": sinks, "scales": scales}
    own: dict[str, Any] = {"shared_bytes": shared_bytes, "has_eight_bits": has_eight_bits}
    tables = torch.zeros(8, 16, dtype=torch.int32)
    if kernel == 2:
        chunk_attention(
            query, pages, pages, torch.empty_like(query), block_tables=tables, context_lens=ints[:8],
            query_starts=ints[:9], splits=splits,
            tile=chunk_tile(dim, dtype, **own), **form,
        )  # fmt: skip
    else:
        decode_attention(
            query, pages, pages, block_tables=tables, context_lens=ints[:8], num_splits=(1, 8)[kernel],
            tile=decode_tile(dim, dtype, **own), **form,
        )  # fmt: skip


def attend_on_hopper(num_tokens: int, dim: int, tile: str) -> None:
    from triptych.workers.execute.kernels import triton_chunk_hopper

    query, pages = (
        torch.empty(num_tokens, 8, dim, dtype=torch.bfloat16),
        torch.empty(4, 64, 2, dim, dtype=torch.bfloat16),
    )
    ints = torch.zeros(4096, dtype=torch.int32)
    triton_chunk_hopper.hopper_attention(
        query, pages, pages, torch.empty_like(query), scale=0.1, num_processors=132,
        tile=getattr(triton_chunk_hopper, tile),
        block_tables=ints[num_tokens : 3 * num_tokens].view(2, -1), context_lens=ints[num_tokens : num_tokens + 2],
        query_starts=ints[num_tokens : num_tokens + 3],
    )  # fmt: skip


def products() -> None:
    """The invariant product of few and of many rows, with narrow and with wide tiles."""
    from triptych.workers.execute.kernels.triton_matmul import invariant_linear

    for num_outputs in (4096, 8192):
        weight = torch.empty(num_outputs, 4096, dtype=torch.bfloat16)
        for num_rows in (1, 65):
            invariant_linear(torch.empty(num_rows, 4096, dtype=torch.bfloat16), weight)
    invariant_linear(torch.empty(65, 4096), torch.empty(8192, 4096))


def expert_products() -> None:
    """Experts with few, some, and many tokens, in the shapes of Qwen3-30B-A3B; and in float32."""
    from triptych.workers.execute.kernels.triton_experts import expert_product, expert_tile, sort_pairs

    half = torch.bfloat16
    cases = ((32, half, False), (512, half, False), (4096, half, False), (32, half, True), (32, torch.float32, True))
    for num_tokens, dtype, is_invariant in cases:
        experts = torch.zeros(num_tokens, 8, dtype=torch.int32)
        pairs, tile = sort_pairs(experts, 128), expert_tile(num_tokens * 8, 128, dtype, is_invariant=is_invariant)
        x, scales = torch.empty(num_tokens, 2048, dtype=dtype), torch.empty(num_tokens, 8)
        gated = expert_product(x, torch.empty(128, 1536, 2048, dtype=dtype, device="meta"), pairs, tile)
        down = torch.empty(128, 2048, 768, dtype=dtype, device="meta")
        expert_product(gated[:, :768].contiguous(), down, pairs, tile, scales=scales)


def largest() -> None:
    """Those that need the most shared memory, with as little as GPUs for workstations have."""
    from triptych.workers.execute.kernels.triton_matmul import invariant_linear

    attend(2, dim=256, shared_bytes=WORKSTATION_BYTES)
    invariant_linear(torch.empty(1, 4096, dtype=torch.bfloat16), torch.empty(8192, 4096, dtype=torch.bfloat16))


def attention() -> None:
    """Both kernels, with as little shared memory as Turing has, which has no bfloat16 either."""
    for dim in (128, 256):
        for kernel in (1, 2):
            attend(kernel, dim=dim, dtype=torch.float16, page_size=64, shared_bytes=TURING_BYTES)


def eight_bits() -> None:
    """Everything that writes and reads keys and values in eight bits, in the shapes of ``every_kernel``."""
    from triptych.workers.execute.kernels.triton_chunk import KeySplits
    from triptych.workers.execute.kernels.triton_write import rotate_and_write, write_eight_bits

    half = torch.bfloat16
    pages, scales = torch.empty(4, 64, 8, 128, dtype=torch.int8), torch.empty(4, 8, 5, 64, dtype=half)
    slots, rope, norm = torch.zeros(32, dtype=torch.int32), torch.empty(64, 64), torch.empty(128, dtype=half)
    for is_key in (True, False):
        write_eight_bits(torch.empty(32, 8, 128, dtype=half), pages, scales, slots, is_key=is_key)
    rotate_and_write(
        torch.empty(32, 48 * 128, dtype=half), pages, pages, scales=scales, slots=slots, positions=slots,
        rope=(rope, rope), norms=(norm, norm), norm_eps=1e-6, num_heads=32,
    )  # fmt: skip
    forms: list[dict[str, Any]] = [
        {"page_size": 64},
        {"page_size": 16},
        {"dim": 256, "page_size": 64, "softcap": 50.0, "window": 4096, "splits": KeySplits(2048, is_parallel=True)},
        {"dim": 96, "group": 8, "page_size": 64, "sinks": torch.empty(16, dtype=half), "window": 128,
         "splits": KeySplits(2048, is_parallel=False)},
        {"dim": 512, "page_size": 64},
        {"dtype": torch.float32, "page_size": 64},
    ]  # fmt: skip
    for form in forms:
        for kernel in (1, 2):
            attend(kernel, has_eight_bits=True, **form)


def eight_bits_on(shared_bytes: int, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Both kernels on GPUs with this much shared memory."""
    for dim in (128, 256):
        for kernel in (1, 2):
            attend(kernel, dim=dim, dtype=dtype, page_size=64, shared_bytes=shared_bytes, has_eight_bits=True)


def adapters(dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)) -> None:
    """Both products of few and of many rows, for adapters of rank 16 and of up to 64, in the shapes of Qwen3-8B."""
    for dtype in dtypes:
        for ranks in ((16,) * 8, (16, 64)):
            for num_rows in (1, 2048):
                adapt(torch.zeros(num_rows, dtype=torch.int32), ranks, dtype=dtype)


def adapt(owners: torch.Tensor, ranks: tuple[int, ...], *, num_inputs: int = 4096, dtype: torch.dtype) -> None:
    """What adapters of these ranks add to queries, keys and values of rows with these adapters."""
    from triptych.workers.execute.model.grouped_lora import GroupedAdapters
    from triptych.workers.execute.model.lora import Adapter, LowRank

    x = torch.empty(len(owners), num_inputs, dtype=dtype)
    sizes = (4096, 1024, 1024)
    each = [[LowRank(x.new_empty(rank, num_inputs), torch.empty(size, rank)) for size in sizes] for rank in ranks]
    grouped = GroupedAdapters([Adapter("", {"q": updates[0]}) for updates in each], x.device)
    matrices = [(sum(sizes[:m]), {i: updates[m] for i, updates in enumerate(each)}) for m in range(len(sizes))]
    linear = grouped.stack_merged(matrices, like=x)
    linear.add(x, x.new_empty(len(x), sum(sizes)), grouped.rows_of(owners))


def many_steps() -> None:
    """The same kernels in steps of many sizes, whose arrays begin anywhere in shared memory."""
    from triptych.workers.execute.kernels.triton_chunk import KeySplits, chunk_attention
    from triptych.workers.execute.kernels.triton_decode import decode_attention
    from triptych.workers.execute.kernels.triton_matmul import invariant_linear
    from triptych.workers.execute.kernels.triton_write import write_slots

    pages = torch.empty(4, 16, 2, 64, dtype=torch.bfloat16)
    shared = torch.zeros(4096, dtype=torch.int32)
    form: dict[str, Any] = {"scale": 0.1, "window": None, "softcap": None, "sinks": None}
    for size in (1, 2, 3, 5, 16, 17, 32):
        query = torch.empty(size, 4, 64, dtype=torch.bfloat16)
        ints, tables = shared[size : 2 * size], shared[size : size + size * size].view(size, size)
        write_slots(torch.empty(size, 2, 64, dtype=torch.bfloat16), pages, ints)
        for num_splits in (1, 2, 4, 32):
            decode_attention(query, pages, pages, block_tables=tables, context_lens=ints, num_splits=num_splits, **form)
        chunk_attention(
            query, pages, pages, torch.empty_like(query), block_tables=tables, context_lens=ints,
            query_starts=shared[size : 2 * size + 1], splits=KeySplits(64 * size, True), **form,
        )  # fmt: skip
        invariant_linear(torch.empty(size, 64, dtype=torch.bfloat16), torch.empty(96, 64, dtype=torch.bfloat16))
        adapt(ints, (16, 8), num_inputs=64, dtype=torch.bfloat16)
        attend_on_hopper(size, 64, "SMALL")
