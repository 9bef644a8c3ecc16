"""The runner of a device, with a device that is a CPU: steps in flight, errors of the device, memory it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny import make_tiny_model
from tests.workers.execute.factories import make_beams, make_scheduler, make_sequence, make_sequences, run
from tests.workers.execute.model.native import make_request
from tests.workers.execute.model.next_token import NextToken
from triptych.protocol.config import CacheConfig, ModelConfig, SchedulerConfig
from triptych.workers.execute.attention.device_step import DeviceStep
from triptych.workers.execute.engine import Engine
from triptych.workers.execute.model import overhead
from triptych.workers.execute.model.build import build_runner
from triptych.workers.execute.model.device_runner import DeviceRunner
from triptych.workers.execute.model.graphs import CaptureFailed, GraphCapture, GraphKey, Replay
from triptych.workers.execute.model.pool import PoolSize
from triptych.workers.execute.model.step_runner import trash_prefill
from triptych.workers.execute.sampling.kinds import SamplingKind
from triptych.workers.execute.sampling.sampler import Sampler
from triptych.workers.execute.scheduling.sequence import Key, Sequence

GIB = 1 << 30


class Fails(NextToken):
    """Raises where a given token is in the step."""

    def __init__(self, error: Exception, token_id: int) -> None:
        super().__init__()
        self.error = error
        self.token_id = token_id

    def __call__(self, step: DeviceStep, token_ids: torch.Tensor) -> torch.Tensor:
        if self.token_id in token_ids.tolist():
            raise self.error
        return super().__call__(step, token_ids)


def make_runner(forward: NextToken, capture: GraphCapture | None = None, **options: Any) -> DeviceRunner:
    return DeviceRunner(
        [], forward, Sampler(()), device=torch.device("cpu"), max_sampled=8, max_pages=16, capture=capture,
        **{"prefill_tokens": 8, "decode_rows": 4, **options},
    )  # fmt: skip


def make_engine(forward: NextToken, *sequences: Sequence, depth: int = 1, **options: Any) -> Engine:
    return Engine(make_scheduler(*sequences, **options), make_runner(forward), depth=depth)


def expected(sequence: Sequence) -> list[int]:
    last = int(sequence.tokens[sequence.num_prompt_tokens - 1])
    return [(last + 1 + i) % 97 for i in range(sequence.max_tokens)]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=["torch", "Triton", "cuBLAS"],
)
@pytest.mark.parametrize("depth", [0, 1])
def test_want_of_memory_fails_what_asked_for_it_and_no_one_else(depth: int, error: Exception) -> None:
    sequences = make_sequences(3, max_tokens=6)
    bad_token = int(sequences[1].tokens[1])
    engine = make_engine(Fails(error, bad_token), *sequences, depth=depth)
    outputs = run(engine)
    assert sequences[1].finish_reason == "error"
    assert [outputs[s.key] for s in (sequences[0], sequences[2])] == [expected(sequences[0]), expected(sequences[2])]


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("an illegal memory access was encountered"),
        RuntimeError("CUDA error: unspecified"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    ],
    ids=["AcceleratorError", "RuntimeError", "Triton"],
)
def test_an_error_that_stays_is_no_requests_fault_and_ends_the_process(error: Exception) -> None:
    engine = make_engine(Fails(error, int(make_sequence().tokens[2])), make_sequence())
    with pytest.raises(type(error)):
        engine.step()


def test_a_runner_that_starts_without_graphs_gets_them_while_it_serves() -> None:
    """As after a crash; the steps before a graph is there are computed all the same."""
    runner = make_runner(NextToken(), capture=lambda run: run)
    sequence = make_sequence(max_tokens=40)
    outputs = run(Engine(make_scheduler(sequence), runner, depth=1))
    assert outputs[sequence.key] == expected(sequence)
    assert 0 < runner.num_graph_steps < runner.num_steps - 10


def test_a_model_that_cannot_be_captured_serves_without_graphs(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(run: Replay) -> Replay:
        raise CaptureFailed("operation not permitted when stream is capturing")

    runner = make_runner(NextToken(), capture=refuse)
    runner.capture_graphs(lambda done, total: None)
    assert "operation not permitted" in caplog.text
    sequence = make_sequence(max_tokens=40)
    assert run(Engine(make_scheduler(sequence), runner, depth=1))[sequence.key] == expected(sequence)
    assert runner.num_graph_steps == 0


def test_a_row_that_is_not_a_number_fails_alone() -> None:
    class Nan(NextToken):
        def __call__(self, step: DeviceStep, token_ids: torch.Tensor) -> torch.Tensor:
            logits = super().__call__(step, token_ids)
            logits[token_ids[step.sample_rows.long()] == bad] = torch.nan
            return logits

    sequences = make_sequences(3, max_tokens=6)
    bad = int(sequences[1].tokens[4])
    outputs = run(make_engine(Nan(), *sequences))
    assert sequences[1].finish_reason == "error"
    assert outputs[sequences[0].key] == expected(sequences[0])


def test_overlapped_steps_of_a_real_model_say_what_serial_ones_say(tmp_path: Path) -> None:
    """Greedy, drawn and penalised requests through transformers' modules at both depths."""
    kinds: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.8}, {"logprobs": 1}]
    runner, card = build_runner(
        ModelConfig(model="tiny", device="cpu", backend="transformers"),
        CacheConfig(page_size=8, num_pages=64),
        SchedulerConfig(max_num_seqs=4, prefill_chunk=16),
        model_dir=make_tiny_model("llama", tmp_path / "checkpoint"),
        run_dir=tmp_path,
        progress=lambda done, total: None,
    )
    extras: list[dict[str, Any]] = [{}, {"repetition_penalty": 1.3}]
    for extra in extras:
        texts = []
        for depth in (0, 1):
            requests = [make_request(i, 5 + 9 * i, 12, **kind, **extra) for i, kind in enumerate(kinds)]
            scheduler = make_scheduler(*requests, num_pages=64, page_size=8, max_model_len=card.max_model_len)
            outputs = run(Engine(scheduler, runner, depth=depth))
            texts.append([outputs[r.key] for r in requests])
        assert texts[0] == texts[1]


