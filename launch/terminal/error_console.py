"""Standard error for everything that is not an answer."""

from __future__ import annotations

from rich.console import Console


class ErrorConsole(Console):
    """Outlives its reader: rich would raise SystemExit in whichever thread writes next, and close standard output."""

    def __init__(self) -> None:
        super().__init__(stderr=True)

    def on_broken_pipe(self) -> None:
        self.quiet = True
