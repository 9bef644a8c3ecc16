"""Starting threads, of which there may be none left."""

from __future__ import annotations

import _thread
import threading

from .errors import ConfigError

LIMITS = "the limit of processes (ulimit -u) or of memory (ulimit -v), or pids.max of the control group"


def start_thread(thread: threading.Thread) -> None:
    """
    Raises:
        ConfigError: this process may start no more threads, or has made them something else: as a greenlet of gevent or
            eventlet, one that waits in ZeroMQ would let no other run.
    """
    starter = _thread.start_new_thread.__module__
    if starter != _thread.__name__:
        package = starter.partition(".")[0]
        instead = "use HTTP, or leave it its own: patch_all(thread=False, select=False, subprocess=False)"
        raise ConfigError(f"{package} has replaced the threads of this process, which Triptych needs: {instead}")
    try:
        thread.start()
    except RuntimeError as error:
        raise ConfigError(f"no thread can be started: raise {LIMITS}") from error
