"""The client on top of the session: encoding of requests, and many requests at once."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.driver.fake_service import FakeService, packed
from tests.waiting import eventually
from triptych import Client, Driver, PipelineConfig
from triptych.driver import whereabouts
from triptych.driver.stream import Completion
from triptych.driver.submitting import request_map
from triptych.protocol import connection
from triptych.protocol import messages as m
from triptych.protocol.errors import (
    ConfigError,
    DuplicateId,
    InvalidRequest,
    PipelineClosed,
    RequestTimeout,
    UnknownRequest,
)
from triptych.protocol.keys import OWN_KEYS_FILE, KeyFolder, make_own_keys, own_keys
from triptych.protocol.run_dir import CONFIG_FILE
from triptych.protocol.sampling import SamplingParams
from triptych.workers.execute.hash_build import VOCAB_SIZE
from triptych.workers.execute.hash_lm import expected_tokens

BAD_IDS = [2**31, -(2**31) - 1, 1.5, "5", None, True]


def tokens_after(prompt: list[int], num_tokens: int) -> list[int]:
    return expected_tokens(prompt, num_tokens, VOCAB_SIZE)


# -- encoding of requests


@pytest.mark.parametrize("prompt", ["hello", b"hello", ["hello", "you"]], ids=repr)
def test_text_is_sent_unchanged(prompt: Any) -> None:
    """Bytes too, which are refused: they were taken for the ids of other tokens. So are several texts."""
    assert request_map(prompt, None, None, {}) == {"prompt": prompt}


@pytest.mark.parametrize("ids", [[], [5, 6, 7], [-1, 2**31 - 1, -(2**31)], (5, 6), range(3)], ids=repr)
def test_token_ids_are_sent_as_int32(ids: Any) -> None:
    assert request_map(ids, None, None, {}) == {"prompt_token_ids": packed(*ids)}


@pytest.mark.parametrize("wrong", BAD_IDS, ids=repr)
def test_invalid_token_ids_are_sent_unchanged(wrong: Any) -> None:
    """So that the service's refusal names the wrong one."""
    assert request_map([5, wrong], None, None, {}) == {"prompt_token_ids": [5, wrong]}


@pytest.mark.parametrize("prompt", [np.array([5, 6]), np.array([[5], [6]]), np.array(5), np.array([0.5])], ids=repr)
def test_arrays_are_token_ids_or_sent_for_the_service_to_refuse(prompt: Any) -> None:
    plain = prompt.tolist()
    assert request_map(prompt, None, None, {}) == {"prompt_token_ids": packed(*plain) if plain == [5, 6] else plain}


def test_chat_is_sent_as_plain_maps() -> None:
    message = {"role": "user", "content": "hi"}
    assert request_map(None, [message], None, {}) == {"messages": [message]}


def test_params_of_another_type_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"params must be SamplingParams, got \{'top_k': 5\}"):
        request_map("hello", None, {"top_k": 5}, {})  # type: ignore[arg-type]


@pytest.mark.parametrize("prompts", ["hello", b"hello", {"prompt": "hello"}], ids=repr)
def test_one_prompt_is_not_taken_for_several(prompts: Any, driver: Driver) -> None:
    """Each character, or each key, was a prompt."""
    with pytest.raises(InvalidRequest, match="prompts must be several, got one"):
        driver.generate_all(prompts)
    with pytest.raises(InvalidRequest, match="prompts must be several, got one"):
        driver.embed_all(prompts)


def test_options_override_params() -> None:
    params = SamplingParams(temperature=0.5, max_tokens=7)
    options = {"max_tokens": 9, "truncation": "left"}
    expected = {"temperature": 0.5, "max_tokens": 9, "truncation": "left", "prompt": "x"}
    assert request_map("x", None, params, options) == expected


@pytest.mark.parametrize("given", [{}, {"submit": "ipc:///a"}, {"follow": "ipc:///a"}])
def test_client_needs_both_endpoints(given: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="a run directory, or a submit and a follow endpoint"):
        Client(**given)


# -- one request


