"""Every Triton kernel compiles for a GPU on a machine without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton.backends.nvidia")
import triton

from tests.workers.execute.kernels.compile_for_gpu import RECORD, origin

SCRIPT, ROOT = Path(__file__).with_name("compile_for_gpu.py"), Path(__file__).parents[4]
Kernels = dict[str, list[dict[str, Any]]]
# From Triton 3.8 on, kernels of prompts spill more registers; tests say how many bytes of them they accept.
SPILLS_MORE = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8)

# With another Triton than that of the record, one test compiles all kernels first.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """The kernels compiled by each part of the script, now or when they were last changed."""
    recorded, *lines = RECORD.read_text().splitlines()
    if json.loads(recorded) != origin():
        lines = compile_now(tmp_path_factory)
    parts: Kernels = {}
    for line in lines:
        kernel = json.loads(line)
        parts.setdefault(kernel["part"], []).append(kernel)
    return parts


def compile_now(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("kernels")), "PYTHONPATH": str(ROOT)}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, str(SCRIPT)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[1:]


def test_record_is_of_the_sources_as_they_are() -> None:
    """Or each run of the tests would compile the kernels."""
    recorded = json.loads(RECORD.read_text().splitlines()[0])
    command = f"python -m tests.workers.execute.kernels.{SCRIPT.stem} > {RECORD.relative_to(ROOT)}"
    assert recorded["sources"] == origin()["sources"], f"once the other tests here pass: {command}"


def test_every_kernel_compiles_and_fits_into_a_multiprocessor(kernels: Kernels) -> None:
    """A kernel whose registers spill into memory would be slow without a warning."""
    names = {
        "_write",
        "_rotate_write",
        "_add_norm",
        "_norm_queries_keys",
        "_gate_mul",
        "_choose",
        "_sort",
        "_sum_pairs",
        "_quantize_rows",
        "_measure",
        "_narrow",
        "_list",
        "_finish",
        "_matmul",
        "_one_row",
        "_add_chosen",
        "_decode",
        "_combine",
        "_chunk",
        "_chunk_hopper",
        "_sum_splits",
    }
    every = kernels["every"]
    assert {kernel["kernel"] for kernel in every} == names
    plain, _, _, summed, *_, checked = (kernel for kernel in every if kernel["kernel"] == "_chunk")
    few = 8 if SPILLS_MORE else 0
    assert [kernel for kernel in every if kernel["stack_bytes"] > few and kernel is not summed] == []
    assert summed["stack_bytes"] < 256  # used between two splits, not in loops over keys
    # If keys were prefetched by what the same iteration looks up, lookups would be prefetched too.
    assert {kernel["lookups"] for kernel in every if kernel["kernel"] in ("_decode", "_chunk")} == {0}
    # The same instructions for split keys, or a row's bits would depend on the rest.
    products = [f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16" for n in (128, 64)]
    assert checked["products"] == summed["products"] == plain["products"] == products


def test_products_of_prompts_on_hopper_are_not_waited_for_one_by_one(kernels: Kernels) -> None:
    """The assembler would do that without an error, and the kernel would be slower than the one for any GPU."""
    found = [kernel for kernel in kernels["every"] if kernel["kernel"] == "_chunk_hopper"]
    assert [(kernel["num_products"], kernel["waits"]) for kernel in found] == [(80, 14), (40, 7), (56, 14)]


def test_few_and_many_rows_of_the_invariant_product_use_the_same_instruction(kernels: Kernels) -> None:
    """Another one might sum in another order, so a row's bits would depend on the number of rows."""
    few, many, few_wide, many_wide, _ = (kernel["products"] for kernel in kernels["products"])
    assert [kernel for kernel in kernels["products"] if kernel["stack_bytes"]] == []
    assert few == many == ["wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"]
    assert few_wide == many_wide == ["wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"]


def test_products_of_experts_fit_into_a_multiprocessor(kernels: Kernels) -> None:
    """Few rows use the small instruction; if bits must not depend on the number of rows, all use the same."""
    products = [kernel for kernel in kernels["experts"] if kernel["kernel"] == "_expert_product"]
    assert [kernel for kernel in products if kernel["stack_bytes"]] == []
    few, some, many, exact_few = (products[2 * i]["products"] for i in range(4))
    assert few == ["mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"]
    assert some == ["wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"]
    assert many == exact_few == ["wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"]


