"""What the kernel says about a process in ``/proc/PID/stat``."""

from __future__ import annotations

from pathlib import Path

# Numbers of fields in proc_pid_stat(5).
STATE, PARENT, MAJOR_FAULTS, START_TIME = 3, 4, 12, 22
ARGUMENTS = 48, 49  # where they begin and end in memory


def stat_field(pid: int | str, number: int) -> str:
    """A field by its number, from 3 on: the name before them may hold spaces and parentheses.

    Raises:
        OSError: there is no such process.
    """
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[number - 3]


def is_stopped(pid: int) -> bool:
    """Whether the process is suspended (SIGSTOP, a debugger): its lack of progress is then not its fault."""
    try:
        return stat_field(pid, STATE) in ("T", "t")
    except OSError:
        return False
