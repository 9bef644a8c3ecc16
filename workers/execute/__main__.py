"""``python -m triptych.workers.execute``: how the driver starts this worker."""

from __future__ import annotations

from ..process import main
from .loading import preload
from .process import run

if __name__ == "__main__":
    main("execute", run, preload=preload)
