"""``python -m triptych.workers.summarize``: how the driver starts this worker."""

from __future__ import annotations

from ..process import main
from .process import run

if __name__ == "__main__":
    main("summarize", run)
