"""``python -m triptych.workers.execute.rehearse``: whether execute would run with the config in this folder.

Run before the current execute is ended in favor of one with other weights or adapters. Whatever the new one would
refuse is refused here, and what a start learns about a model and stores is ready for it.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path

from ...protocol.lifeline import end_only_with
from ...protocol.run_dir import read_config
from ..importing import TORCH, importing
from .loading import find_folders


def main() -> None:
    parser = argparse.ArgumentParser(description="Trial run of new settings of execute; started by the driver.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    end_only_with(arguments.parent)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    _make_way()
    config = read_config(arguments.run_dir)
    folder, draft_folder = find_folders(config.model)
    with importing(TORCH):
        from .model.build import rehearse, spare_cache

    spare = spare_cache(arguments.run_dir.parent)  # this is a folder in the pipeline's
    rehearse(config, folder=folder, draft_folder=draft_folder, run_dir=arguments.run_dir, spare=spare)


def _make_way() -> None:
    """Give other processes precedence on the processors, and let this one be killed first if memory runs out."""
    os.nice(19)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    main()
