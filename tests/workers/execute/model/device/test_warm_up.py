"""Before the first request a device runner makes its graphs and kernels, and measures the memory that steps need."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.workers.execute.model.device.next_token import NextToken, make_runner
from triptych.protocol.errors import ConfigError
from triptych.workers.execute.attention.device_step import DeviceStep
from triptych.workers.execute.model.device import overhead
from triptych.workers.execute.model.device.buckets import StepSize
from triptych.workers.execute.model.device.graphs import GraphCapture, GraphKey, Replay
from triptych.workers.execute.model.device.runner import DeviceRunner
from triptych.workers.execute.model.pool import PoolSize
from triptych.workers.execute.model.step_runner import trash_prefill
from triptych.workers.execute.sampling.kinds import SamplingKind
from triptych.workers.execute.sampling.logprobs import wanted_logprobs
from triptych.workers.execute.scheduling.sequence import Sequence

GIB = 1 << 30


class Cuda:
    """Device memory as torch's allocator sees it: memory in use, and memory that is reserved but unused."""

    def __init__(self) -> None:
        self.used = 16 * GIB  # the weights
        self.kept = 5 * GIB  # of a self-test
        self.outside = GIB
        self.peak = 99 * GIB

    def use(self, num_bytes: int) -> None:
        self.used += num_bytes
        self.peak = max(self.peak, self.used + self.kept)

    def give_back(self, num_bytes: int) -> None:
        self.used -= num_bytes
        self.kept += num_bytes

    def mem_get_info(self, _device: torch.device) -> tuple[int, int]:
        return 140 * GIB - self.memory_reserved(_device) - self.outside, 140 * GIB

    def memory_reserved(self, _device: torch.device) -> int:
        return self.used + self.kept

    def max_memory_reserved(self, _device: torch.device) -> int:
        return self.peak

    def reset_peak_memory_stats(self, _device: torch.device) -> None:
        self.peak = self.used + self.kept

    def synchronize(self, _device: torch.device) -> None: ...

    def empty_cache(self) -> None:
        self.kept = 0


class Probe:
    """Its graphs hold 2 GiB, and 1 GiB outside of torch; its largest step takes 3 GiB and frees them."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda

    def __call__(self, size: PoolSize) -> Probe:
        assert size.num_pages == 1
        return self

    def warm_up(self) -> float:
        self.cuda.use(3 * GIB)
        self.cuda.give_back(3 * GIB)
        return 0.0

    def capture_largest(self) -> int:
        self.cuda.empty_cache()
        self.cuda.use(2 * GIB)
        self.cuda.outside += GIB
        return 33


def test_memory_of_steps_is_measured_and_withheld_from_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of graphs and the largest steps together, 8 MiB for each further graph, and some slack."""
    cuda = Cuda()
    monkeypatch.setattr("torch.cuda", cuda)
    taken = overhead.step_overhead(Probe(cuda), torch.device("cuda"), 4096)  # type: ignore[arg-type]
    assert taken == (2 + 1 + 3) * GIB + 33 * (8 << 20) + (256 << 20)


