"""Settings for every test, and for the processes that tests start."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from triptych import Driver

# Set before torch is imported: models in tests are tiny, and on a busy machine a second thread only adds waiting.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Started in the background of a script, or with nohup, these signals would be ignored in every process of a test too.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Triton decides when a kernel is defined whether it is compiled for a device or interpreted.
HAS_GPU = any(Path("/dev", name).exists() for name in ("nvidiactl", "kfd"))
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

OWN_SERVERS = "--own-servers"

# While all tests are imported, a garbage collection has much to visit and nothing to free.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OWN_SERVERS, action="store_true", help="start workers as outside of tests; see forking.py")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Reruns are counted where they happen.

    pytest-rerunfailures reports each test to its first process, byte by byte: 0.6 ms of processor time. Only a test
    that ends its whole process is repeated by what is known there: here it fails at once.
    """
    if hasattr(config, "workerinput") and hasattr(config, "failures_db"):
        from pytest_rerunfailures import StatusDB

        config.failures_db = StatusDB()


def pytest_collection(session: pytest.Session) -> None:
    """Of several processes, each first imports modules that no other one begins with.

    All collect in the same order, so after a checkout each would compile every module.
    """
    if (this := getattr(session.config, "workerinput", None)) is None:
        return
    root, given = session.config.rootpath, [Path(arg.partition("::")[0]).resolve() for arg in session.config.args]
    files = sorted(file for path in given for file in ([path] if path.is_file() else path.rglob("test_*.py")))
    for file in files[int(this["workerid"].removeprefix("gw")) :: this["workercount"]]:
        with suppress(Exception, pytest.skip.Exception):  # reported where it is collected
            importlib.import_module(".".join(file.relative_to(root).with_suffix("").parts))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests begin first: one that begins last would leave the other processes idle."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    _keep_what_is_there()
    gc.enable()


_num_kept = 0  # modules whose objects are excluded


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Many tests import more of transformers."""
    yield
    if len(sys.modules) > _num_kept:
        gc.collect()  # what the test has left
        _keep_what_is_there()


def _keep_what_is_there() -> None:
    """Exclude imported objects from later collections: each start of a model runs one, over all of torch."""
    global _num_kept
    _num_kept = len(sys.modules)
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def shared_servers(pytestconfig: pytest.Config) -> Iterator[None]:
    """See ``forking.py``."""
    are_missing = None in map(importlib.util.find_spec, ("zmq", "msgpack"))  # kernels are also tested without them
    if are_missing or pytestconfig.getoption(OWN_SERVERS):
        yield
        return
    from tests import forking

    with forking.shared_servers():
        yield


@pytest.fixture(autouse=True)
def package_log() -> Iterator[None]:
    """A command that runs in the process of its test sets up the package's log: not for the tests that follow."""
    package = logging.getLogger("triptych")
    handlers, level = package.handlers[:], package.level
    yield
    package.handlers[:] = handlers
    package.setLevel(level)


@pytest.fixture
def own_servers() -> Iterator[None]:
    """For tests of them, and those that need the time that a start takes outside of tests."""
    from tests import forking

    with forking.own_servers():
        yield


@pytest.fixture(scope="session")
def demo_driver() -> Iterator[Driver]:
    """The model that ships with the package, shared by all tests that only send it requests."""
    from triptych import Driver  # here, because kernels are also tested without pyzmq

    with Driver("demo", device="cpu", threads=1, num_pages=256) as driver:
        yield driver


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked ``gpu`` are skipped without a GPU."""
    if item.get_closest_marker("gpu") and not HAS_GPU:
        pytest.skip("needs a CUDA or ROCm device")
