"""What has threads and sockets belongs to the process that made it: after a fork the child has neither."""

from __future__ import annotations

import os

from ..protocol.errors import PipelineClosed


class Origin:
    """The process in which an object was made."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()

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
                f"this {self._what} was made in process {self._pid}; after a fork connect a Client to its run directory"
            )
