"""What execute does before it can serve, and which settings it derives from the model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cards import CARD
from triptych.protocol.config import CacheConfig, ModelConfig, PipelineConfig, SchedulerConfig, ServiceConfig
from triptych.protocol.errors import ConfigError
from triptych.protocol.model_card import ModelCard
from triptych.workers.execute import loading
from triptych.workers.execute.hash_lm import HashRunner
from triptych.workers.execute.kernels.compile import read_sources
from triptych.workers.execute.loading import (
    CPU_MIXED_PREFILL_TOKENS,
    CPU_REPORT_INTERVAL_MS,
    NUM_DRAFTED,
    REPORT_INTERVAL_MS,
    check_speculation,
    find_folders,
    preload,
    settle_interval_ms,
    settle_scheduling,
)
from triptych.workers.execute.model.guard.proof import digest_of_code
from triptych.workers.execute.scheduling.proposals import FindCosts, Proposer


def test_what_forks_workers_reads_what_they_need_after_an_upgrade() -> None:
    for read in (read_sources, digest_of_code):
        read.cache_clear()
    preload(PipelineConfig.from_options(model="demo"))
    assert [read.cache_info().currsize for read in (read_sources, digest_of_code)] == [1, 1]


@pytest.mark.parametrize(
    ("device", "options", "settled"),
    [
        ("cpu", {}, CPU_MIXED_PREFILL_TOKENS),
        ("cpu", {"mixed_prefill_tokens": 7}, 7),
        ("cpu", {"itl_target_ms": 50.0}, None),  # finds its own
        ("cpu", {"policy": "prefill_first"}, None),
        ("cuda:0", {}, None),
    ],
)
def test_on_a_cpu_prompts_get_little_of_a_step_with_decodes(
    device: str, options: dict[str, Any], settled: int | None
) -> None:
    config = settle_scheduling(PipelineConfig(scheduler=SchedulerConfig(**options)), replace(CARD, device=device))
    assert config.mixed_prefill_tokens == settled


@pytest.mark.parametrize(
    ("device", "options", "settled"),
    [
        ("cpu", {}, (32, 512)),
        ("cuda:0", {}, (256, 2048)),
        ("cuda:0", {"max_num_seqs": 4, "prefill_chunk": 64}, (4, 64)),
    ],
)
def test_gpu_serves_more_at_once(device: str, options: dict[str, Any], settled: tuple[int, int]) -> None:
    config = settle_scheduling(PipelineConfig(scheduler=SchedulerConfig(**options)), replace(CARD, device=device))
    assert (config.num_rows, config.chunk_tokens) == settled
    assert config.token_budget == sum(settled)


@pytest.mark.parametrize(
    ("device", "options", "settled"),
    [
        ("cpu", {}, (16, 0.5)),
        ("cuda", {}, (64, 0.9)),
        ("cpu", {"page_size": 8, "kv_memory_fraction": 0.7}, (8, 0.7)),
        ("cuda", {"page_size": 8, "kv_memory_fraction": 0.7}, (8, 0.7)),
    ],
)
def test_gpu_has_larger_pages_and_more_of_its_memory_for_them(
    device: str, options: dict[str, Any], settled: tuple[int, float]
) -> None:
    cache = CacheConfig(**options).for_device(device)
    assert (cache.page_tokens, cache.memory_fraction) == settled


@pytest.mark.parametrize(
    ("device", "asked", "settled"),
    [
        ("cpu", None, CPU_REPORT_INTERVAL_MS),
        ("cuda:0", None, REPORT_INTERVAL_MS),
        ("cpu", 0.0, 0.0),
        ("cuda", 5.0, 5.0),
    ],
)
def test_cpu_reports_short_steps_less_often(device: str, asked: float | None, settled: float) -> None:
    config = PipelineConfig(service=ServiceConfig(report_interval_ms=asked))
    assert settle_interval_ms(config, replace(CARD, device=device)) == settled


@pytest.mark.parametrize(
    ("draft_model", "asked", "settled"),
    [(None, None, 0), ("/small", None, NUM_DRAFTED), ("/small", 2, 2), (None, 8, 8)],
)
def test_draft_model_proposes_a_few_tokens(draft_model: str | None, asked: int | None, settled: int) -> None:
    scheduler = SchedulerConfig(num_speculative_tokens=asked)
    config = PipelineConfig(model=ModelConfig(draft_model=draft_model), scheduler=scheduler)
    assert settle_scheduling(config, CARD).num_speculative_tokens == settled


def test_missing_draft_model_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^the draft model: model directory /no/such/model does not exist$") as error:
        find_folders(ModelConfig(draft_model="/no/such/model"))
    assert error.value.param == "draft_model"


class Variant(HashRunner):
    is_batch_invariant = False


class Unable(HashRunner):
    check_costs = None


@pytest.mark.parametrize(
    ("kind", "recovery", "why"),
    [
        (Unable, "auto", "is 4, the limit for transformers on cuda:0 is 0"),
        (Variant, "exact", "is 4, the limit for transformers on cuda:0 with recovery 'exact' is 0"),
        (Variant, "auto", None),
        (Variant, "fast", None),
        (HashRunner, "exact", None),
    ],
    ids=["cannot check", "would break the promise", "default", "promises less", "same bits"],
)
def test_proposals_need_a_runner_that_checks_them_and_keep_the_promise_of_recovery(
    kind: type[HashRunner], recovery: str, why: str | None
) -> None:
    """A token that was proposed may be rounded differently when a replay decodes it."""
    runner, card = kind(97, num_pages=2, page_size=4), replace(CARD, device="cuda:0", backend="transformers")
    with nullcontext() if why is None else pytest.raises(ConfigError, match=why):
        check_speculation(SchedulerConfig(num_speculative_tokens=4, recovery=recovery), runner, card)
    check_speculation(SchedulerConfig(recovery=recovery), runner, card)


@pytest.mark.parametrize(("known", "captured"), [(None, "all"), (CARD, "largest")], ids=["start", "restart"])
def test_restart_captures_only_graphs_whose_memory_the_others_share(
    known: ModelCard | None, captured: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    runner = SimpleNamespace(
        warm_up=lambda: 0.5,
        capture_graphs=lambda _progress: done.append("all"),
        capture_largest=lambda: done.append("largest"),
        proposer=None,
    )
    context = make_context(tmp_path)
    monkeypatch.setattr("triptych.workers.execute.model.build.build_runner", lambda *_, **__: (runner, CARD))
    built, _, step_s = loading._build_torch_runner(context.config, context, known)
    assert built is runner
    assert (done, step_s) == ([captured], 0.5)


def test_draft_model_is_warmed_up_once_the_steps_are_as_fast_as_they_will_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a guess costs is compared with them. The runner must know in time how many there may be."""
    done: list[Any] = []
    proposer = SimpleNamespace(
        warm_up=lambda _progress, *, is_first: done.append(is_first),
        measure_costs=lambda decode_s: done.append(decode_s(1)),
        costs=(),
    )
    runner = SimpleNamespace(
        warm_up=lambda: done.append("warm"), capture_graphs=lambda _progress: done.append("captured"),
        decode_s=lambda num_rows: 0.25, proposer=proposer,
    )  # fmt: skip

    def build(_model: ModelConfig, _cache: CacheConfig, scheduler: SchedulerConfig, **_: Any) -> tuple[Any, ModelCard]:
        done.append(scheduler.num_speculative_tokens)
        return runner, CARD

    context = make_context(tmp_path, draft_model="/small")
    monkeypatch.setattr(loading, "find_folders", lambda *_: (tmp_path, tmp_path))
    monkeypatch.setattr("triptych.workers.execute.model.build.build_runner", build)
    loading._build_torch_runner(context.config, context, None)
    assert done == [NUM_DRAFTED, "warm", "captured", True, 0.25]


