"""Memory from the NUMA node that is near: set_mempolicy(2), which the C library has no name for.

Preferred and not bound: where the node is full, memory comes from another, and the job goes on.
"""

import ctypes
import os
import platform

_PREFERRED = 1  # linux/mempolicy.h
_BITS = 1024  # nodes that the mask has room for
_WORD = 8 * ctypes.sizeof(ctypes.c_ulong)
_CALL = {"x86_64": 238, "aarch64": 237, "ppc64le": 261, "riscv64": 237, "s390x": 270}


def prefer(node: int) -> str:
    """Have this process and those that it starts take memory from ``node`` first; why not, where
    that can't be (a container may forbid it), or ""."""
    call = _CALL.get(platform.machine())
    if call is None:
        return f"not known how on {platform.machine()}"
    mask = (ctypes.c_ulong * (_BITS // _WORD))()
    mask[node // _WORD] = 1 << (node % _WORD)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(call), _PREFERRED, mask, ctypes.c_ulong(_BITS)) == 0:
        return ""
    return os.strerror(ctypes.get_errno())
