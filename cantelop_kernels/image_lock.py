"""A lock file, awaited: one build or fetch at a time, across processes.

Layer 2, used by the image builder and by `tools`.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from .errors import ImageError
from .process import Process

_PATH = "/usr/bin:/bin"


@asynccontextmanager
async def locked(path: Path, on_wait: Callable[[], None]) -> AsyncIterator[None]:
    """Hold a lock file exclusively; `on_wait` is called when another process has it.

    flock(1) waits in our place, so that a wait can be cancelled: its lock is on the open file, and
    that it shares with us. The kernel lets go of it when this process ends, however it ends.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if await _flock(fd, "--nonblock") != 0:
            on_wait()
            if await _flock(fd) != 0:
                raise ImageError(f"cannot lock {path}")
        yield
    finally:
        os.close(fd)


async def _flock(fd: int, *options: str) -> int:
    argv = ["flock", "--exclusive", *options, str(fd)]
    process = Process.spawn(argv, env={"PATH": _PATH}, pass_fds=(fd,))
    try:
        return await process.wait()
    finally:
        await process.stop(1)
        process.close()