class Cuda:
    """The memory of a device as torch's allocator holds it: what is used, and what it keeps though nobody uses it."""

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
    """Its graphs hold 2 GiB, and a recording of them 1 outside of torch; its largest step takes 3, which it frees."""

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


def test_what_steps_take_is_measured_and_not_given_to_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """What graphs and the largest steps take together, eight MiB for each graph still to come, and some slack."""
    cuda = Cuda()
    monkeypatch.setattr("torch.cuda", cuda)
    taken = overhead.step_overhead(Probe(cuda), torch.device("cuda"), 4096)  # type: ignore[arg-type]
    assert taken == (2 + 1 + 3) * GIB + 33 * (8 << 20) + (256 << 20)


@pytest.mark.parametrize("is_adapted", [False, True])
def test_the_largest_graph_of_every_kind_is_measured(is_adapted: bool) -> None:
    """With adapters also of steps that have one."""
    captured: list[Replay] = []

    def capture(run: Replay) -> Replay:
        captured.append(run)
        return run

    runner = make_runner(NextToken(), capture=capture, is_adapted=is_adapted)
    assert runner.capture_largest() == 6 << is_adapted  # of 1 and 2 rows
    assert len(captured) == 3 << is_adapted


@pytest.mark.parametrize("is_adapted", [False, True])
def test_the_largest_steps_with_adapters_are_measured_where_there_are_any(is_adapted: bool) -> None:
    class Notes(NextToken):
        def __call__(self, step: DeviceStep, token_ids: torch.Tensor) -> torch.Tensor:
            if step.adapters is not None:
                noted.append(step.adapters.tolist())
            return super().__call__(step, token_ids)

    noted: list[list[int]] = []
    runner = make_runner(Notes(), capture=lambda run: run, is_adapted=is_adapted)
    runner.warm_up()
    assert noted == ([[1] * 8, [1] * 4] if is_adapted else [])
    runner.capture_graphs(lambda done, total: None)
    assert runner._graphs is not None
    assert runner._graphs.num_graphs == 5 << is_adapted


def test_before_any_other_graph_come_the_largest_of_every_kind() -> None:
    """Whatever is captured later fits into their memory."""
    captured: list[GraphKey] = []

    runner = make_runner(NextToken(), capture=lambda run: run)
    assert runner._graphs is not None
    make_run = runner._graphs._make_run

    def note(key: GraphKey) -> Replay:
        captured.append(key)
        return make_run(key)

    runner._graphs._make_run = note
    runner.capture_graphs(lambda done, total: None)
    assert {key.kind for key in captured[:3]} == {SamplingKind.GREEDY, SamplingKind.DRAWN, SamplingKind.CUT}
    assert [key.num_rows for key in captured] == [4, 4, 4, 2, 1]


