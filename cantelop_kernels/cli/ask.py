"""Lines from the person at the terminal, for `input()` and `getpass()` in a sandbox."""

from __future__ import annotations

import asyncio
import os
import termios
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import IO

from cantelop_kernels.cli import terminal

EOF = "\x04"
"""ipykernel raises EOFError for this answer."""


async def ask(fd: int, out: IO[str], prompt: str, *, secret: bool) -> str:
    """Show the prompt; return one line without its newline, or `EOF`. `fd` is a terminal.

    The loop goes on while the person types. Cancellable at any time; a secret is not echoed, and
    the terminal's echo comes back in any case.
    """
    with _no_echo(fd) if secret else nullcontext():
        terminal.write(out, prompt)
        data = await _read(fd)
    if secret:
        terminal.write(out, "\n")
    return data.decode(errors="replace").removesuffix("\n") if data else EOF


async def _read(fd: int) -> bytes:
    loop = asyncio.get_running_loop()
    typed: asyncio.Future[bytes] = loop.create_future()

    def readable() -> None:
        loop.remove_reader(fd)
        if not typed.done():
            typed.set_result(os.read(fd, 65536))

    loop.add_reader(fd, readable)
    try:
        return await typed
    finally:
        loop.remove_reader(fd)


@contextmanager
def _no_echo(fd: int) -> Iterator[None]:
    before = termios.tcgetattr(fd)
    silent = termios.tcgetattr(fd)
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(fd, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
