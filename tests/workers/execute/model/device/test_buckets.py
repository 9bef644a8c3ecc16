"""Which steps run as graphs, and how they are laid out in the static buffers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from triptych.workers.execute.model.device.buckets import (
    Router,
    StepSize,
    check_sizes,
    chunk_buckets,
    decode_buckets,
    mixed_row_buckets,
)
from triptych.workers.execute.model.step_runner import trash_decodes, trash_prefill
from triptych.workers.execute.step import StepInputs

pytest.importorskip("triton")

from triptych.workers.execute.model.device.mixed_buffers import MixedBuffers


@pytest.mark.parametrize(
    ("max_rows", "buckets"),
    [(1, [1]), (4, [1, 2, 4]), (6, [1, 2, 4, 6]), (20, [1, 2, 4, 8, 16, 20]), (8, [1, 2, 4, 8])],
)
def test_buckets(max_rows: int, buckets: list[int]) -> None:
    assert decode_buckets(max_rows) == buckets


def test_graphs_of_many_rows_are_few() -> None:
    """Each takes memory from the pages, and time at the start."""
    assert decode_buckets(300)[-5:] == [248, 256, 272, 288, 300]
    assert [len(decode_buckets(max_rows)) for max_rows in (256, 1024, 65_536)] == [35, 35 + 2 * 16, 35 + 8 * 16]


@pytest.mark.parametrize(
    ("inputs", "bucket"),
    [
        (trash_decodes(1), 1),
        (trash_decodes(3), 4),
        (trash_decodes(8), 8),
        (trash_decodes(9), None),
        (trash_prefill(5), None),
        (trash_prefill(1), 1),
    ],
    ids=["one", "padded", "largest", "too many", "prefill", "a prompt of one token is a decode in all but name"],
)
def test_only_steps_of_decodes_that_fit_use_a_graph(inputs: StepInputs, bucket: int | None) -> None:
    assert Router(8, 64).size(inputs) == (None if bucket is None else StepSize(bucket))


def test_sequence_with_more_pages_than_the_graphs_use_no_graph() -> None:
    assert Router(8, 0, [8]).size(trash_decodes(2)) is None
    assert Router(8, 0, [8]).size(trash_prefill(2)) is None


def make_mixed(num_decodes: int, lengths: list[int], **changes: Any) -> StepInputs:
    """Decodes, and chunks of these lengths. All are sampled."""
    total = num_decodes + sum(lengths)
    inputs = trash_prefill(total)
    starts = np.cumsum([0, *[1] * num_decodes, *lengths], dtype=np.int32)
    num_seqs = num_decodes + len(lengths)
    return replace(
        inputs,
        query_starts=starts,
        context_lens=np.arange(1, num_seqs + 1, dtype=np.int32),
        block_tables=np.arange(3 * num_seqs, dtype=np.int32).reshape(num_seqs, 3),
        num_decodes=num_decodes,
        **{"sample_rows": starts[1:] - 1, "sampled": [*inputs.sampled] * num_seqs, **changes},
    )


@pytest.mark.parametrize(
    ("inputs", "size"),
    [
        (make_mixed(0, [3]), (0, 64)),
        (make_mixed(1, [64]), (16, 64)),
        (make_mixed(17, [65]), (20, 128)),
        (make_mixed(20, [128]), (20, 128)),
        (make_mixed(20, [129]), None),
        (make_mixed(21, [9]), None),
        (make_mixed(2, [2] * 4), (16, 64)),
        (make_mixed(2, [2] * 5), (16, 128)),
        (make_mixed(2, [2] * 9), None),
        (make_mixed(2, [9], scored=["a prompt"]), None),
        (make_mixed(1, [3], sample_rows=np.arange(4)), None),
    ],
    ids=["alone", "padded", "between", "largest", "many tokens", "many decodes", "chunks", "more chunks", "many chunks",
         "scored", "proposals"],
)  # fmt: skip
def test_steps_with_prompts_use_the_smallest_graph_that_holds_them(
    inputs: StepInputs, size: tuple[int, int] | None
) -> None:
    assert Router(20, 64, [64, 128]).size(inputs) == (size and StepSize(*size))


@pytest.mark.parametrize(
    ("lengths", "size"),
    [([1, 3], (16, 8)), ([6], (6, 1)), ([2] * 17, (64, 32)), ([100], (128, 64)), ([9] * 7 + [65], (128, 64)),
     ([129], (0, 256)), ([3] * 65, None)],
    ids=["padded", "one stream", "many", "long", "together", "too long", "too many"],
)  # fmt: skip
def test_draft_model_reads_a_few_tokens_in_the_graphs_of_proposals(
    lengths: list[int], size: tuple[int, int] | None
) -> None:
    """Of each sequence, the last token is sampled, or none is."""
    router = Router(64, 64, [64, 128, 256], check_sizes(64, 5))
    router.takes_short_chunks = True
    inputs = make_mixed(0, lengths)
    expected = size and (StepSize(*size) if size[0] == 0 else StepSize(0, *size))
    assert router.size(inputs) == router.size(replace(inputs, sample_rows=inputs.sample_rows[:0])) == expected


def make_checks(num_decodes: int, lengths: list[int]) -> StepInputs:
    """Decodes, and sequences with proposals that have these lengths. All tokens are sampled."""
    inputs = make_mixed(num_decodes, lengths)
    total = len(inputs.token_ids)
    return replace(inputs, sample_rows=np.arange(total, dtype=np.int32), sampled=[inputs.sampled[0]] * total)


@pytest.mark.parametrize(
    ("max_rows", "max_proposals", "sizes"),
    [
        (4, 0, []),
        (1, 5, [(6, 1)]),
        (2, 1, [(2, 1), (16, 8)]),
        (4, 5, [(6, 1), (16, 8), (32, 16)]),
        (12, 1, [(2, 1), (16, 8), (32, 16)]),
        (256, 15, [(16, 1), (16, 8), (32, 16), (64, 32), (96, 48), (128, 64), (128, 127)]),
    ],
    ids=["none", "one stream", "few tokens", "few rows", "many rows", "most"],
)
def test_sizes_of_steps_with_proposals(max_rows: int, max_proposals: int, sizes: list[tuple[int, int]]) -> None:
    assert [(s.num_chunk_tokens, s.num_checked) for s in check_sizes(max_rows, max_proposals)] == sizes


@pytest.mark.parametrize(
    ("inputs", "size"),
    [
        (make_checks(0, [2]), (6, 1)),
        (make_checks(0, [6]), (6, 1)),
        (make_checks(1, [2]), (16, 8)),
        (make_checks(7, [2]), (16, 8)),
        (make_checks(8, [2]), (32, 16)),
        (make_checks(60, [6]), (128, 64)),
        (make_checks(80, [6]), (128, 127)),
        (make_checks(0, [6] * 16), (96, 48)),
        (make_checks(0, [6] * 22), None),
        (make_mixed(20, [1]), (64, 64)),
    ],
    ids=["one stream", "full", "beside a decode", "many sequences", "more sequences", "one among many",
         "one among more", "16 streams", "too many", "a prompt's last token"],
)  # fmt: skip
def test_steps_with_proposals_use_the_smallest_graph_that_holds_them(
    inputs: StepInputs, size: tuple[int, int] | None
) -> None:
    found = Router(256, 512, [64], check_sizes(256, 5)).size(inputs)
    assert (found and (found.num_chunk_tokens, found.num_checked or found.num_rows)) == size


def test_every_step_with_proposals_has_a_graph() -> None:
    for max_rows, max_proposals in ((1, 1), (3, 5), (20, 3), (256, 1), (256, 15)):
        sizes = check_sizes(max_rows, max_proposals)
        for num_seqs in range(1, min(max_rows, 127) + 1):
            most = min(num_seqs * (1 + max_proposals), 128)
            assert any(most <= size.num_chunk_tokens and num_seqs <= size.num_checked for size in sizes)


@pytest.mark.parametrize(
    ("max_tokens", "buckets"),
    [
        (8, [8]),
        (64, [64]),
        (544, [64, 128, 256, 512, 544]),
        (2304, [64, 128, 256, 512, 768, 1024, 1536, 2048, 2304]),  # the budget of a step by default
        (8448, [64, 128, 256, 512, 768, 1024, 1536, 2048]),
    ],
)
def test_chunk_buckets(max_tokens: int, buckets: list[int]) -> None:
    assert chunk_buckets(max_tokens) == buckets


@pytest.mark.parametrize(("max_rows", "buckets"), [(1, [0, 1]), (16, [0, 16]), (256, [0, 16, 64, 256])])
def test_buckets_of_decodes_beside_chunks(max_rows: int, buckets: list[int]) -> None:
    assert mixed_row_buckets(max_rows) == buckets


@pytest.mark.parametrize(("shares", "kept"), [([1.0, 0.9, 0.7, 0.3], 2), ([0.9] * 4, 4), ([0.1] * 4, 0)])
def test_only_steps_that_wait_for_their_launches_get_a_graph(shares: list[float], kept: int) -> None:
    sizes = [64, 128, 256, 512]
    router = Router(4, 4, sizes)
    router.keep_launch_bound(dict(zip(sizes, shares, strict=True)).__getitem__)
    assert router.chunk_tokens == sizes[:kept]


def test_padding_of_a_mixed_step_is_a_chunk_without_keys() -> None:
    """Rows of a larger step do not leak into a smaller one, and rows of samples come in the order of the step."""
    size = StepSize(4, 16)
    buffers = MixedBuffers([StepSize(8, 32)], 5, device=torch.device("cpu"))
    buffers.fill(replace(make_mixed(7, [20, 9]), slot_mapping=np.full(36, 500)), StepSize(8, 32))
    buffers.fill(replace(make_mixed(2, [5, 1]), slot_mapping=np.arange(1, 9)), size)
    step = buffers.step(size)
    assert step.slot_mapping.tolist() == [1, 2, 0, 0, 3, 4, 5, 6, 7, 8, *[0] * 10]
    assert step.positions.tolist() == [0, 1, 0, 0, 2, 3, 4, 5, 6, 7, *[0] * 10]
    assert step.query_starts.tolist() == [0, 1, 2, 3, 4, 9, 10, 10, 10, 20]
    assert step.context_lens.tolist() == [1, 2, 0, 0, 3, 4, 0, 0, 0]
    assert step.logit_rows.tolist() == [0, 1, 8, 9, 0, 0, 0, 0]
    assert step.carried.tolist() == [-1] * 20
    assert step.block_tables[[0, 1, 4, 5], :3].tolist() == np.arange(12).reshape(4, 3).tolist()


def test_step_with_proposals_has_chunks_alone_and_samples_all_tokens() -> None:
    """Its decodes are chunks, too; what the last step left behind them is padding."""
    large, size = check_sizes(20, 5)[2], check_sizes(20, 5)[1]
    buffers = MixedBuffers([size, StepSize(8, 8), large], 5, device=torch.device("cpu"))
    buffers.fill(replace(make_checks(9, [6, 6]), slot_mapping=np.full(21, 500)), large)
    buffers.fill(replace(make_checks(2, [3, 2]), slot_mapping=np.arange(1, 8)), size)
    step = buffers.step(size)
    assert (step.num_decodes, step.max_query_len) == (0, 16)
    assert step.slot_mapping.tolist() == [*range(1, 8), *[0] * 9]
    assert step.query_starts.tolist() == [0, 1, 2, 5, 7, 7, 7, 7, 7, 16]
    assert step.context_lens.tolist() == [1, 2, 3, 4, *[0] * 5]
    assert step.logit_rows.tolist() == [*range(7), *[0] * 9]
    assert step.block_tables[:4, :3].tolist() == np.arange(12).reshape(4, 3).tolist()