def test_steps_that_need_more_memory_than_there_is_name_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defaults are for large GPUs."""

    def make(_: PoolSize) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 168 MiB.")

    monkeypatch.setattr("torch.cuda", Cuda())
    with pytest.raises(ConfigError, match=r"than cuda has beside the weights: lower max_num_seqs .*allocate 168 MiB"):
        overhead.step_overhead(make, torch.device("cuda"), 4096)


@pytest.mark.parametrize("is_adapted", [False, True])
def test_largest_graph_of_each_kind_is_measured(is_adapted: bool) -> None:
    """With adapters, also those of steps with an adapter."""
    captured: list[Replay] = []

    def capture(run: Replay) -> Replay:
        captured.append(run)
        return run

    runner = make_runner(NextToken(), capture=capture, is_adapted=is_adapted)
    assert runner.capture_largest() == 9 << is_adapted  # of 1 and 2 rows, and of a prompt alone
    assert len(captured) == 5 << is_adapted


@pytest.mark.parametrize("is_adapted", [False, True])
def test_all_graphs_of_proposals_are_there_even_after_a_restart(is_adapted: bool) -> None:
    """And the decode that they are compared with: there are few, and their costs decide on proposals."""
    runner = make_runner(NextToken(), capture=lambda run: run, is_adapted=is_adapted, max_proposals=5)
    num_more = runner.capture_largest()
    assert runner._graphs is not None
    sizes = [key.size for key in runner._graphs._replays if not key.is_adapted]
    assert {(size.num_chunk_tokens, size.num_checked) for size in sizes if size.num_checked} == {
        (6, 1), (16, 8), (32, 16),
    }  # fmt: skip
    assert StepSize(1) in sizes
    assert num_more == 8 << is_adapted
    count = runner._graphs.num_graphs
    runner.capture_graphs()
    assert runner._graphs.num_graphs == count + (2 << is_adapted)  # of two rows, and of a prompt alone


def test_steps_with_proposals_are_warmed_up() -> None:
    """As others, with short and with long tables, where their attention splits keys."""

    class Notes(NextToken):
        def __call__(self, step: DeviceStep, token_ids: torch.Tensor) -> torch.Tensor:
            if step.max_query_len == 6:
                noted.add((len(token_ids), len(step.context_lens), step.block_tables.shape[1]))
            return super().__call__(step, token_ids)

    noted: set[tuple[int, ...]] = set()
    make_runner(Notes(), max_proposals=5).warm_up()
    assert noted == {(6, 1, 6), (6, 1, 16), (24, 4, 6), (24, 4, 16)}


@pytest.mark.parametrize("is_adapted", [False, True])
def test_largest_and_smallest_steps_with_adapters_are_measured_if_there_are_adapters(is_adapted: bool) -> None:
    class Notes(NextToken):
        def __call__(self, step: DeviceStep, token_ids: torch.Tensor) -> torch.Tensor:
            if step.adapters is not None:
                noted.append(step.adapters.tolist())
            return super().__call__(step, token_ids)

    noted: list[list[int]] = []
    runner = make_runner(Notes(), capture=lambda run: run, is_adapted=is_adapted)
    runner.warm_up()
    assert noted == ([[1] * 8, [1] * 4, [1]] if is_adapted else [])
    runner.capture_graphs()
    assert runner._graphs is not None
    assert runner._graphs.num_graphs == 8 << is_adapted


def test_largest_graph_of_each_kind_is_captured_before_all_others() -> None:
    """Later graphs fit into their memory."""
    captured: list[GraphKey] = []

    runner = make_runner(NextToken(), capture=lambda run: run)
    assert runner._graphs is not None
    make_run = runner._graphs._make_run

    def note(key: GraphKey) -> Replay:
        captured.append(key)
        return make_run(key)

    runner._graphs._make_run = note
    runner.capture_graphs()
    assert {key.kind for key in captured[2:6]} == set(SamplingKind) - {SamplingKind.HOST}
    sizes = [(key.size.num_rows, key.size.num_chunk_tokens) for key in captured]
    assert sizes == [(4, 8), (0, 8), *[(4, 0)] * 4, (2, 0), (1, 0)]


def test_idle_runner_records_the_graphs_that_a_restart_left_out() -> None:
    """On the trash page: the pages of the last step may belong to someone else by then."""
    runner = make_runner(NextToken(), capture=lambda run: run)
    runner.capture_largest()
    assert runner._graphs is not None
    make_run, found = runner._graphs._make_run, []

    def note(key: GraphKey) -> Replay:
        run, step = make_run(key), runner._static_step(key)

        def run_on_the_trash_page() -> None:
            assert not step.slot_mapping.any()
            run()

        found.append((key.size.num_rows, key.size.num_chunk_tokens))
        return run_on_the_trash_page

    runner._graphs._make_run = note
    runner._buffers._inputs.fill_(7)
    runner._mixed_buffers._inputs.fill_(7)
    assert [runner.prepare(0.01) for _ in range(4)] == [True, True, False, False]
    assert found == [(0, 8), (2, 0), (1, 0)]


@pytest.mark.parametrize(
    ("num_tokens", "max_len", "lengths"), [(4096, 2048, [2048] * 2), (10, 4, [4] * 3), (5, 9, [5])]
)
def test_largest_prefill_fills_the_budget_with_sequences_of_allowed_length(
    num_tokens: int, max_len: int, lengths: list[int]
) -> None:
    inputs = trash_prefill(num_tokens, max_len=max_len)
    assert np.diff(inputs.query_starts).tolist() == lengths
    assert inputs.positions.max() < max_len


@pytest.mark.parametrize("capture", [None, lambda run: run], ids=["no graphs", "graphs"])
def test_decodes_without_a_graph_are_warmed_up(capture: GraphCapture | None) -> None:
    """Their short block tables need a kernel that no graph needs, one that does not split keys."""

    class Notes(NextToken):
        def __call__(self, step: DeviceStep, token_ids: torch.Tensor) -> torch.Tensor:
            noted.add((step.num_decodes, step.block_tables.shape[1]))
            return super().__call__(step, token_ids)

    noted: set[tuple[int, int]] = set()
    runner = make_runner(Notes(), capture)
    runner.capture_graphs()
    noted.clear()
    runner.warm_up()
    assert (4, 1) in noted


def test_smaller_prefills_and_long_tables_are_warmed_up() -> None:
    """Otherwise a kernel with their tile size, or one that splits keys, would be compiled while a request waits."""

    class Notes(NextToken):
        def __call__(self, step: DeviceStep, token_ids: torch.Tensor) -> torch.Tensor:
            noted.add((len(token_ids), step.block_tables.shape[1]))
            return super().__call__(step, token_ids)

    noted: set[tuple[int, int]] = set()
    make_runner(Notes(), prefill_tokens=544).warm_up()
    assert {(n, n) for n in (544, 136, 34, 8, 2)} <= noted
    assert {(2, 16), (1, 16), (4, 16)} <= noted


def test_rows_that_are_cut_and_want_logprobs_are_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else their memory would not be measured: for 256 rows of Gemma it is 0.3 GB more than that of others."""
    noted: set[tuple[SamplingKind, bool]] = set()
    choose = DeviceRunner._choose

    def note(runner: DeviceRunner, logits: torch.Tensor, sequences: list[Sequence], *rest: Any) -> None:
        noted.add((rest[-1], bool(wanted_logprobs(sequences))))
        choose(runner, logits, sequences, *rest)

    monkeypatch.setattr(DeviceRunner, "_choose", note)
    make_runner(NextToken(), capture=lambda run: run).warm_up()
    assert (SamplingKind.CUT, True) in noted


@pytest.mark.parametrize(("num_experts", "num_chosen"), [(128, 8), (8, 2), (64, 8)])
@pytest.mark.parametrize("budget", [544, 2304, 4096])
def test_every_tile_size_of_the_expert_product_is_warmed_up(num_experts: int, num_chosen: int, budget: int) -> None:
    experts = pytest.importorskip("triptych.workers.execute.kernels.triton_experts")

    def tile(num_tokens: int) -> Any:
        return experts.expert_tile(num_tokens * num_chosen, num_experts, torch.bfloat16, is_invariant=False)

    warm = [budget // 4**i for i in range(6) if budget // 4**i > 1]
    assert {tile(n) for n in range(2, budget + 1)} == {tile(n) for n in warm}


def test_nothing_is_measured_on_a_cpu() -> None:
    def refuse(_size: PoolSize) -> Any:
        raise AssertionError("a runner was made")

    assert overhead.step_overhead(refuse, torch.device("cpu"), 4096) == 0
