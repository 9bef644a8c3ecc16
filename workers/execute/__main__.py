"""``python -m triptych.workers.execute``: how the driver starts this worker."""

from __future__ import annotations

from ..importing import NUMPY, importing

if __name__ == "__main__":
    with importing(NUMPY):
        from ..process import main
        from .loading import preload
        from .process import run

    main("execute", run, preload=preload)
