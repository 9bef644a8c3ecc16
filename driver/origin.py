"""Objects with threads and sockets belong to the process that made them: they cannot be pickled or survive a fork."""

from __future__ import annotations

import os
from typing import NoReturn

from ..protocol.errors import PipelineClosed


class Origin:
    """The process in which an object was created."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()

    def __reduce__(self) -> NoReturn:
        text = f"a {self._what} cannot be sent to another process: connect a Client to the run directory there"
        raise TypeError(text)

    @property
    def is_here(self) -> bool:
        return self._pid == os.getpid()

    def check(self) -> None:
        """
        Raises:
            PipelineClosed: this is another process.
        """
        if not self.is_here:
            raise PipelineClosed(
                f"this {self._what} was created in process {self._pid}: after a fork, connect a Client to its run"
                " directory"
            )
