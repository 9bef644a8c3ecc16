"""``python -m triptych.workers.execute``: this worker, as the driver starts it or lets it be forked."""

from __future__ import annotations

from ..importing import NUMPY, importing

if __name__ == "__main__":
    with importing(NUMPY):
        from ..process import main
        from .process import run

    main("execute", run)
