"""What the kernel knows about a process: whether the OOM killer ended it, and how long it waited for a processor."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from triptych.driver import deaths
from triptych.driver.deaths import OomWatch
from triptych.protocol import cgroups

Place = Callable[[str, str], None]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Writes fake files of the kernel."""
    monkeypatch.setattr(cgroups, "ROOT", tmp_path / "groups")
    monkeypatch.setattr(cgroups, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(deaths, "VMSTAT", tmp_path / "vmstat")

    def place(name: str, text: str) -> None:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    return place


@pytest.mark.parametrize(
    ("membership", "name", "text"),
    [
        ("0::/a\n", "groups/a/memory.events", "oom 3\noom_kill {}\noom_group_kill 0\n"),
        ("0::/hidden\n", "groups/memory.events", "oom 3\noom_kill {}\n"),
        (
            "4:memory:/a\n0::/\n",
            "groups/memory/a/memory.oom_control",
            "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n",
        ),
        ("0::/\n", "vmstat", "nr_free_pages 7\noom_kill {}\n"),
        (None, "vmstat", "oom_kill {}\n"),
    ],
    ids=["version 2", "version 2 seen from inside", "version 1", "root group", "no groups"],
)
def test_oom_kill_is_detected_once(place: Place, membership: str | None, name: str, text: str) -> None:
    if membership is not None:
        place("membership", membership)
    place("vmstat", "oom_kill 9\n")  # of the whole machine: only counts where no cgroup does
    place(name, text.format(2))
    watch = OomWatch()
    assert not watch.has_killed(-9)
    place(name, text.format(3))
    assert watch.has_killed(-9)
    assert not watch.has_killed(-9)
    place(name, text.format(4))
    assert not watch.has_killed(-11)  # it has killed another process


def test_oom_kill_of_another_process_is_forgotten(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a worker that an operator kills days later would count as killed for its requests."""
    seconds = 0.0
    monkeypatch.setattr(deaths, "time", SimpleNamespace(monotonic=lambda: seconds))
    place("membership", "0::/a\n")
    place("groups/a/memory.events", "oom_kill 2\n")
    watch = OomWatch()
    place("groups/a/memory.events", "oom_kill 3\n")
    seconds = 11.0
    watch.look()
    seconds = 11.0 + deaths.RECENT_S
    watch.look()
    assert not watch.has_killed(-9)
    place("groups/a/memory.events", "oom_kill 4\n")
    assert watch.has_killed(-9)


def test_oom_kills_elsewhere_are_ignored_if_our_cgroup_has_its_own_count(place: Place) -> None:
    place("membership", "0::/a\n")
    place("groups/a/memory.events", "oom_kill 0\n")
    place("vmstat", "oom_kill 1\n")
    watch = OomWatch()
    place("vmstat", "oom_kill 2\n")
    assert not watch.has_killed(-9)


@pytest.mark.parametrize(
    ("membership", "files", "said"),
    [
        ("0::/a/b\n", {"a/memory.max": 3 << 20, "a/memory.peak": 2 << 20, "a/b/memory.max": "max"},
         " (limit 3 MiB, peak 2 MiB)"),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": 5 << 20}, " (limit 5 MiB)"),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": 0x7FFFFFFFFFFFF000}, ""),
        ("0::/\n", {}, ""),
    ],
    ids=["of a parent", "version 1", "version 1 without a limit", "none"],
)  # fmt: skip
def test_limit_of_memory_is_named(place: Place, membership: str, files: dict[str, object], said: str) -> None:
    place("membership", membership)
    for name, text in files.items():
        place(f"groups/{name}", f"{text}\n")
    assert cgroups.memory_ran_out() == f"memory ran out{said}"


def test_kernel_without_counters_reports_nothing(place: Place) -> None:
    place("membership", "4:memory:/a\n")
    place("groups/memory/a/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\n")
    assert not OomWatch().has_killed(-9)


@pytest.mark.parametrize(
    ("code", "log", "expected"),
    [
        (-6, "ready\nToo many open files (src/ipc_listener.cpp:297)", True),
        (-6, "Too many open files (src/ipc_listener.cpp:297)\nFatal Python error: Aborted\n\nThread 0x1", True),
        (-6, "Too many open files (src/ipc_listener.cpp:297)\nfree(): invalid pointer", False),
        (1, "OSError: [Errno 24] Too many open files", False),
        (-6, "", False),
    ],
)
def test_lack_of_descriptors_is_told_from_other_aborts(code: int, log: str, expected: bool) -> None:
    assert (deaths.what_was_lacking(code, log, was_ready=False) == deaths.CROWDED) == expected


@pytest.mark.parametrize(
    ("code", "log", "expected"),
    [
        (1, "ready\ntriptych.protocol.errors.ConfigError: no thread can be started: raise the limit", True),
        (1, "RuntimeError: can't start new thread", True),
        (1, "BlockingIOError: [Errno 11] Resource temporarily unavailable", True),
        (-6, "Resource temporarily unavailable (src/thread.cpp:241)\nFatal Python error: Aborted\n\nThread 0x1", True),
        (-2, "OpenBLAS blas_thread_init: RLIMIT_NPROC 18 current, 18 max", True),
        (-6, "free(): invalid pointer", False),
        (-11, "no thread can be started\nFatal Python error: Segmentation fault", False),
        (1, "", False),
    ],
)
def test_lack_of_threads_is_told_from_other_failures(code: int, log: str, expected: bool) -> None:
    assert (deaths.what_was_lacking(code, log, was_ready=True) == deaths.NO_THREADS) == expected
    assert not deaths.what_was_lacking(code, log, was_ready=False)


@pytest.mark.parametrize(
    ("death", "expected"),
    [(signal.SIGINT, True), (signal.SIGSEGV, True), (signal.SIGKILL, False), (signal.SIGTERM, False)],
)
def test_signals_that_a_worker_sends_itself_are_its_own_fault(death: signal.Signals, expected: bool) -> None:
    """SIGINT is OpenBLAS', for lack of threads: such a worker would otherwise be started again without an end."""
    assert deaths.is_internal(-death, was_hung=False, out_of_memory=False) is expected
