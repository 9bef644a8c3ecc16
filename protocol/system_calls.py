"""System calls of Linux that ``os`` lacks where Python was built for an older C library, as those of uv and conda were.

See https://github.com/python/cpython/issues/153400.
"""

from __future__ import annotations

import ctypes
import os
import platform

P_PIDFD = 3  # for ``os.waitid``
_MFD_CLOEXEC = 1
_PIDFD_OPEN = 434  # the same on every machine
_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}


def pidfd_open(pid: int) -> int:
    """A descriptor that is readable once this process has ended, and is not inherited.

    Raises:
        OSError: there is no such process, no descriptor is left, or Linux is older than 5.3.
    """
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _call(_PIDFD_OPEN, ctypes.c_int(pid), ctypes.c_uint(0))


def memfd_create(name: str) -> int:
    """The descriptor, not inherited, of a new file in memory, which ends with the last process that has it open.

    Raises:
        OSError: no descriptor is left.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, _MFD_CLOEXEC)
    return _call(_MEMFD_CREATE.get(platform.machine(), -1), os.fsencode(name), ctypes.c_uint(_MFD_CLOEXEC))


def _call(number: int, *arguments: object) -> int:
    result = int(ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        raise OSError(error := ctypes.get_errno(), os.strerror(error))
    return result