def test_kernels_fit_into_the_shared_memory_of_workstations(kernels: Kernels) -> None:
    """Or Gemma, and with ``--deterministic`` every model, would be refused there."""
    assert [kernel["kernel"] for kernel in kernels["workstation"]] == ["_chunk", "_matmul"]
    assert max(kernel["shared_bytes"] for kernel in kernels["workstation"]) <= 99 << 10


def test_attention_fits_into_the_shared_memory_of_turing(kernels: Kernels) -> None:
    """Or every model with heads of 128 would be refused on a T4."""
    found = [kernel for kernel in kernels["turing"] if kernel["kernel"] != "_combine"]
    assert [kernel["kernel"] for kernel in found] == ["_decode", "_chunk"] * 2
    assert max(kernel["shared_bytes"] for kernel in found) <= 64 << 10
    assert max(kernel["stack_bytes"] for kernel in found) == 0


def test_kernels_for_eight_bits_fit_into_a_multiprocessor(kernels: Kernels) -> None:
    """And chunks have the same products with split keys, as in half precision."""
    found = kernels["eight bits"]
    names = {"_write_eight_bits", "_rotate_write", "_decode", "_combine", "_chunk", "_sum_splits"}
    assert {kernel["kernel"] for kernel in found} == names
    plain, _, _, summed, *_ = (kernel for kernel in found if kernel["kernel"] == "_chunk")
    few = 208 if SPILLS_MORE else 16
    assert [kernel for kernel in found if kernel["stack_bytes"] > few and kernel is not summed] == []
    assert summed["stack_bytes"] < 256
    products = next(kernel["products"] for kernel in kernels["every"] if kernel["kernel"] == "_chunk")
    assert summed["products"] == plain["products"] == products


@pytest.mark.parametrize(("part", "limit"), [("ampere", 163 << 10), ("a workstation", 99 << 10), ("turing", 64 << 10)])
def test_attention_to_eight_bits_fits_into_other_gpus(part: str, limit: int, kernels: Kernels) -> None:
    found = [kernel for kernel in kernels[f"eight bits on {part}"] if kernel["kernel"] != "_combine"]
    assert [kernel["kernel"] for kernel in found] == ["_decode", "_chunk"] * 2
    assert max(kernel["shared_bytes"] for kernel in found) <= limit
    few = 104 if SPILLS_MORE else 64  # as in half precision on Ampere
    assert max(kernel["stack_bytes"] for kernel in found) <= few


@pytest.mark.parametrize(
    ("part", "limit"),
    [("", 227 << 10), (" on ampere", 163 << 10), (" on a workstation", 99 << 10), (" on turing", 64 << 10)],
)
def test_products_of_adapters_fit_into_every_gpu(part: str, limit: int, kernels: Kernels) -> None:
    found = kernels[f"adapters{part}"]
    assert {kernel["kernel"] for kernel in found} == {"_group", "_shrink", "_add_splits", "_expand_add"}
    assert max(kernel["shared_bytes"] for kernel in found) <= limit
    # Without matrix instructions, the tile of many rows takes some more registers than there are.
    assert max(kernel["stack_bytes"] for kernel in found) <= (160 if "turing" in part else 0)


def test_few_and_many_rows_with_adapters_use_the_same_instruction(kernels: Kernels) -> None:
    """As do the products that they are added to, or a row's bits would depend on the number of rows."""
    products = [kernel["products"] for kernel in kernels["adapters"] if kernel["kernel"] in ("_shrink", "_expand_add")]
    in_bfloat16 = [["mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"]]
    assert products == 6 * in_bfloat16 + 4 * [[]]


def test_steps_of_all_sizes_share_their_kernels(kernels: Kernels) -> None:
    """A kernel compiled for a new size or address would stop the service for seconds.

    Decodes have one kernel for split keys, for any number of splits, and one for keys that are not split.
    """
    counts = Counter(kernel["kernel"] for kernel in kernels["steps"])
    attention = {"_write": 1, "_decode": 2, "_combine": 1, "_chunk": 1, "_chunk_hopper": 1, "_sum_splits": 1}
    assert counts == {**attention, "_matmul": 1, "_group": 1, "_shrink": 1, "_expand_add": 1}
