"""Allocation of memory from the nearest NUMA node, by set_mempolicy(2), which has no function in
the C library.

The NUMA node is preferred, not bound: if it is full, memory is allocated from another one, and the
job continues.
"""

import ctypes
import os
import platform

_PREFERRED = 1  # linux/mempolicy.h
_BITS = 1024  # size of the mask, in NUMA nodes
_WORD = 8 * ctypes.sizeof(ctypes.c_ulong)
_CALL = {"x86_64": 238, "aarch64": 237, "ppc64le": 261, "riscv64": 237, "s390x": 270}


def prefer(node: int) -> str:
    """Let this process and its future children allocate memory from NUMA node ``node`` first.

    Returns:
        The reason if that is not possible (a container may forbid it), else "".
    """
    call = _CALL.get(platform.machine())
    if call is None:
        return f"set_mempolicy is not known on {platform.machine()}"
    mask = (ctypes.c_ulong * (_BITS // _WORD))()
    mask[node // _WORD] = 1 << (node % _WORD)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(call), _PREFERRED, mask, ctypes.c_ulong(_BITS)) == 0:
        return ""
    return os.strerror(ctypes.get_errno())
