"""Wait until a file appears in a folder: inotify(7), since there is no other event for it.

Layer 1. Used where another program makes a socket and has no way to say that it did.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from pathlib import Path

_IN_CREATE = 0x100
_IN_MOVED_TO = 0x80


async def appears(path: Path) -> None:
    """Return when `path` exists; at once where it does already. Set your own deadline.

    Raises OSError where its folder cannot be watched.
    """
    fd = _inotify_on(path.parent)
    try:
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()

        def on_change() -> None:
            os.read(fd, 4096)
            changed.set()

        loop.add_reader(fd, on_change)
        try:
            while not os.path.lexists(path):
                await changed.wait()
                changed.clear()
        finally:
            loop.remove_reader(fd)
    finally:
        os.close(fd)


def _inotify_on(folder: Path) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "inotify_init1")
    if libc.inotify_add_watch(fd, os.fsencode(folder), _IN_CREATE | _IN_MOVED_TO) < 0:
        error = ctypes.get_errno()
        os.close(fd)
        raise OSError(error, os.strerror(error), str(folder))
    return fd
