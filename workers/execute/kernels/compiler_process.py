"""Runs a compiler for a process, and ends it with that process: it starts processes of its own, which would go on.

Started by ``compile`` as the leader of a process group, with the id of the process that waits for it and a command.
"""

from __future__ import annotations

import os
import signal
import sys

from ....protocol.lifeline import die_with


def main() -> None:
    parent, *command = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    die_with(int(parent), by=signal.SIGTERM)
    _, status = os.waitpid(os.posix_spawnp(command[0], command, os.environ), 0)
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
