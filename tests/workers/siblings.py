"""``python -m tests.workers.siblings PARENT NAME...``: forks a process for each function named, and prints its id."""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from multiprocessing.pool import ThreadPool
from typing import NoReturn

import numpy as np
import torch

from triptych.workers.clone import fork_sibling


def has_its_own_place() -> None:
    assert os.getppid() == int(sys.argv[1])
    assert os.getpid() == threading.get_native_id()
    assert os.waitstatus_to_exitcode(os.waitpid(os.spawnlp(os.P_NOWAIT, "true", "true"), 0)[1]) == 0


def starts_threads_and_processes() -> None:
    with ThreadPool(4) as pool:
        assert pool.map(len, ["a", "bc"]) == [1, 2]
    assert subprocess.run(["echo", "x"], capture_output=True, check=True).stdout == b"x\n"
    if (pid := os.fork()) == 0:
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3


def computes() -> None:
    torch.set_num_threads(2)
    ones = torch.ones(400, 400, requires_grad=True)
    product = (ones @ ones).sum()
    product.backward()  # type: ignore[no-untyped-call]
    assert (product.item(), ones.grad[0, 0].item()) == (400**3, 800)  # type: ignore[index]
    assert (np.ones((400, 400)) @ np.ones((400, 400)))[0, 0] == 400


def draws() -> None:
    print("drawn:", random.random(), uuid.uuid4(), tempfile.mktemp(), file=sys.stderr)


def handles_signals() -> None:
    seen: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    os.kill(os.getpid(), signal.SIGUSR1)
    assert seen == [signal.SIGUSR1]
    faulthandler.register(signal.SIGUSR2)
    threading.Timer(0.01, lambda: os.kill(os.getpid(), signal.SIGUSR2)).run()


def aborts() -> None:
    os.abort()


def crashes() -> None:
    faulthandler._sigsegv()  # type: ignore[attr-defined]


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exits() -> None:
    sys.exit(5)


def fails() -> NoReturn:
    raise ValueError("as wanted")


def main() -> None:
    for name in sys.argv[2:]:
        pid = fork_sibling()
        if pid == 0:
            globals()[name]()
            sys.exit()
        print(pid, flush=True)


if __name__ == "__main__":
    main()
