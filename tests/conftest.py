"""Settings for every test, and for the processes that tests start."""

from __future__ import annotations

import gc
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from triptych import Driver

# Set before torch is imported: models in tests are tiny, and on a busy machine a second thread is only waited for.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Started in the background of a script, or by nohup, they would be ignored, in every process that a test starts too.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Triton decides when a kernel is defined whether it is compiled for a device or interpreted.
HAS_GPU = any(Path("/dev", name).exists() for name in ("nvidiactl", "kfd"))
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"


# While all tests are imported there is much to look at and nothing to find.
gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """pytest-rerunfailures sends twice a test before it reads: the second waited 40 ms for TCP to confirm the first."""
    if (channel := getattr(getattr(config, "failures_db", None), "sock", None)) is not None:
        channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Shared out among processes, long tests begin first: one that begins last leaves the others nothing to do."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    _keep_what_is_there()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """The tests of a file import more of transformers."""
    yield
    if nextitem is None or nextitem.path != item.path:
        _keep_what_is_there()


def _keep_what_is_there() -> None:
    """What was imported stays: no collection looks at it again. Each start of a model makes one, over all of torch."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def demo_driver() -> Iterator[Driver]:
    """The model that ships with the package, for all who only ask it something."""
    from triptych import Driver  # here, since kernels are tested without pyzmq too

    with Driver("demo", device="cpu", threads=1, num_pages=256) as driver:
        yield driver


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked ``gpu`` run where there is one."""
    if item.get_closest_marker("gpu") and not HAS_GPU:
        pytest.skip("needs a CUDA or ROCm device")