class Guesser(Proposer):
    """Guesses cost less each time that it is measured."""

    num_measured = 0

    def measure_costs(self, decode_s: Callable[[int], float]) -> None:
        Guesser.num_measured += 1
        self.costs = (FindCosts(1 / Guesser.num_measured), FindCosts(0.5, 0.25))


def test_costs_of_guesses_are_measured_once_for_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while requests wait for a restart, on a machine that is busier."""
    card = CARD

    def build(*_: Any, **__: Any) -> tuple[Any, ModelCard]:
        nothing = lambda *_: None  # noqa: E731
        runner = SimpleNamespace(
            warm_up=lambda: 0.5, capture_graphs=nothing, capture_largest=nothing, decode_s=float, proposer=Guesser()
        )
        return runner, card

    monkeypatch.setattr("triptych.workers.execute.model.build.build_runner", build)
    costs = []
    for checkpoint in ("one", "one", "one", "another", "another"):
        card = replace(CARD, checkpoint=checkpoint)
        runner, _, _ = loading.load_runner(make_context(tmp_path))
        assert runner.proposer is not None
        costs.append([(each.token, each.start) for each in runner.proposer.costs])
    first, second = ([(token, 0.0), (0.5, 0.25)] for token in (1.0, 0.5))
    assert costs == [first, first, first, second, second]


@pytest.mark.parametrize(
    ("before", "device", "expected_s"),
    [({}, "cpu", 2.0), ({"checkpoint": "another"}, "cpu", 0.5), ({"backend": "other kernels"}, "cpu", 0.5),
     ({"full_step_s": 0.0}, "cpu", 0.5), ({}, "cuda:0", 0.5)],
    ids=["same", "other weights", "other kernels", "unknown", "GPU"],
)  # fmt: skip
def test_restart_on_a_cpu_measures_no_step_anew(
    before: dict[str, Any], device: str, expected_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU has to load its kernels, whatever is known."""
    card = replace(CARD, device=device)
    replace(card, **({"full_step_s": 2.0} | before)).publish(tmp_path)
    runner = SimpleNamespace(warm_up=lambda: 0.5, capture_largest=lambda: 0, proposer=None)
    monkeypatch.setattr("triptych.workers.execute.model.build.build_runner", lambda *_, **__: (runner, card))
    _, now, step_s = loading.load_runner(make_context(tmp_path))
    assert (step_s, now.full_step_s) == (expected_s, expected_s)


