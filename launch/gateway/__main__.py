"""``python -m triptych.launch.gateway``: HTTP for a running pipeline, in this process."""

from __future__ import annotations

import gc
import sys


def main() -> None:
    if "--supervised" in sys.argv[1:]:
        from ...protocol.lifeline import die_with

        die_with(int(sys.argv[sys.argv.index("--parent") + 1]))  # first: until then it may outlive ``serve``
        gc.disable()  # until ``serve``: hardly anything that imports create is garbage
        from .serving.server import run_supervised
        from .settings import Settings

        run_supervised(Settings.from_json(sys.stdin.read()))
    else:
        from .command import main as command

        command()


if __name__ == "__main__":
    main()
