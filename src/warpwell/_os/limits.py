"""Limits of a process."""

from __future__ import annotations

import resource


def allow_more_files(fd: int) -> None:
    """Raise the soft limit of open files, often 1,024, if a descriptor that is to stay open is in its upper half."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if fd > 200 and fd > soft // 2 and (hard == resource.RLIM_INFINITY or hard > soft):
        limit = min(max(2 * soft, 4096), 1 << 20 if hard == resource.RLIM_INFINITY else hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
