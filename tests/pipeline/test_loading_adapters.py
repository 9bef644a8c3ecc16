"""Adapters are loaded and unloaded while a pipeline runs: no answer changes, and restarted workers know them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.adapters import make_adapter, make_nominal_adapter
from tests.pipeline.checks import assert_quiet, expected
from tests.pipeline.conftest import hash_driver
from tests.pipeline.killing import kill
from tests.tiny import make_tiny_model, prove
from tests.waiting import eventually
from triptych import Driver
from triptych.driver import replacing
from triptych.driver.adapters import LoadedAdapters
from triptych.protocol.errors import ConfigError, InvalidRequest
from triptych.protocol.run_dir import ADAPT_FILE

PROMPT = list(range(40, 140))


def generated_by(driver: Driver, name: str) -> list[int]:
    return driver.generate([1, 2], max_tokens=4, lora=name).token_ids


@pytest.fixture(name="folder", scope="module")
def fixture_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_nominal_adapter(tmp_path_factory.mktemp("adapters") / "a")


@pytest.fixture(name="driver", scope="module")
def fixture_driver(folder: Path) -> Iterator[Driver]:
    with hash_driver(lora_modules=[f"fixed={folder}"], hash_step_ms=1.0) as driver:
        yield driver
        assert_quiet(driver)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_adapter_is_loaded_used_and_unloaded_while_streams_continue(
    driver: Driver, folder: Path, is_replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the execute that runs, or by a new one where that cannot take it up."""
    if is_replaced:
        monkeypatch.setattr(replacing, "_adapts", lambda *_, **__: False)
    streams, pid = [driver.submit(PROMPT, max_tokens=300, lora=name) for name in ("", "fixed")], driver.pids["execute"]
    for stream in streams:
        next(iter(stream))
    assert driver.load_adapter("new", folder) > 0
    assert (driver.pids["execute"] != pid) == is_replaced
    adapted = driver.submit(PROMPT, max_tokens=200, lora="new")
    kill(driver, "execute")
    assert adapted.result(30).token_ids == expected(PROMPT, 200, adapter=2)
    waiting = driver.submit(PROMPT, max_tokens=50, lora="new")
    waiting.accepted(20)
    assert driver.unload_adapter("new") > 0
    assert waiting.result(30).token_ids == expected(PROMPT, 50, adapter=2), "accepted requests were answered"
    with pytest.raises(InvalidRequest, match="lora is 'new', known are: fixed"):
        generated_by(driver, "new")
    for number, stream in enumerate(streams):
        assert stream.result(30).token_ids == expected(PROMPT, 300, adapter=number)
    assert list(driver.info()["model"]["adapters"]) == ["fixed"]


def test_adapters_keep_their_numbers_while_others_come_and_go(driver: Driver, folder: Path) -> None:
    pid = driver.pids["execute"]
    for name in ("first", "second"):
        driver.load_adapter(name, folder)
    stream = driver.submit(PROMPT, max_tokens=300, lora="second")
    next(iter(stream))
    driver.unload_adapter("first")
    driver.load_adapter("third", folder)
    for name, number in (("second", 3), ("third", 2)):
        assert generated_by(driver, name) == expected([1, 2], 4, adapter=number)
    assert stream.result(30).token_ids == expected(PROMPT, 300, adapter=3)
    for name in ("second", "third"):
        driver.unload_adapter(name)
    assert driver.pids["execute"] == pid


def test_execute_that_dies_while_it_takes_up_an_adapter_has_it_afterwards(driver: Driver, folder: Path) -> None:
    stream, pid = driver.submit(PROMPT, max_tokens=300, lora="fixed"), driver.pids["execute"]
    assert pid is not None
    next(iter(stream))
    os.kill(pid, signal.SIGSTOP)
    loading = threading.Thread(target=driver.load_adapter, args=["new", folder])
    loading.start()
    eventually((driver.run_dir / ADAPT_FILE).exists)
    os.kill(pid, signal.SIGKILL)
    loading.join(30)
    assert not (driver.run_dir / ADAPT_FILE).exists()
    assert generated_by(driver, "new") == expected([1, 2], 4, adapter=2)
    assert stream.result(30).token_ids == expected(PROMPT, 300, adapter=1)
    driver.unload_adapter("new")


