"""``python -m triptych.workers.execute.rank``: one of ranks 1 to N - 1 of a split model; see ``model/parallel``.

It executes the orders that rank 0 writes to its standard input, and exits when that is closed. Any error ends this
process, with a traceback in the log of execute, and that ends execute.
"""

from __future__ import annotations

import argparse
import logging
import sys
from io import FileIO
from pathlib import Path

from ...protocol.lifeline import end_only_with
from ..importing import TORCH, importing


def main() -> None:
    parser = argparse.ArgumentParser(description="A tensor-parallel rank of a Triptych pipeline; started by execute.")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--rendezvous", type=Path, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    end_only_with(arguments.parent)
    name = f"rank {arguments.rank}"
    logging.basicConfig(
        level=logging.ERROR, stream=sys.stderr, format=f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s"
    )
    with importing(TORCH):
        from .model.parallel.follow import follow  # imports torch, after the signals are set

    # Unbuffered, as a buffer would wait for more than one order.
    follow(FileIO(sys.stdin.fileno(), closefd=False), rank=arguments.rank, rendezvous=arguments.rendezvous)


if __name__ == "__main__":
    main()
