"""What a sandbox says besides its messages: console, kernel output, VMM, as bounded tails.

Layer 4, a part of the attendant.
"""

from __future__ import annotations

import asyncio
import os
import socket

from cantelop_kernels import link
from cantelop_kernels.tail import Tail


class Logbook:
    """The three logs, each a bounded tail: guest console, kernel process, VMM and helper."""

    def __init__(self, console: int, vmm: int, kernel: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._tails = {console: Tail(link.LOG_TAIL), vmm: Tail(link.LOG_TAIL)}
        self._console, self._vmm = console, vmm
        self._kernel = Tail(link.LOG_TAIL)
        for fd in self._tails:
            os.set_blocking(fd, False)
            self._loop.add_reader(fd, self._read, fd)
        kernel.setblocking(False)
        self._loop.add_reader(kernel.fileno(), self._accept, kernel)

    def texts(self) -> dict[str, str]:
        """What is there now, with what still lies in the pipes."""
        for fd in self._tails:
            while self._read(fd):
                pass
        return {
            "console": self._tails[self._console].text(),
            "kernel": self._kernel.text(),
            "vmm": self._tails[self._vmm].text(),
        }

    def _read(self, fd: int) -> bool:
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(fd)
        self._tails[fd].feed(data)
        return bool(data)

    def _accept(self, listener: socket.socket) -> None:
        """The guest has one log connection at a time; a further one waits in the backlog."""
        connection, _ = listener.accept()
        connection.setblocking(False)
        self._loop.remove_reader(listener.fileno())
        self._loop.add_reader(connection.fileno(), self._read_kernel, connection, listener)

    def _read_kernel(self, connection: socket.socket, listener: socket.socket) -> None:
        try:
            data = connection.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._kernel.feed(data)
            return
        self._loop.remove_reader(connection.fileno())
        connection.close()
        self._loop.add_reader(listener.fileno(), self._accept, listener)
