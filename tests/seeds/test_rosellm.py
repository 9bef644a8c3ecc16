"""What RoseLLM's OnlineScheduler promises (R-RL-1 to R-RL-16), and its defects (N-RL-1 to N-RL-10)."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import uuid
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import TopPLogitsWarper

from tests.pipeline.checks import expected
from tests.pipeline.raw import ACKNOWLEDGE, RawClient
from tests.seeds.support import Clock, end_all, outcome, sequence_of, settle, text_of, trace
from tests.seeds.tiny_engine import drawn_tokens
from tests.waiting import eventually
from tests.workers.execute.factories import (
    advance,
    chunks_of,
    expected_output,
    make_engine,
    make_scheduler,
    make_sequence,
    make_sequences,
    step_tokens,
)
from triptych import Client, Driver
from triptych.protocol.errors import ConfigError, EmptyPrompt, UnknownRequest

if TYPE_CHECKING:
    from tests.seeds.tiny_engine import TinyEngine


def shell(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line in its own process."""
    command = [sys.executable, "-c", "from triptych.launch.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, encoding="utf-8")


def test_r_rl_1_each_submit_returns_a_new_id(driver: Driver) -> None:
    """``submit`` takes the prompt and every parameter, and each call gets a unique id."""
    streams = [
        driver.submit([1, 2], max_tokens=6, temperature=1.0, top_k=0, top_p=1.0, ignore_eos=False, seed=3)
        for _ in range(20)
    ]
    assert len({stream.request_id for stream in streams}) == 20
    assert {tuple(stream.result(20).token_ids) for stream in streams} == {
        tuple(streams[0].result().token_ids),
    }


def test_r_rl_2_new_request_joins_the_decode_batch(slow: Driver) -> None:
    """It starts while the others continue, and no text changes."""
    first = slow.submit([1, 2], max_tokens=100)
    next(iter(first))
    second = slow.submit([3, 4], max_tokens=5)
    assert second.result(20).token_ids == expected([3, 4], 5)
    assert not first.done
    assert first.result(20).token_ids == expected([1, 2], 100)


def test_r_rl_3_first_token_does_not_wait_for_other_answers(slow: Driver) -> None:
    """``submit`` returns at once, and the first token comes while earlier requests still run."""
    long = slow.submit([1, 2], max_tokens=4000)
    next(iter(long))
    clock = Clock()
    late = slow.submit([5, 6], max_tokens=50)
    assert clock.s < 0.1
    assert next(iter(late)).token_ids[0] == expected([5, 6], 1)[0]
    assert not long.done
    end_all([long, late])


@pytest.mark.parametrize("how", ["end of sequence", "max_tokens"])
def test_r_rl_4_request_may_end_with_its_first_token(how: str) -> None:
    """By end of sequence or by max_tokens=1: one step, one token."""
    [first] = expected_output(make_sequence(max_tokens=1))
    sequence = make_sequence(max_tokens=1) if how == "max_tokens" else make_sequence(stop_ids=frozenset({first}))
    [step] = trace(make_engine(sequence))
    assert step.progress.by_key() == {sequence.key: first}
    assert sequence.finish_reason == ("length" if how == "max_tokens" else "stop")


def test_r_rl_5_ignore_eos_continues_past_the_end_of_sequence(demo: Driver) -> None:
    """The same answer continues, up to max_tokens, with the end of sequence among its ids."""
    question = [{"role": "user", "content": "What does zip do?"}]
    ended = demo.generate(messages=question, max_tokens=120)
    endless = demo.generate(messages=question, max_tokens=len(ended.token_ids) + 5, ignore_eos=True)
    assert ended.finish_reason == "stop"
    assert (endless.finish_reason, len(endless.token_ids)) == ("length", len(ended.token_ids) + 5)
    assert endless.token_ids[: len(ended.token_ids)] == ended.token_ids


def test_r_rl_6_any_id_can_be_queried_for_its_end(slow: Driver) -> None:
    """Even one that never existed, without an exception."""
    stream = slow.submit([1, 2], max_tokens=2000)
    next(iter(stream))
    assert not stream.done
    assert (slow.client.status(stream.request_id).state, slow.client.status("17").state) == ("running", "unknown")
    end_all([stream])
    assert stream.done


def test_r_rl_7_step_gives_one_token_per_sequence() -> None:
    """{key: token} for at most B sequences, {} if there is none."""
    engine = make_engine(*make_sequences(6, num_tokens=2, max_tokens=5), max_num_seqs=4)
    step_tokens(engine)
    assert set(step_tokens(engine)) <= {(index, 0) for index in range(6)}
    assert len(step_tokens(engine)) == 4
    assert step_tokens(make_engine()) == {}


def test_r_rl_8_more_sequences_than_rows_take_turns() -> None:
    """With A sequences and B rows, each is served at least once in ceil(A / B) steps."""
    scheduler = make_scheduler(*make_sequences(6, num_tokens=2, max_tokens=40), max_num_seqs=4, policy="round_robin")
    plans = [advance(scheduler) for _ in range(20)]
    for first, second in pairwise(plans[2:]):
        assert set(chunks_of(first)) | set(chunks_of(second)) == set(range(6))


def test_r_rl_9_sampling_is_greedy_unless_a_temperature_is_given(tiny: TinyEngine, driver: Driver) -> None:
    """The default is deterministic and is transformers' greedy answer."""
    prompt = [51, 52, 53]
    assert tiny.run(sequence_of(prompt, max_tokens=10)) == [tiny.greedy(prompt, 10)]
    assert len({tuple(driver.generate(prompt, max_tokens=10).token_ids) for _ in range(3)}) == 1
    assert len({tuple(driver.generate(prompt, max_tokens=10, temperature=1.0).token_ids) for _ in range(3)}) == 3


def test_r_rl_10_finished_sequence_frees_its_pages() -> None:
    """After the step that finished it, its pages are available; after the release, they are free."""
    sequence = make_sequence(num_tokens=9, max_tokens=2)
    engine = make_engine(sequence, num_pages=8)
    trace(engine)
    assert engine.scheduler.cache.num_available == 8
    engine.release(sequence.key)
    assert engine.stats.num_free_pages == 8


def test_r_rl_11_answer_is_kept_until_it_is_acknowledged(driver: Driver) -> None:
    """Any client may read it by its id, more than once; the acknowledgement removes it."""
    with RawClient(driver.run_dir) as client:
        request_id = client.submit(prompt_token_ids=[1, 2], max_tokens=30)
        eventually(lambda: driver.client.status(request_id).state == "finished")
        assert driver.client.status(request_id).state == "finished"
        with Client(driver.run_dir) as other:
            assert other.resume(request_id).result(20).token_ids == expected([1, 2], 30)
        client.send("follow", ACKNOWLEDGE, [request_id])
    settle(driver)
    with pytest.raises(UnknownRequest):
        driver.client.resume(request_id).result(20)


def test_r_rl_12_long_prompt_may_be_truncated_on_the_left_and_an_empty_one_is_refused(driver: Driver) -> None:
    """Its last tokens stay; if there is no token at all and none to begin with, the error says so."""
    prompt = [1 + i % 200 for i in range(4200)]
    answer = driver.generate(prompt, truncation="left", max_tokens=4)
    assert answer.token_ids == expected(prompt[-answer.usage["prompt_tokens"] :], 4)
    nothing: list[str | list[int]] = ["", []]
    for empty in nothing:
        with pytest.raises(EmptyPrompt, match="has no tokens"):
            driver.generate(empty)


def test_r_rl_13_every_option_is_a_flag_of_the_command_line(driver: Driver) -> None:
    """Prompts, lengths, sampling, device, dtype and stream; ``--stream`` prints the answer's text."""
    flags = ["--temperature=0", "--top-k=0", "--top-p=1", "--max-tokens=8", "--raw", "--ignore-eos"]
    model = ["--model=hash-lm", "--device=cpu", "--dtype=auto"]
    done = shell("generate", *model, *flags, "--format", "jsonl", "hello", "you")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    prompts = [[1 + byte for byte in text] for text in (b"hello", b"you")]
    assert [row["token_ids"] for row in rows] == [expected(prompt, 8) for prompt in prompts]
    streamed = shell("generate", "--connect", str(driver.run_dir), *flags, "--stream", "hello")
    assert streamed.stdout.removesuffix("\n") == text_of(expected(prompts[0], 8))


def test_r_rl_14_command_prints_an_answer_per_prompt_and_reports_failed_ones(driver: Driver) -> None:
    """In order; a failed one does not stop the others, and shows in the exit code."""
    connect = ("--connect", str(driver.run_dir))
    done = shell("generate", *connect, "--raw", "--max-tokens", "4", "hello", "x" * 5000)
    assert done.returncode == 1
    assert done.stdout.splitlines()[0] == text_of(expected([1 + byte for byte in b"hello"], 4))
    assert "prompt has 5000 tokens, the limit is 4095" in done.stderr


def test_r_rl_15_models_run_in_inference_mode_and_report_their_dtype(tiny: TinyEngine) -> None:
    """No gradient is kept, the model is in evaluation mode, and the model card has dtype and device."""
    model = tiny.runner._forward.model
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    tiny.run(sequence_of([5, 6], max_tokens=2))
    assert all(pages.grad_fn is None for pages in tiny.pages)
    assert (tiny.card.dtype, tiny.card.device) == ("float32", "cpu")


def test_r_rl_16_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path: Path) -> None:
    """Before the start completes, with both numbers."""
    from tests.tiny import make_tiny_model
    from triptych.protocol.config import CacheConfig, ModelConfig, SchedulerConfig
    from triptych.workers.execute.model.build import build_runner

    folder = make_tiny_model("llama", tmp_path, vocab_size=200)
    with pytest.raises(ConfigError, match="the tokenizer has 259 ids and the model 200"):
        build_runner(
            ModelConfig(model=str(folder), device="cpu"), CacheConfig(num_pages=16), SchedulerConfig(),
            model_dir=folder, run_dir=tmp_path,
        )  # fmt: skip


