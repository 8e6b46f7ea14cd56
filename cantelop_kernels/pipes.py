"""The ends of a command's pipes: collect what it writes, feed what it reads.

Layer 0, used by `process.run` alone. The pipes stay the caller's, except that `feed` closes the
one it fed, since that is how a command learns of the end.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from typing import IO

_CHUNK = 64 * 1024


class Capture:
    """Collects one stream (all of it, or its last `tail` characters) and hands on its lines.

    `on_line` must not raise. A carriage return ends a line too: progress displays use it.
    """

    def __init__(self, on_line: Callable[[str], None] | None, tail: int | None) -> None:
        self._on_line = on_line
        self._tail = tail
        self._data = bytearray()
        self._line = b""

    def feed(self, data: bytes) -> None:
        """Take some more of the stream; no data ends it."""
        self._data += data
        if self._tail is not None:
            del self._data[: -4 * self._tail]
        if self._on_line is not None:
            *lines, self._line = (self._line + data).replace(b"\r", b"\n").split(b"\n")
            for line in lines if data else [self._line]:
                if line.strip():
                    self._on_line(line.decode(errors="replace"))

    def text(self) -> str:
        """What has been collected so far."""
        text = self._data.decode(errors="replace")
        return text if self._tail is None else text[-self._tail :]


async def read(pipe: IO[bytes], capture: Capture) -> None:
    """Read a pipe to its end."""
    loop = asyncio.get_running_loop()
    fd = pipe.fileno()
    os.set_blocking(fd, False)
    ended = loop.create_future()

    def on_readable() -> None:
        try:
            data = os.read(fd, _CHUNK)
        except (BlockingIOError, InterruptedError):
            return
        capture.feed(data)
        if not data and not ended.done():
            loop.remove_reader(fd)
            ended.set_result(None)

    loop.add_reader(fd, on_readable)
    try:
        await ended
    finally:
        loop.remove_reader(fd)


async def feed(pipe: IO[bytes], data: bytes) -> None:
    """Write `data` and close the pipe; a command that does not read it all is no error."""
    loop = asyncio.get_running_loop()
    fd = pipe.fileno()
    os.set_blocking(fd, False)
    writable = asyncio.Event()
    rest = memoryview(data)
    loop.add_writer(fd, writable.set)
    try:
        while rest:
            await writable.wait()
            writable.clear()
            with suppress(BlockingIOError):
                rest = rest[os.write(fd, rest) :]
    except BrokenPipeError:
        return
    finally:
        loop.remove_writer(fd)
        pipe.close()