def test_name_of_other_weights_is_taken_up_by_a_new_process(driver: Driver, tmp_path: Path) -> None:
    """The old one may have keys and values of the former adapter in its cache."""
    own = make_nominal_adapter(tmp_path / "own")
    driver.load_adapter("own", own)
    driver.unload_adapter("own")
    pid = driver.pids["execute"]
    driver.load_adapter("own", own)
    driver.unload_adapter("own")
    assert driver.pids["execute"] == pid
    make_nominal_adapter(own, b"other weights")
    driver.load_adapter("own", own)
    assert driver.pids["execute"] != pid
    driver.unload_adapter("own")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda driver, folder: driver.load_adapter("fixed", folder), "'fixed' is already loaded"),
        (lambda driver, folder: driver.load_adapter("a b", folder), "the form is NAME=PATH"),
        (lambda driver, folder: driver.load_adapter("b", folder / "nowhere"), "'b' cannot be read: .*nowhere"),
        (lambda driver, folder: driver.unload_adapter("fixed"), "'fixed' comes from the settings"),
        (lambda driver, folder: driver.unload_adapter("b"), "'b' is not loaded, known are: fixed"),
    ],
)
def test_impossible_load_is_an_error_and_restarts_nothing(
    driver: Driver, folder: Path, change: Callable[[Driver, Path], float], why: str
) -> None:
    pids = driver.pids
    with pytest.raises(ConfigError, match=why):
        change(driver, folder)
    assert driver.pids == pids
    assert generated_by(driver, "fixed") == expected([1, 2], 4, adapter=1)