# Defects


def test_n_rl_1_positions_are_those_of_each_sequence_alone(tiny: TinyEngine) -> None:
    """Short and long prompts decode together, and each gets the tokens of transformers."""
    prompts = [[70, 71], [80 + i % 60 for i in range(25)], [90, 91, 92, 93, 94]]
    outputs = tiny.run(*(sequence_of(p, i, max_tokens=12) for i, p in enumerate(prompts)))
    assert outputs == [tiny.greedy(p, 12) for p in prompts]


def test_n_rl_2_requests_that_end_with_their_first_token_leak_no_page(small: Driver) -> None:
    """More of them than there are pages, one after the other."""
    for index in range(1, 31):
        assert small.generate([9] * index, max_tokens=1, timeout=20).token_ids == expected([9] * index, 1)
    settle(small)


def test_n_rl_3_questions_about_unknown_requests_are_answered(driver: Driver) -> None:
    """Status, abort and resume of an id that never existed are each answered, and harmless."""
    driver.abort("never")
    assert driver.client.status("never").state == "unknown"
    assert isinstance(outcome(driver.client.resume("never")), UnknownRequest)


def test_n_rl_4_many_short_prompts_share_the_pool(small: Driver) -> None:
    """Forty prompts of three tokens on a pool of twelve pages are all answered."""
    prompts = [[3, 3, index] for index in range(1, 41)]
    assert [a.token_ids for a in small.generate_all(prompts, max_tokens=5)] == [expected(p, 5) for p in prompts]


