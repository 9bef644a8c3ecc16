"""``fork_sibling``: like ``os.fork``, but the new process is a child of this one's parent."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import signal

_CLONE_PARENT, _CLONE_CHILD_SETTID, _CLONE_CHILD_CLEARTID = 0x8000, 0x1000000, 0x200000
_PR_GET_TID_ADDRESS = 40
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}


def num_threads() -> int:
    """Of this process, those of libraries included."""
    return len(os.listdir("/proc/self/task"))


def fork_sibling() -> int:
    """As ``os.fork``, but the new process has the same parent as this one, which waits for it and gets its exit code.

    The C library has no function for this, so the system is called directly, between the calls that prepare Python for
    a fork. What ``fork`` of the C library would do besides is: to take the locks of other threads, which there are
    none of; to run the handlers of ``pthread_atfork``, all of which handle threads, too (those of OpenBLAS, tokenizers
    and torch); to note the thread's new id, which the kernel does here; and to register the list of robust mutexes,
    which nothing here uses in the main thread.

    Raises:
        OSError: this system or its policy does not allow it (EINVAL, EPERM, ENOSYS), or has no process left for now
            (EAGAIN, ENOMEM).
    """
    assert num_threads() == 1, "only this thread would go on, without the locks of the others"
    libc, python = ctypes.PyDLL(None, use_errno=True), ctypes.pythonapi
    number = _SYS_CLONE.get(platform.machine(), -1)  # which is ENOSYS
    thread_id = ctypes.c_void_p()  # where the C library keeps it
    if libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(thread_id), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_GET_TID_ADDRESS)")
    flags = _CLONE_PARENT | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID | signal.SIGCHLD
    # Flags, stack, where to store the id in the parent, and then in either order where in the child, and its TLS.
    arguments = [ctypes.c_long(flags), None, None, thread_id, thread_id]
    gc.disable()  # from here on to the end of the fork, Python's locks are held
    python.PyOS_BeforeFork()
    pid = int(libc.syscall(ctypes.c_long(number), *arguments))
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    gc.enable()
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone(CLONE_PARENT)")
    return pid
