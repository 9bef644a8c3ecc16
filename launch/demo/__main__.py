"""``make demo``: shows the pipeline at work, and exits with 1 if anything was not as it should be."""

from __future__ import annotations

import sys

from ..signals import interrupts_end_process


def main() -> int:
    """Run the demo; its exit code."""
    with interrupts_end_process():
        from .scenes import make_demo, play

        demo = make_demo()
    return play(demo)


if __name__ == "__main__":
    sys.exit(main())
