"""``python -m triptych.workers.prepare``: how the driver starts this worker."""

from __future__ import annotations

from ..importing import NUMPY, importing

if __name__ == "__main__":
    with importing(NUMPY):
        from ..process import main
        from .process import preload, run

    main("prepare", run, preload=preload)
