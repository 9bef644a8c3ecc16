"""The driver's life cycle: start and stop in any order, from any thread, several at once, and leave nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest

from tests.proc import is_alive
from triptych import Client, Driver, PipelineConfig
from triptych.driver.journal_keeper import num_unanswered
from triptych.driver.run_dir import RunDir
from triptych.driver.session import Session
from triptych.driver.stream import Stream
from triptych.protocol.board import ROLES
from triptych.protocol.errors import ConfigError, PipelineClosed
from triptych.protocol.journal.layout import Journal
from triptych.workers.execute.hash_build import VOCAB_SIZE
from triptych.workers.execute.hash_lm import expected_tokens

FORGET = """
from triptych import Driver
driver = Driver("hash-lm", hash_step_ms=5).start()
driver.submit([5, 6, 7], max_tokens=4000).accepted(20)
print(driver.run_dir)
"""
ROOT = Path(__file__).resolve().parents[2]
SAID = expected_tokens([5, 6, 7], 9, VOCAB_SIZE)
HOLD = """
import sys
from triptych import Driver
with Driver("hash-lm", run_dir=sys.argv[1]) as driver:
    print(*driver.pids.values(), flush=True)
    sys.stdin.read()
"""


def answers(driver: Driver | Client) -> bool:
    return driver.generate([5, 6, 7], max_tokens=9, timeout=20).token_ids == SAID


def pids_of(driver: Driver) -> list[int]:
    return [pid for pid in driver.pids.values() if pid is not None]


@pytest.mark.usefixtures("own_servers")
def test_life_cycle_of_one_driver(caplog: pytest.LogCaptureFixture) -> None:
    """One pipeline for everything that needs only one: each start takes half a second."""
    num_open = len(os.listdir("/proc/self/fd"))
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    num_threads = threading.active_count()
    driver = Driver("hash-lm")
    with pytest.raises(PipelineClosed):
        driver.generate([5])
    seen: list[str] = []
    assert driver.start(progress=lambda d: seen.append(d.phases["execute"][0])) is driver
    pids, run_dir = pids_of(driver), driver.run_dir
    assert "--arena-bytes" not in caplog.text, "its journal is large enough"
    assert driver.start() is driver, "a second start changes nothing"
    assert (pids_of(driver), driver.run_dir, driver.healthy) == (pids, run_dir, True)
    assert driver.phases == dict.fromkeys(ROLES, ("ready", 0, 0))
    assert {signal.getsignal(n) for n in handlers if signal.getsignal(n) != handlers[n]} == set()
    assert answers(driver)
    client = driver.client
    ended, running = driver.submit([5], max_tokens=1), driver.submit([5], max_tokens=2000)
    ended.wait()
    assert in_a_forked_child(lambda: refuses_to_be_used(driver, client)) == 0
    assert in_a_forked_child(lambda: does_not_wait_for(running)) == 0
    assert in_a_forked_child(lambda: ended.result().finish_reason == "length") == 0, "what is here can be read"
    running.abort()
    assert in_a_forked_child(lambda: answers(Client(driver.run_dir))) == 0
    for mine in (driver, client, running):
        with pytest.raises(TypeError, match="cannot be sent to another process: connect a Client to the"):
            ForkingPickler.dumps(mine)
    assert answers(driver), "a forked child that stops its parent's driver stops nothing"
    driver.stop()
    driver.stop()
    assert not any(map(is_alive, pids))
    assert not run_dir.exists(), "a temporary run directory is removed"
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (num_open, num_threads)
    for use in (lambda: driver.generate([5]), lambda: driver.pids, lambda: driver.run_dir, driver.stats, driver.info):
        with pytest.raises(PipelineClosed, match="the driver is not started"):
            use()
    with driver:
        assert answers(driver)


def refuses_to_be_used(driver: Driver, client: Client) -> bool:
    driver.stop()
    client.close()
    uses = (driver.start, driver.health, lambda: driver.pids, lambda: client.generate([5]), client.info)
    for use in uses:
        with pytest.raises(PipelineClosed, match="was created in process"):
            use()
    return True


def does_not_wait_for(stream: Stream) -> bool:
    """Its deltas arrive in the parent."""
    for use in (stream.result, lambda: list(stream)):
        with pytest.raises(PipelineClosed, match="this stream was created in process"):
            use()
    return True


def in_a_forked_child(check: Callable[[], bool]) -> int:
    """The child's exit status, 0 if the check passes."""
    if (pid := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            os._exit(0 if check() else 1)
        os._exit(2)
    return os.waitpid(pid, 0)[1]


@contextlib.contextmanager
def a_forked_child() -> Iterator[None]:
    """A child that does nothing and keeps open what its parent had open."""
    until, end = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(end)
        os.read(until, 1)
        os._exit(0)
    try:
        yield
    finally:
        os.close(until)
        os.close(end)
        os.waitpid(pid, 0)


def test_forked_child_does_not_keep_the_folder_of_a_stopped_driver_locked(tmp_path: Path) -> None:
    """As multiprocessing forks them: the child has the files of both locks open too."""
    driver = Driver("hash-lm", run_dir=tmp_path).start()
    with a_forked_child():
        driver.stop()
        with Driver("hash-lm", run_dir=tmp_path) as again:
            assert answers(again)


def test_driver_can_be_started_in_a_thread_that_exits_without_waiting() -> None:
    driver = Driver("hash-lm")
    thread = threading.Thread(target=driver.start, kwargs={"wait": False})
    thread.start()
    thread.join()
    try:
        assert answers(driver), "a request sent before the workers are ready is answered later"
        assert driver.stats()["restarts"] == dict.fromkeys(ROLES, 0)
    finally:
        stopper = threading.Thread(target=driver.stop)
        stopper.start()
        stopper.join()


def test_program_that_ends_without_stopping_its_driver_leaves_nothing() -> None:
    """It still has its requests ended: clients in other processes would wait for their answers."""
    done = subprocess.run([sys.executable, "-c", FORGET], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (Path(done.stdout.strip()).is_absolute(), done.stderr) == (True, "")
    assert not Path(done.stdout.strip()).exists()


def test_clean_stop_lets_accepted_requests_finish_and_then_methods_raise_pipeline_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver, leave, seen = Driver("hash-lm", hash_step_ms=1).start(), RunDir.leave, list[Exception]()
    streams = [driver.submit([i], max_tokens=200) for i in range(1, 5)]
    for stream in streams:
        stream.accepted(20)

    def ask_and_leave(self: RunDir) -> None:
        for ask in (driver.health, lambda: driver.num_unanswered, lambda: driver.phases):
            try:
                ask()
            except Exception as error:
                seen.append(error)
        leave(self)

    monkeypatch.setattr(RunDir, "leave", ask_and_leave)
    driver.stop(mode="drain")
    assert [stream.result(0).finish_reason for stream in streams] == ["length"] * 4
    assert [type(error) for error in seen] == [PipelineClosed] * 3


def test_leaving_the_with_block_with_an_error_does_not_wait_for_answers() -> None:
    started = time.monotonic()
    streams: list[Stream] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted_after_a_request(streams)
    assert streams[0].done
    assert time.monotonic() - started < 10, "four thousand steps would take twenty seconds"


def interrupted_after_a_request(streams: list[Stream]) -> None:
    with Driver("hash-lm", hash_step_ms=5) as driver:
        streams.append(driver.submit([5], max_tokens=4000))
        streams[0].accepted(20)
        raise KeyboardInterrupt


def test_stop_interrupted_at_its_end_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    threads = threading.active_count()
    driver = Driver("hash-lm", run_dir=tmp_path).start()
    monkeypatch.setattr(Session, "wait_for_ends", interrupt)
    with pytest.raises(KeyboardInterrupt):
        driver.stop()
    assert driver.stop() == {}
    assert threading.active_count() == threads
    RunDir(tmp_path).unlock()


def test_stop_interrupted_after_the_workers_ended_can_be_repeated() -> None:
    driver = Driver("hash-lm").start()
    assert driver._started is not None
    run_dir, thread = driver.run_dir, driver._started.supervisor._thread
    join = thread.join

    def join_and_interrupt() -> None:
        join()
        thread.join = join  # type: ignore[method-assign]
        raise KeyboardInterrupt

    thread.join = join_and_interrupt  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        driver.stop()
    assert driver.stop() == dict.fromkeys(ROLES, 0)
    assert not run_dir.exists()


@pytest.mark.usefixtures("own_servers")
def test_start_stopped_by_another_thread_does_not_affect_the_next_start() -> None:
    driver = Driver("hash-lm")

    def stop_and_start(_: Driver) -> None:
        driver.stop(mode="abort")
        driver.start()

    with pytest.raises(PipelineClosed, match="stopped while it started"):
        driver.start(progress=stop_and_start)
    assert answers(driver)
    driver.stop()


def test_signal_while_a_driver_drains_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    driver = Driver("hash-lm").start()
    pids, run_dir = pids_of(driver), driver.run_dir
    monkeypatch.setattr(Driver, "drain", interrupt)
    with pytest.raises(KeyboardInterrupt):
        driver.__exit__(None, None, None)
    assert not any(map(is_alive, pids))
    assert not run_dir.exists()


def test_config_and_options_exclude_each_other() -> None:
    config = PipelineConfig.from_options(model="hash-lm")
    assert Driver(config=config).config is config
    with pytest.raises(ConfigError, match="give a config or options, not both: page_size"):
        Driver(config=config, page_size=4)


def test_unknown_mode_of_stop_is_refused() -> None:
    """Anything but "drain" and "keep" would end all open requests."""
    with pytest.raises(ConfigError, match="mode is 'Drain', known are: drain, abort, keep"):
        Driver("hash-lm").stop(mode="Drain")  # type: ignore[arg-type]


def test_unknown_option_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="unknown option 'page_sise'"):
        Driver("hash-lm", page_sise=4)


def test_run_directory_with_a_too_long_path_is_refused_and_released(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 100)
    for _ in range(2):
        with pytest.raises(ConfigError, match="the limit is 107"):
            Driver("hash-lm", run_dir=path).start()


def test_new_journal_has_no_unanswered_requests(tmp_path: Path) -> None:
    assert num_unanswered(Journal.create(tmp_path / "journal", num_records=2, arena_bytes=1 << 12)) == 0


def test_journal_too_small_for_its_model_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with Driver("hash-lm", arena_bytes=1 << 16) as driver:
        card = driver.info()["model"]
    needed = 8 * card["max_live"] * card["max_model_len"]
    assert f"--arena-bytes is {1 << 16}: {card['max_live']} sequences" in caplog.text
    assert f"need {needed} bytes" in caplog.text
