from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny import build_tiny_model, make_tiny_model
from tests.workers.execute.grammar.only import Only
from tests.workers.execute.sampling.rows import make_row
from triptych.protocol.config import CacheConfig, ModelConfig, SchedulerConfig
from triptych.protocol.errors import ConfigError
from triptych.protocol.model_card import ModelCard
from triptych.protocol.tokenizer_files import load_facts
from triptych.workers.execute.model.build import build_runner
from triptych.workers.execute.model.modules.runner import TorchRunner
from triptych.workers.execute.scheduling.sequence import Sequence
from triptych.workers.execute.step import StepInputs, StepResult


def make_runner(folder: Path, *, num_pages: int | None = 40, **model: Any) -> tuple[TorchRunner, ModelCard]:
    runner, card = build_runner(
        ModelConfig(model="tiny", device="cpu", backend="transformers", **model),
        CacheConfig(page_size=8, num_pages=num_pages),
        SchedulerConfig(max_num_seqs=4, prefill_chunk=16),
        model_dir=make_tiny_model("llama", folder / "checkpoint"),
        run_dir=folder,
    )
    assert isinstance(runner, TorchRunner)
    return runner, card


def prefill(runner: TorchRunner, prompt: list[int], *sampled: Sequence) -> StepResult:
    """One step: the whole prompt on pages 1, 2, ..., with its last token sampled if a sequence is given."""
    n = len(prompt)
    runner.launch(
        StepInputs(
            token_ids=np.array(prompt, np.int32),
            positions=np.arange(n, dtype=np.int32),
            slot_mapping=np.arange(8, 8 + n),
            query_starts=np.array([0, n], np.int32),
            context_lens=np.array([n], np.int32),
            block_tables=np.arange(1, 2 + n // 8, dtype=np.int32)[None],
            num_decodes=0,
            sample_rows=np.array([n - 1] * len(sampled), np.int32),
            sampled=sampled,
        )
    )
    return runner.collect()


def pages(runner: TorchRunner) -> torch.Tensor:
    """All keys and values except those of the trash page."""
    return torch.cat([t[1:].flatten() for cache in runner._forward.layers.caches.values() for t in cache.pools])


def test_card_describes_what_was_built(tmp_path: Path) -> None:
    _, card = make_runner(tmp_path)
    assert (card.model, card.model_type, card.dtype, card.device) == ("tiny", "llama", "float32", "cpu")
    assert (card.vocab_size, card.eos_token_ids, card.page_size, card.num_pages) == (272, (2,), 8, 40)
    assert card.max_model_len == 40 * 8  # the model supports 512, the pool does not


def test_tokenizer_is_in_the_run_directory(tmp_path: Path) -> None:
    make_runner(tmp_path)
    facts = load_facts(tmp_path)
    assert facts is not None
    assert facts.vocab_size == 259


@pytest.mark.parametrize(("asked", "used"), [(None, 1), (2, 2)])
def test_small_model_runs_on_one_thread_by_default(tmp_path: Path, asked: int | None, used: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        make_runner(tmp_path, threads=asked)
        assert torch.get_num_threads() == used
    finally:
        torch.set_num_threads(before)


def test_configured_length_is_kept(tmp_path: Path) -> None:
    assert make_runner(tmp_path, max_model_len=100)[1].max_model_len == 100


@pytest.mark.parametrize(("asked", "reason"), [(513, "limit of the model is 512"), (400, "cannot hold one sequence")])
def test_length_beyond_model_or_pool_is_refused(tmp_path: Path, asked: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_runner(tmp_path, max_model_len=asked)


def test_new_pool_is_unchanged_by_self_test_and_warm_up(tmp_path: Path) -> None:
    runner, _ = make_runner(tmp_path)
    assert 0 < runner.warm_up() < 60
    assert not pages(runner).any()


def test_warm_up_between_steps_changes_nothing(tmp_path: Path) -> None:
    runner, _ = make_runner(tmp_path)
    prefill(runner, [5, 6, 7])
    before = pages(runner).clone()
    runner.warm_up()
    assert torch.equal(pages(runner), before)


def test_logprobs_equal_the_plain_forward_pass(tmp_path: Path) -> None:
    runner, _ = make_runner(tmp_path)
    result = prefill(runner, [5, 6, 7, 8, 9], make_row([5, 6, 7, 8, 9], logprobs=3))
    model: Any = build_tiny_model("llama")
    expected = model(torch.tensor([[5, 6, 7, 8, 9]])).logits[0, -1].log_softmax(-1).topk(3)
    assert result.logprobs[0].token_ids.tolist() == expected.indices.tolist()
    np.testing.assert_allclose(result.logprobs[0].logprobs, expected.values.numpy(), atol=1e-5)


def test_grammar_allows_what_is_sampled(tmp_path: Path) -> None:
    runner, card = make_runner(tmp_path)
    row = make_row([5, 6])
    for allowed in (7, 8):
        row.grammar = Only(allowed, vocab_size=card.vocab_size)
        assert prefill(runner, [5, 6], row).token_ids.tolist() == [allowed]


def test_step_that_samples_nothing_still_writes(tmp_path: Path) -> None:
    runner, _ = make_runner(tmp_path)
    assert len(prefill(runner, [5, 6, 7]).token_ids) == 0
    assert pages(runner).any()


def test_nan_in_the_trash_page_changes_nothing(tmp_path: Path) -> None:
    runner, _ = make_runner(tmp_path)
    row = make_row(list(range(3, 30)), logprobs=5)
    before = prefill(runner, list(range(3, 30)), row)
    for cache in runner._forward.layers.caches.values():
        cache.keys[0], cache.values[0] = torch.nan, torch.nan
    after = prefill(runner, list(range(3, 30)), row)
    assert not after.failed
    np.testing.assert_array_equal(after.logprobs[0].logprobs, before.logprobs[0].logprobs)


def test_nan_logits_fail_their_row_with_a_reason(tmp_path: Path) -> None:
    runner, _ = make_runner(tmp_path)
    model: Any = runner._forward.model
    model.lm_head.weight[3] = torch.nan
    result = prefill(runner, [5, 6], make_row([5, 6]))
    assert "not finite" in result.failed[0]


def test_results_are_returned_in_the_order_of_launches(tmp_path: Path) -> None:
    runner, _ = make_runner(tmp_path)
    expected = [prefill(runner, [n], make_row([n])).token_ids[0] for n in (5, 6)]
    for n in (5, 6):
        runner.launch(step := _one_token(n))
        assert step.logit_rows.tolist() == [0]
    assert [runner.collect().token_ids[0], runner.collect().token_ids[0]] == expected


def _one_token(token_id: int) -> StepInputs:
    return StepInputs(
        token_ids=np.array([token_id], np.int32),
        positions=np.zeros(1, np.int32),
        slot_mapping=np.array([8]),
        query_starts=np.array([0, 1], np.int32),
        context_lens=np.array([1], np.int32),
        block_tables=np.array([[1]], np.int32),
        num_decodes=1,
        sample_rows=np.zeros(1, np.int32),
        sampled=[make_row([token_id])],
    )
