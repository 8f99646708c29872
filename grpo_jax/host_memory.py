"""What the C library does with memory that is freed."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

# Names of glibc's malloc.h, see mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_LARGEST = 32 * 2**20  # bytes; glibc takes no larger threshold


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Lets this process keep freed memory, in pieces of up to 32 MiB, for its next arrays.

    On a CPU, XLA and PyTorch allocate their arrays anew in every step. glibc gives freed memory back to the system,
    which fills each page with zeros when it is asked for again: in the miniature that is two fifths of an iteration. A
    process that keeps it is larger instead, there by half. All of the process is concerned.

    Args:
        environment: Whoever sets `MALLOC_…` or GLIBC_TUNABLES (other than the size of pages) is left alone.

    Returns:
        Whether it will: only glibc knows how.
    """
    tunables = [name for name in environment.get("GLIBC_TUNABLES", "").split(":") if name.startswith("glibc.malloc.")]
    if any("hugetlb" not in name for name in tunables) or any(name.startswith("MALLOC_") for name in environment):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return False
    # One arena: a thread's own is given back in pieces whatever the thresholds say.
    settings = ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, _LARGEST), (_TRIM_THRESHOLD, -1))
    return all([mallopt(name, value) == 1 for name, value in settings])
