"""``python -m triptych.workers.fork_server``: does the imports of workers once, and forks these when they are needed.

The driver starts it and asks for workers: see ``driver/fork_servers.py``.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import gc
import importlib
import json
import logging
import os
import runpy
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from ..protocol.lifeline import CANNOT_FORK, FORK, GO, READY, end_only_with
from ..protocol.proc_stat import ARGUMENTS, stat_field
from ..protocol.run_dir import read_config
from .clone import fork_sibling, num_threads
from .importing import NUMPY, importing

logger = logging.getLogger(__name__)

_NUM_FILES = 4
# No import may start a thread or initialise a GPU: neither would work in a forked process.
_WITHOUT_THREADS = {"OPENBLAS_NUM_THREADS": "1"}  # of numpy
_WITHOUT_GPU = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
_GPU_IN_USE = ("/dev/nvidia-uvm", "/dev/kfd")  # open where CUDA or ROCm is initialised


class CannotFork(Exception):
    """Workers of this process would not be like others."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Forks workers of a Triptych pipeline; started by its driver.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--parent", type=int, required=True, help="process id of the driver")
    parser.add_argument("--roles", nargs="+", required=True)
    arguments = parser.parse_args()
    end_only_with(arguments.parent)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # workers would inherit it, and lose exit codes of their children
    try:
        _import([f"{__package__}.{role}" for role in arguments.roles], arguments.run_dir)
        _serve(socket.socket(fileno=0))
    except CannotFork as error:
        logger.error("workers are not forked: %s", error)
        sys.exit(CANNOT_FORK)


def _import(modules: list[str], run_dir: Path) -> None:
    """
    Raises:
        CannotFork: it has had effects that a forked process would not have.
    """
    for module in modules:
        with _variables(_WITHOUT_THREADS), importing(NUMPY):
            process = importlib.import_module(f"{module}.process")
        with _variables(_WITHOUT_GPU):
            process.preload(read_config(run_dir))
    gc.collect()
    gc.freeze()  # a collection in a worker would otherwise write to all of their pages, and so copy them
    if (count := num_threads()) != 1:
        raise CannotFork(f"imports have started {count - 1} threads")
    if used := [path for path in _open_files() if path in _GPU_IN_USE]:
        raise CannotFork(f"imports have opened {', '.join(used)}")


@contextmanager
def _variables(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    yield
    for name in values:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]


def _open_files() -> Iterator[str]:
    for file in Path("/proc/self/fd").iterdir():
        try:
            yield os.readlink(file)
        except OSError:  # the folder's own
            continue


def _serve(channel: socket.socket) -> None:
    """Until the driver closes its end.

    Raises:
        CannotFork: the system does not allow it.
    """
    channel.send(READY)
    while True:
        order, files, _, _ = socket.recv_fds(channel, len(FORK), _NUM_FILES)
        if not order:
            return
        if _is_forked():
            channel.detach()  # its number is that of standard input, which is replaced
            _become(*files)
        for file in files:
            os.close(file)


def _is_forked() -> bool:
    """Fork. Whether this is the new process, if there is one.

    Raises:
        CannotFork: see ``_serve``.
    """
    try:
        return fork_sibling() == 0
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.ENOMEM):
            raise CannotFork(str(error)) from error
        logger.warning("%s", error)
        return False


def _become(stdin: int, log: int, answer: int, request: int) -> NoReturn:
    """Run a module as ``python -m`` in a new process does."""
    with socket.socket(fileno=answer) as driver:
        driver.send(b"%d" % os.getpid())
        if not driver.recv(len(GO)):  # it has waited too long, and started another process
            os._exit(1)
    os.setsid()  # only now: a process that the driver does not know is of this server's group
    with open(request) as text:
        words, environment = json.load(text)
    for file, number in ((stdin, 0), (log, 1), (log, 2)):
        os.dup2(file, number)
    for file in (stdin, log):
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    _show_command([sys.orig_argv[0], "-m", *words])
    sys.argv = words  # of which the first becomes a path
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    sys.exit()


def _show_command(words: list[str]) -> None:
    """Let it be this process's command line, by which commands and people find it."""
    begin, end = (int(stat_field("self", number)) for number in ARGUMENTS)
    text = b"".join(os.fsencode(word) + b"\0" for word in words)
    if len(text) <= end - begin:
        ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


if __name__ == "__main__":
    main()
