"""The device runner on a CPU device: steps in flight, device errors, and graphs that are late or missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import make_tiny_model
from tests.workers.execute.factories import make_beams, make_scheduler, make_sequence, make_sequences, run
from tests.workers.execute.model.device.next_token import NextToken, make_runner
from tests.workers.execute.model.native.decoders import make_request
from triptych.protocol.config import CacheConfig, ModelConfig, SchedulerConfig
from triptych.workers.execute.attention.device_step import DeviceStep
from triptych.workers.execute.engine import Engine
from triptych.workers.execute.model.build import build_runner
from triptych.workers.execute.model.device.graphs import CaptureFailed, Replay
from triptych.workers.execute.scheduling.sequence import Key, Sequence


class Fails(NextToken):
    """Raises an error in every step that contains a given token."""

    def __init__(self, error: Exception, token_id: int) -> None:
        super().__init__()
        self.error = error
        self.token_id = token_id

    def __call__(self, step: DeviceStep, token_ids: torch.Tensor) -> torch.Tensor:
        if self.token_id in token_ids.tolist():
            raise self.error
        return super().__call__(step, token_ids)


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
def test_out_of_memory_fails_only_the_request_that_caused_it(depth: int, error: Exception) -> None:
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
def test_persistent_device_error_blames_no_request_and_ends_the_process(error: Exception) -> None:
    engine = make_engine(Fails(error, int(make_sequence().tokens[2])), make_sequence())
    with pytest.raises(type(error)):
        engine.step()


def test_runner_started_without_graphs_captures_them_while_serving() -> None:
    """As after a crash. Steps whose graph does not exist yet run without one."""
    runner = make_runner(NextToken(), capture=lambda run: run)
    sequence = make_sequence(max_tokens=40)
    outputs = run(Engine(make_scheduler(sequence), runner, depth=1))
    assert outputs[sequence.key] == expected(sequence)
    assert 0 < runner.num_graph_steps < runner.num_steps - 10


def test_model_that_cannot_be_captured_is_served_without_graphs(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(run: Replay) -> Replay:
        raise CaptureFailed("operation not permitted when stream is capturing")

    runner = make_runner(NextToken(), capture=refuse)
    runner.capture_graphs()
    assert "operation not permitted" in caplog.text
    sequence = make_sequence(max_tokens=40)
    assert run(Engine(make_scheduler(sequence), runner, depth=1))[sequence.key] == expected(sequence)
    assert runner.num_graph_steps == 0


def partly(sequence: Sequence, max_tokens: int) -> list[int]:
    """What ``NextToken`` says, but every third token is wrong."""
    last, count = int(sequence.tokens[sequence.num_tokens - 1]), sequence.num_tokens
    return [(last + i + ((count + i) % 3 == 0)) % 97 for i in range(1, max_tokens + 1)]


@pytest.mark.parametrize("capture", [None, lambda run: run], ids=["no graphs", "graphs"])
def test_steps_with_proposals_are_graphs_and_change_no_answer(capture: Any) -> None:
    """Of one stream, of several, and beside sequences that are not guessed."""
    runner = make_runner(NextToken(), capture, max_proposals=5, prefill_tokens=12)
    runner.capture_graphs()
    for count in (1, 3, 4):
        sequences = make_sequences(count, max_tokens=30)
        sequences[-1].chance *= count < 4
        scheduler = make_scheduler(
            *sequences, propose=partly, num_speculative_tokens=5, page_size=16, check_costs=runner.check_costs
        )
        num_steps, num_graph_steps = runner.num_steps, runner.num_graph_steps
        engine = Engine(scheduler, runner, depth=1)
        assert run(engine) == {s.key: expected(s) for s in sequences}
        assert scheduler.proposals.num_accepted > 10
        taken = runner.num_steps - num_steps
        assert taken < 30 or count == 4
        assert runner.num_graph_steps - num_graph_steps == (taken if capture else 0)


def test_row_with_nan_logits_fails_alone() -> None:
    class Nan(NextToken):
        def __call__(self, step: DeviceStep, token_ids: torch.Tensor) -> torch.Tensor:
            logits = super().__call__(step, token_ids)
            logits[token_ids[step.logit_rows.long()] == bad] = torch.nan
            return logits

    sequences = make_sequences(3, max_tokens=6)
    bad = int(sequences[1].tokens[4])
    outputs = run(make_engine(Nan(), *sequences))
    assert sequences[1].finish_reason == "error"
    assert outputs[sequences[0].key] == expected(sequences[0])


def test_overlapped_steps_of_a_real_model_give_the_tokens_of_serial_steps(tmp_path: Path) -> None:
    """Greedy, sampled and penalised requests on transformers' modules, at both depths."""
    kinds: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.8}, {"logprobs": 1}]
    runner, card = build_runner(
        ModelConfig(model="tiny", device="cpu", backend="transformers"),
        CacheConfig(page_size=8, num_pages=64),
        SchedulerConfig(max_num_seqs=4, prefill_chunk=16),
        model_dir=make_tiny_model("llama", tmp_path / "checkpoint"),
        run_dir=tmp_path,
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


@pytest.mark.parametrize("depth", [0, 1])
def test_scored_prompt_gets_the_same_answer(depth: int) -> None:
    """Nearly all probability is on one token; the others share the rest."""
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
def test_beam_search_finishes(depth: int) -> None:
    """Its best hypothesis equals the greedy answer. A greedy request runs alongside."""
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
