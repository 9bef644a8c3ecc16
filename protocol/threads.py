"""Starting threads, of which there may be none left."""

from __future__ import annotations

import threading

from .errors import ConfigError


def start_thread(thread: threading.Thread) -> None:
    """
    Raises:
        ConfigError: this process may start no more threads.
    """
    try:
        thread.start()
    except RuntimeError as error:
        limits = "the limit of processes (ulimit -u), or pids.max of the control group"
        raise ConfigError(f"no thread can be started: raise {limits}") from error