def test_run_directory_may_be_in_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Driver accepts this form too. A client of a folder called ~ would wait for ever."""
    with tempfile.TemporaryDirectory() as home:
        monkeypatch.setenv("HOME", home)
        service = FakeService(Path(home))
        with Client("~") as client:
            client.submit([5], request_id="mine")
            assert service.recv(m.Submit).request_id == "mine"
        service.close()


def test_client_finds_the_endpoints_of_a_pipeline_of_another_version(tmp_path: Path) -> None:
    """All versions speak one protocol, but their other settings differ."""
    with tempfile.TemporaryDirectory() as elsewhere:
        service = FakeService(Path(elsewhere))
        endpoints = {name: f"ipc://{elsewhere}/{name}" for name in ("submit", "follow")}
        settings = {"service": {**endpoints, "max_queue": "many", "novelty": 1}, "part": {}}
        (tmp_path / CONFIG_FILE).write_text(json.dumps(settings))
        with Client(tmp_path) as client:
            client.submit([5], request_id="mine")
            assert service.recv(m.Submit).request_id == "mine"
        service.close()


def test_client_that_was_there_before_the_driver_finds_its_endpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LOOK_AGAIN_S", 0.01)
    with Client(tmp_path / "run") as client, tempfile.TemporaryDirectory() as elsewhere:
        client.submit([5], request_id="mine")
        service = FakeService(Path(elsewhere))
        endpoints = {name: f"ipc://{elsewhere}/{name}" for name in ("submit", "follow")}
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / CONFIG_FILE).write_text(PipelineConfig.from_options(**endpoints).to_json())
        assert service.recv(m.Submit).request_id == "mine"
        service.close()


def test_client_that_looks_for_its_driver_never_goes_on_without_keys_over_the_network(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path / "keys")
    folder.create()
    make_own_keys(tmp_path, folder)
    with Client(tmp_path, submit="tcp://127.0.0.1:9", follow="tcp://127.0.0.1:9") as client:
        look_up = client.session._connection._look_up
        assert look_up is not None
        assert look_up().keys == own_keys(tmp_path)
        (tmp_path / OWN_KEYS_FILE).unlink()
        with pytest.raises(ConfigError, match="a client needs keys for a tcp:// endpoint"):
            look_up()


def test_closed_client_refuses_requests(driver: Driver) -> None:
    client = Client(driver.run_dir)
    client.close()
    with pytest.raises(PipelineClosed):
        client.generate([5])


@pytest.mark.parametrize("n", [1, 2])
def test_resubmitting_a_request_returns_the_kept_answer(driver: Driver, n: int) -> None:
    """As a task queue does that does not know that the first attempt succeeded."""
    again: dict[str, Any] = {"request_id": f"task-{n}", "seed": 1, "temperature": 1.0, "n": n, "max_tokens": 9}
    first = driver.generate([5, 6], keep=True, **again)
    with Client(driver.run_dir) as other:
        second = other.generate([5, 6], keep=True, **again)
        assert [c.token_ids for c in second.choices] == [c.token_ids for c in first.choices]
        for choice in second.choices:
            other.forget(choice.request_id)
        with pytest.raises((DuplicateId, UnknownRequest)):
            other.generate([5, 6], **again)


@pytest.mark.parametrize("n", [1, 2])
def test_aborting_a_refused_stream_does_not_abort_the_live_request_with_its_id(driver: Driver, n: int) -> None:
    with Client(driver.run_dir) as client:
        first = client.submit([5], max_tokens=200, request_id=f"in-use-{n}", n=n)
        first.accepted(10)
        second = client.submit([6], max_tokens=200, request_id=f"in-use-{n}", n=n)
        second.abort()
        with pytest.raises(DuplicateId):
            second.result(10)
        assert first.result(10).finish_reason == "length"


def test_request_of_a_wait_that_timed_out_is_aborted(driver: Driver) -> None:
    with pytest.raises(RequestTimeout):
        driver.generate([5], max_tokens=4000, timeout=0.01, request_id="timed-out")
    eventually(lambda: ("timed-out", "abort") in [(r.request_id, r.state) for r in driver.client.requests().ended])


def test_kept_request_of_a_wait_that_timed_out_goes_on(driver: Driver) -> None:
    with pytest.raises(RequestTimeout):
        driver.generate([5], max_tokens=400, timeout=0.01, keep=True, request_id="goes-on")
    with Client(driver.run_dir) as client:
        assert client.resume("goes-on").result(20).token_ids == tokens_after([5], 400)


def test_kept_requests_go_on_though_another_of_the_list_is_refused(driver: Driver) -> None:
    kept = {"prompt": [5], "max_tokens": 400, "keep": True, "request_id": "kept-of-a-list"}
    with pytest.raises(InvalidRequest):
        driver.generate_all([{"prompt": [5], "top_p": 2.0}, kept])
    eventually(lambda: driver.client.status("kept-of-a-list").state != "unknown")
    with Client(driver.run_dir) as client:
        assert client.resume("kept-of-a-list").result(20).token_ids == tokens_after([5], 400)


def test_unanswered_question_times_out() -> None:
    with tempfile.TemporaryDirectory() as folder, Client(folder) as client, pytest.raises(RequestTimeout) as caught:
        client.info(timeout=0.05)
    assert caught.value.message == "GetInfo: no answer within 0.05 s"


def test_wait_for_a_pipeline_that_never_was_there_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """As with a wrong path: the request waits until there is one."""
    monkeypatch.setattr(connection, "LOOK_AGAIN_S", 0.01)
    monkeypatch.setattr(whereabouts, "WARN_S", 0.05)
    with Client(tmp_path) as client:
        assert not caplog.records
        client.submit("hello")
        eventually(lambda: caplog.messages)
        with pytest.raises(RequestTimeout):
            client.generate("hello", timeout=0.3)
    assert caplog.messages == [f"no pipeline has started in {tmp_path} so far: requests wait for one"]


def test_abort_does_not_damage_the_next_request_in_the_record(driver: Driver) -> None:
    """Its bytes may be reused only after the step in flight has written its last token into them."""
    for turn in range(1, 30):
        stream = driver.submit([turn], max_tokens=4000)
        next(iter(stream))
        stream.abort()
        stream.result(20)
        prompt = [turn] * 300  # to overwrite the tokens of the earlier request
        assert driver.generate(prompt, max_tokens=3, timeout=20).token_ids == tokens_after(prompt, 3)


# -- many requests


def test_answers_are_in_the_order_of_the_prompts(driver: Driver) -> None:
    prompts = [[i, i + 1] for i in range(1, 30)]
    lengths = [1 + 7 * i % 11 for i in range(len(prompts))]
    asked = [{"prompt": prompt, "max_tokens": n} for prompt, n in zip(prompts, lengths, strict=True)]
    answers = driver.generate_all(asked)
    assert [a.token_ids for a in answers] == [tokens_after(*pair) for pair in zip(prompts, lengths, strict=True)]


def test_requests_are_retried_while_the_queue_is_full(driver: Driver) -> None:
    before = driver.stats()["prepare"]["rejected"].get("overloaded", 0)
    answers = driver.generate_all([[i] for i in range(1, 41)], max_tokens=10)
    assert [answer.token_ids for answer in answers] == [tokens_after([i], 10) for i in range(1, 41)]
    eventually(lambda: driver.stats()["prepare"]["rejected"]["overloaded"] > before)


def test_options_apply_to_all_prompts_and_a_prompt_may_override_them(driver: Driver) -> None:
    answers = driver.generate_all(["a", {"prompt": "b", "max_tokens": 2}, [5]], max_tokens=4)
    assert [len(answer.token_ids) for answer in answers] == [4, 2, 4]


def test_progress_is_reported_in_order(driver: Driver) -> None:
    seen: list[Completion] = []
    assert driver.generate_all([[5], [6], [7]], progress=seen.append, max_tokens=3) == seen


def test_no_prompts_give_no_answers(driver: Driver) -> None:
    assert driver.generate_all([]) == []


def test_one_failure_aborts_the_other_requests(driver: Driver) -> None:
    before = driver.stats()["summarize"]["finished"]["abort"]
    with pytest.raises(InvalidRequest, match="top_p"):
        driver.generate_all([{"prompt": [5], "top_p": 2.0}, [6], [7]], max_tokens=4000)
    eventually(lambda: driver.stats()["summarize"]["finished"]["abort"] == before + 2)


def test_interrupt_aborts_all_requests(driver: Driver) -> None:
    before = driver.stats()["summarize"]["finished"]["abort"]
    with Client(driver.run_dir) as client:

        def interrupt() -> None:
            eventually(lambda: len(client.requests().lines) == 3)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            client.generate_all([[5], [6], [7]], max_tokens=4000)
        interrupting.join()
        eventually(lambda: driver.stats()["summarize"]["finished"]["abort"] == before + 3)


def test_error_that_comes_with_the_end_of_the_client_is_not_replaced_by_another() -> None:
    """As of a signal handler that stops everything and raises SystemExit."""
    with tempfile.TemporaryDirectory() as folder, Client(folder) as client:

        def prompts() -> Iterator[list[int]]:
            yield [5]
            client.close()
            sys.exit("stopped")

        with pytest.raises(SystemExit, match="stopped"):
            client.generate_all(prompts())


def test_retries_of_a_full_service_are_paced() -> None:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as pool:
        service = FakeService(Path(folder))
        client = Client(folder)
        answer = pool.submit(client.generate_all, [[5]])
        started, num_asked = time.monotonic(), 0
        while time.monotonic() < started + 0.5:
            service.send("submit", m.Rejected(service.recv(m.Submit).request_id, "overloaded", "full", None))
            num_asked += 1
        client.close()
        service.close()
        with pytest.raises(PipelineClosed):
            answer.result(10)
    assert 2 <= num_asked <= 11