@pytest.mark.parametrize(("configured", "used"), [("auto", "cuda:1"), ("cuda", "cuda")])
def test_restart_stays_on_the_device_and_keeps_the_pages(
    configured: str, used: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU may be lost, and the pages that it held may be more than the machine has memory for."""
    replace(CARD, device="cuda:1", num_pages=77, page_size=32).publish(tmp_path)
    found: list[tuple[str, int | None, int | None]] = []

    def build(model: ModelConfig, cache: CacheConfig, *_: Any, **__: Any) -> tuple[Any, ModelCard]:
        found.append((model.device, cache.num_pages, cache.page_size))
        return SimpleNamespace(warm_up=lambda: 0.5, capture_largest=lambda: 0, proposer=None), CARD

    monkeypatch.setattr("triptych.workers.execute.model.build.build_runner", build)
    loading.load_runner(make_context(tmp_path, device=configured))
    assert found == [(used, 77, 32)]


@pytest.mark.parametrize(
    ("before", "warns"), [("earlier", True), ("this one", False), ("", False)], ids=["changed", "same", "unknown"]
)
def test_changed_files_of_a_checkpoint_are_noticed_at_a_restart(
    before: str, warns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Answers go on with other weights: nothing else would tell."""
    replace(CARD, checkpoint=before).publish(tmp_path)
    runner = SimpleNamespace(warm_up=lambda: 0.5, capture_largest=lambda: 0, proposer=None)
    built = runner, replace(CARD, checkpoint="this one")
    monkeypatch.setattr("triptych.workers.execute.model.build.build_runner", lambda *_, **__: built)
    loading.load_runner(make_context(tmp_path))
    assert (f"the files of {CARD.model} have changed" in caplog.text) is warns
    known = ModelCard.read(tmp_path)
    assert known is not None
    assert known.checkpoint == "this one"


def make_context(folder: Path, **model: Any) -> Any:
    return SimpleNamespace(
        config=PipelineConfig(model=ModelConfig(**model)), board=SimpleNamespace(is_degraded=False), run_dir=folder,
        page=SimpleNamespace(progress=None), set_phase=lambda _phase: None,
    )  # fmt: skip