def test_adapter_that_cannot_be_unloaded_stays(driver: Driver, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.load_adapter("new", folder)
    stream = driver.submit(PROMPT, max_tokens=4000, lora="new")
    stream.accepted(20)
    with pytest.raises(ConfigError, match="1 requests for the adapter 'new' are not answered yet"):
        driver.unload_adapter("new", timeout=0)
    stream.abort()
    stream.result(20)

    def fail(*_: object, **__: object) -> None:
        raise ConfigError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(replacing, "_adapts", lambda *_, **__: False)
        patch.setattr(replacing, "replace_worker", fail)
        with pytest.raises(ConfigError, match="no room"):
            driver.unload_adapter("new")
    assert generated_by(driver, "new") == expected([1, 2], 4, adapter=2)
    driver.unload_adapter("new")


def test_failed_replacement_of_execute_still_ends_the_old_process(
    driver: Driver, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old process would fail requests for the adapter that it does not have."""

    def fail(*_: object, **__: object) -> None:
        raise ConfigError("no room")

    pid = driver.pids["execute"]
    with monkeypatch.context() as patch:
        patch.setattr(replacing, "_adapts", lambda *_, **__: False)
        patch.setattr(replacing, "replace_worker", fail)
        with pytest.raises(ConfigError, match="no room"):
            driver.load_adapter("new", folder)
    assert driver.pids["execute"] != pid


def test_adapter_is_available_only_once_the_next_driver_would_know_it(
    driver: Driver, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep, was_refused = LoadedAdapters.keep, []

    def kept(*arguments: Any) -> None:
        with pytest.raises(InvalidRequest, match="lora is 'new'"):
            generated_by(driver, "new")
        was_refused.append(True)
        keep(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(LoadedAdapters, "keep", kept)
        driver.load_adapter("new", folder)
    assert was_refused
    assert generated_by(driver, "new") == expected([1, 2], 4, adapter=2)
    driver.unload_adapter("new")


def test_adapter_being_unloaded_is_refused_by_a_restarted_worker_too(driver: Driver, folder: Path) -> None:
    def is_refused() -> bool:
        try:
            generated_by(driver, "new")
        except InvalidRequest:
            return True
        return False

    driver.load_adapter("new", folder)
    stream = driver.submit(PROMPT, max_tokens=4000, lora="new")
    stream.accepted(20)
    unloading = threading.Thread(target=driver.unload_adapter, args=["new"])
    unloading.start()
    eventually(is_refused)
    for role in ("execute", "prepare"):
        kill(driver, role)
        eventually(lambda: driver.health().status == "ok")
        assert is_refused()
    stream.abort()
    stream.result(20)
    unloading.join(30)
    assert list(driver.info()["model"]["adapters"]) == ["fixed"]


def test_next_driver_on_the_journal_knows_the_adapters_of_the_settings_and_the_loaded_ones(
    folder: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"journal": str(tmp_path / "journal"), "hash_step_ms": 2.0, "lease_s": 60.0}
    first = hash_driver(lora_modules=[f"fixed={folder}"], **options).start()
    first.load_adapter("new", folder)
    names = ("fixed", "new")
    for stream in [first.submit(PROMPT, max_tokens=100, lora=name, request_id=name) for name in names]:
        next(iter(stream))
    first.stop(mode="keep")
    with hash_driver(lora_modules=[f"fixed={folder}"], **options) as second:
        for number, name in enumerate(names, 1):
            assert second.client.resume(name).result(30).token_ids == expected(PROMPT, 100, adapter=number)
        second.unload_adapter("new")
    assert [path.name for path in tmp_path.iterdir()] == ["journal"]
    with hash_driver(**options) as third:
        assert list(third.info()["model"]["adapters"]) == []


def test_removed_adapter_of_open_requests_is_an_error(folder: Path, tmp_path: Path) -> None:
    """But not once they are answered."""
    options: dict[str, Any] = {"run_dir": tmp_path / "run", "lease_s": 60.0, "hash_step_ms": 2.0}
    own = make_nominal_adapter(tmp_path / "own")
    first = hash_driver(**options).start()
    first.load_adapter("own", own)
    first.submit(PROMPT, max_tokens=400, lora="own", request_id="kept").accepted(20)
    first.stop(mode="keep")
    own.rename(tmp_path / "away")
    with (
        pytest.raises(ConfigError, match="unanswered requests for the adapter 'own', which is not configured"),
        hash_driver(**options),
    ):
        pass
    (tmp_path / "away").rename(own)
    with hash_driver(**options) as second:
        assert len(second.client.resume("kept").result(30).token_ids) == 400
    make_nominal_adapter(own, b"other weights")
    with hash_driver(**options) as third:
        assert generated_by(third, "own") == expected([1, 2], 4, adapter=1)


def test_adapter_refused_by_execute_disturbs_no_request(tmp_path: Path) -> None:
    checkpoint = make_tiny_model("llama", tmp_path / "model")
    good, bad = make_adapter(tmp_path / "good", checkpoint), make_nominal_adapter(tmp_path / "bad")
    for modules in ((), (f"good={good}",)):
        prove(checkpoint, lora_modules=modules)
    with Driver(str(checkpoint), num_pages=64) as driver:
        plain = driver.generate(PROMPT, max_tokens=60, ignore_eos=True).token_ids
        stream, pids = driver.submit(PROMPT, max_tokens=60, ignore_eos=True), driver.pids
        next(iter(stream))
        with pytest.raises(ConfigError, match="the new execute failed: the adapter 'bad' cannot be served"):
            driver.load_adapter("bad", bad)
        assert driver.pids == pids, "it was tried in a process beside the running one"
        driver.load_adapter("good", good)
        assert driver.pids == pids, "the running one takes it up"
        assert stream.result(60).token_ids == plain
        adapted = driver.generate(PROMPT, max_tokens=60, ignore_eos=True, lora="good").token_ids
        assert adapted != plain
        kill(driver, "execute")
        assert driver.generate(PROMPT, max_tokens=60, ignore_eos=True, lora="good").token_ids == adapted
