"""Linux gives the tile registers of Intel's AMX only to processes that ask for them."""

from __future__ import annotations

import ctypes
import logging
import os
from functools import cache

logger = logging.getLogger(__name__)

_SYS_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18  # on x86-64; since Linux 5.16


@cache
def are_permitted() -> bool:
    """Whether all threads of this process may use them; asks for that the first time."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_SYS_ARCH_PRCTL, _REQUEST, _TILE_DATA) == 0:
        return True
    logger.warning("the kernels do not use AMX: the system refuses it, %s", os.strerror(ctypes.get_errno()))
    return False
