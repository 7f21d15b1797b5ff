"""How glibc's malloc treats freed memory."""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # malloc.h
MAX_FREE_BYTES = 2**30  # at the heap's end; more is returned to the system


def keep_freed_memory() -> None:
    """Lets later allocations reuse freed memory (glibc only).

    By default, malloc returns every large freed block to the system, and the next one needs new pages: of a step of a
    small model on a CPU that takes a seventh of the time, and of a conversion more than the copies into them. Threads
    that have already allocated are not affected, so it must be called before they start.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        for parameter, value in ((M_ARENA_MAX, 1), (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, MAX_FREE_BYTES)):
            libc.mallopt(parameter, value)