def test_n_rl_5_max_tokens_zero_ends_at_once(driver: Driver) -> None:
    """An answer without tokens, and no step for it."""
    steps = settle(driver)["execute"]["steps"]
    answer = driver.generate([1, 2], max_tokens=0)
    assert (answer.token_ids, answer.text, answer.finish_reason) == ([], "", "length")
    assert settle(driver)["execute"]["steps"] == steps


def test_n_rl_6_text_is_the_answer_without_the_prompt(driver: Driver) -> None:
    """The prompt is not repeated in it."""
    prompt = "a sentence that must not come back"
    answer = driver.generate(prompt, max_tokens=30)
    assert answer.text == text_of(expected([1 + byte for byte in prompt.encode()], 30))


@pytest.mark.parametrize("top_p", [0.4, 0.6, 0.79, 0.81])
def test_n_rl_7_top_p_keeps_as_many_tokens_as_transformers(top_p: float) -> None:
    """Two if the first alone does not reach the threshold."""
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    kept = TopPLogitsWarper(top_p)(torch.empty(0), logits[None]).isfinite().sum()
    drawn = drawn_tokens(logits, [i / 1000 for i in range(1000)], top_k=3, top_p=top_p)
    assert set(drawn) == set(range(int(kept)))


@pytest.mark.parametrize("top_k", [1000, 150_000])
def test_n_rl_8_masked_token_is_never_sampled(top_k: int) -> None:
    """Not with the smallest and not with the greatest random number, in a vocabulary of 150,000."""
    logits = torch.full((150_000,), -torch.inf)
    logits[[17, 90_000]] = 1.0
    uniforms = [0.0, 1e-12, 0.4999, 0.5001, 1 - 2**-53]
    assert drawn_tokens(logits, uniforms, top_k=top_k, temperature=2.0) == [17, 17, 17, 90_000, 90_000]


def test_n_rl_9_submit_does_not_wait_for_the_prefill(slow: Driver) -> None:
    """A prompt of 4000 tokens, eight chunks of 5 ms, is submitted in less time than they take."""
    took = []
    for _ in range(3):  # for a busy machine
        clock = Clock()
        stream = slow.submit([1] * 4000, max_tokens=1, cache_salt=uuid.uuid4().hex)
        took.append(clock.s)
        assert stream.result(20).ledger["stages_ms"]["prefill"] > 30
    assert min(took) < 0.03


def test_n_rl_10_requests_can_be_aborted_and_leave_nothing_in_the_client(slow: Driver) -> None:
    """From another thread, while others are submitted; afterwards the client holds none of them."""
    streams = [slow.submit([1, index], max_tokens=4000) for index in range(1, 21)]
    thread = threading.Thread(target=end_all, args=[streams])
    thread.start()
    assert slow.generate([7, 7], max_tokens=3, timeout=30).token_ids == expected([7, 7], 3)
    thread.join(60)
    assert all(stream.done for stream in streams)
    assert not slow.client.session._exchange.requests
