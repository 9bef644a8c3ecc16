"""A decoder whose packed weights were found in memory is the one that was packed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from transformers import AutoConfig

from tests import tiny
from tests.workers.execute.kernels.levels import FASTEST, load_cached
from tests.workers.execute.model.native.decoders import (
    FEW_PAGES,
    NUM_STATE_ROWS,
    PAGE_SIZE,
    PLAIN_FORMATS,
    in_mxfp4,
    make_checkpoint,
    pack,
    run_chunks,
)
from tests.workers.execute.model.native.families import FAMILIES
from triptych.protocol.arrays import Float32, Int32
from triptych.workers.execute.kernels import memory
from triptych.workers.execute.kernels.matrix import Packer
from triptych.workers.execute.kernels.structures import Format
from triptych.workers.execute.model.native import sizes
from triptych.workers.execute.model.native.decoder import NativeDecoder
from triptych.workers.execute.model.native.weights import PackedWeights
from triptych.workers.execute.model.spec.ropes import find_ropes
from triptych.workers.execute.weights_file import WeightsFile

CASES = [
    *((family, PLAIN_FORMATS[number % len(PLAIN_FORMATS)]) for number, family in enumerate(FAMILIES)),
    *(("llama", format_) for format_ in PLAIN_FORMATS[1:]),
    ("gpt_oss", Format.MXFP4),
]
IDS: Int32 = np.random.default_rng(0).integers(3, tiny.VOCAB_SIZE, 24).astype(np.int32)


@pytest.fixture(autouse=True)
def fixture_small_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even these have a copy for greedy steps."""
    monkeypatch.setattr(sizes, "SCREENED_WEIGHTS", 0)


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    make_huge = memory._make_huge
    monkeypatch.setattr(memory, "_make_huge", lambda *address: make_huge(*address) or True)  # also where there are none
    file = os.memfd_create("weights")
    yield Path(f"/proc/self/fd/{file}")
    os.close(file)


def packed_in(path: Path, checkpoint: Path, format_: Format) -> tuple[PackedWeights, bool]:
    """Also whether they were there before."""
    file = WeightsFile.open(path)
    assert file is not None
    file.claim("the model")
    was_there = file.find(FASTEST)
    weights = pack(checkpoint, FASTEST, format_, make_arena=file.arena)
    file.complete()
    file.close()
    return weights, was_there


def logits(checkpoint: Path, weights: PackedWeights) -> Float32:
    ropes: Any = [rope.tables(512) for rope in find_ropes(AutoConfig.from_pretrained(checkpoint))]
    sizes: Any = {"num_pages": FEW_PAGES, "page_size": PAGE_SIZE, "num_state_rows": NUM_STATE_ROWS, "num_threads": 1}
    return run_chunks(NativeDecoder(load_cached(FASTEST), weights, ropes, **sizes), IDS, [len(IDS) - 1, 1])


@pytest.mark.parametrize(("family", "format_"), CASES, ids=[f"{family}-{form.name.lower()}" for family, form in CASES])
def test_next_process_packs_nothing_and_computes_the_same(
    family: str, format_: Format, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_checkpoint(family, tmp_path / "checkpoint")
    if format_ is Format.MXFP4:
        in_mxfp4(checkpoint, tmp_path / "twin")
    packed, was_there = packed_in(path, checkpoint, format_)
    assert not was_there
    expected = logits(checkpoint, packed)
    assert np.ptp(expected) > 0

    def fail(*_: object) -> NoReturn:
        raise AssertionError("a matrix is packed again")

    with monkeypatch.context() as patch:
        patch.setattr(Packer, "_in_pieces", fail)
        found, was_there = packed_in(path, checkpoint, format_)
    assert was_there
    assert found._num_done == packed._num_done
    np.testing.assert_array_equal(logits(checkpoint, found), expected)