@pytest.mark.parametrize(
    ("num_tokens", "max_len", "lengths"), [(4096, 2048, [2048] * 2), (10, 4, [4] * 3), (5, 9, [5])]
)
def test_the_largest_prefill_fills_the_budget_with_sequences_that_may_be(
    num_tokens: int, max_len: int, lengths: list[int]
) -> None:
    inputs = trash_prefill(num_tokens, max_len=max_len)
    assert np.diff(inputs.query_starts).tolist() == lengths
    assert inputs.positions.max() < max_len


@pytest.mark.parametrize("capture", [None, lambda run: run], ids=["no graphs", "graphs"])
def test_decodes_outside_of_graphs_are_warmed_up_too(capture: GraphCapture | None) -> None:
    """Their short block tables ask for a kernel that no graph needs: keys that are not split."""

    class Notes(NextToken):
        def __call__(self, step: DeviceStep, token_ids: torch.Tensor) -> torch.Tensor:
            noted.add((step.num_decodes, step.block_tables.shape[1]))
            return super().__call__(step, token_ids)

    noted: set[tuple[int, int]] = set()
    runner = make_runner(Notes(), capture)
    runner.capture_graphs(lambda done, total: None)
    noted.clear()
    runner.warm_up()
    assert (4, 1) in noted


def test_smaller_prefills_are_warmed_up_too() -> None:
    """A tile that only they take would be compiled while somebody waits."""

    class Notes(NextToken):
        def __call__(self, step: DeviceStep, token_ids: torch.Tensor) -> torch.Tensor:
            noted.add(len(token_ids))
            return super().__call__(step, token_ids)

    noted: set[int] = set()
    make_runner(Notes(), prefill_tokens=544).warm_up()
    assert {544, 136, 34, 8, 2} <= noted


@pytest.mark.parametrize(("num_experts", "num_chosen"), [(128, 8), (8, 2), (64, 8)])
@pytest.mark.parametrize("budget", [544, 2304, 4096])
def test_every_tile_of_an_experts_product_is_warmed_up(num_experts: int, num_chosen: int, budget: int) -> None:
    experts = pytest.importorskip("triptych.workers.execute.kernels.triton_experts")

    def tile(num_tokens: int) -> Any:
        return experts.expert_tile(num_tokens * num_chosen, num_experts, torch.bfloat16, is_invariant=False)

    warm = [budget // 4**i for i in range(6) if budget // 4**i > 1]
    assert {tile(n) for n in range(2, budget + 1)} == {tile(n) for n in warm}


def test_on_a_cpu_nothing_is_measured() -> None:
    def refuse(_size: PoolSize) -> Any:
        raise AssertionError("a runner was made")

    assert overhead.step_overhead(refuse, torch.device("cpu"), 4096) == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_a_prompt_is_scored_and_its_answer_is_the_same(depth: int) -> None:
    """All of a row's weight is on one token, and the others share what is left."""
    sequence = make_sequence(num_tokens=20, max_tokens=6, prompt_logprobs=1)
    mates = make_sequences(3, max_tokens=6)[1:]
    engine = make_engine(NextToken(), sequence, *mates, depth=depth)
    tokens: list[int] = []
    found: list[Any] = []
    while engine.has_work:
        outputs = engine.step()
        assert outputs is not None
        found += [outputs.scores[sequence.key]] if sequence.key in outputs.scores else []
        tokens += [token for key, token in outputs.progress.by_key().items() if key == sequence.key]
    assert tokens == expected(sequence)
    prompt = sequence.tokens[: sequence.num_prompt_tokens]
    assert [scores.start for scores in found] == [0, 8, 16]
    best = torch.cat([torch.from_numpy(scores.columns.token_ids[:, 0]) for scores in found])
    assert best.tolist() == ((prompt[:-1] + 1) % 97).tolist()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_beam_search_comes_to_its_end(depth: int) -> None:
    """The likeliest of its hypotheses is what a request without beams says; beside it is one."""
    beams, greedy = make_beams(0, 3, max_tokens=4), make_sequence(5, max_tokens=4)
    engine = make_engine(NextToken(), *beams, greedy, depth=depth)
    found: dict[Key, list[int]] = {}
    for _ in range(8):
        outputs = engine.step()
        for key, hypothesis in {} if outputs is None else outputs.progress.hypotheses.items():
            found[key] = hypothesis.tokens
    assert not engine.has_work
    assert list(found) == [beam.key for beam in beams]
    assert found[beams[0].key] == expected(beams[0])
    assert greedy.output_tokens.tolist() == expected(greedy)
