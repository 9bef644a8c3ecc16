"""``python -m tests.fork_server CHANNEL MODULE...``: imports the modules, and forks a worker for each request.

``forking.py`` starts it and says why.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import socket
import sys
from typing import Any, NoReturn

MAX_BYTES = 1 << 17  # of a request


def main() -> NoReturn:
    channel = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.freeze()
    while True:
        request, files, _, _ = socket.recv_fds(channel, MAX_BYTES, 4)
        if not request:  # the tests are over
            sys.exit()
        pid = _fork_an_orphan()
        if pid == 0:
            channel.close()
            _become(json.loads(request), files)
        for file in files:
            os.close(file)
        channel.send(b"%d" % pid)


def _fork_an_orphan() -> int:
    """Like ``os.fork``; but its parent is the closest ancestor that adopts orphans, when either process goes on."""
    assert len(os.listdir("/proc/self/task")) == 1, "only this thread would go on, without the locks of the others"
    told, tell = os.pipe()
    between = os.fork()
    if between != 0:
        os.waitpid(between, 0)
        os.close(tell)
        with open(told, "rb") as file:
            return int(file.read())
    own, pid = os.getpid(), os.fork()
    if pid != 0:
        os.write(tell, b"%d" % pid)
        os._exit(0)
    os.close(told)
    os.close(tell)
    while os.getppid() == own:
        os.sched_yield()
    return 0


def _become(request: dict[str, Any], files: list[int]) -> NoReturn:
    """Run a module with the standard files and the working directory that ``files`` are."""
    os.setsid()
    os.fchdir(files[3])
    for number, file in enumerate(files[:3]):
        os.dup2(file, number)
    for file in files:
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = [request["module"], *request["arguments"]]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    main()
