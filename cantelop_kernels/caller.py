"""Whom an attendant serves: the daemon of the day, and the client whose session it is.

Layer 4, a part of the attendant, which says what follows where one of them ends.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

from cantelop_kernels import link

_MAX_FDS = 6
_UCRED = struct.Struct("3i")


class DaemonLine:
    """The connection to the daemon of the day: one at a time, and only root's.

    `on_packet` gets each message with the descriptors it brought (its own to close), `on_gone` the
    end of a connection. What is told while there is no daemon is lost, except `keep`.
    """

    def __init__(
        self,
        listener: socket.socket,
        on_packet: Callable[[bytes, list[int]], None],
        on_gone: Callable[[], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_packet, self._on_gone = on_packet, on_gone
        self._sock: socket.socket | None = None
        self._unsent: list[bytes] = []
        self._kept: list[bytes] = []
        listener.setblocking(False)
        self._loop.add_reader(listener.fileno(), self._accept, listener)

    @property
    def connected(self) -> bool:
        return self._sock is not None

    def tell(self, message: dict[str, Any], *, keep: bool = False) -> None:
        """What it cannot take now waits (few: only what was asked for is passed). With `keep`
        every later daemon is told as well."""
        packet = link.encode(message)
        if keep:
            self._kept.append(packet)
        if self._sock is not None:
            self._unsent.append(packet)
            self._flush()

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        if _UCRED.unpack(raw)[1] != 0:
            sock.close()
            return
        self._drop()
        sock.setblocking(False)
        self._sock = sock
        self._unsent = list(self._kept)
        self._loop.add_reader(sock.fileno(), self._readable, sock)
        self._flush()

    def _readable(self, sock: socket.socket) -> None:
        try:
            packet, fds, _, _ = socket.recv_fds(sock, link.MAX_PACKET, _MAX_FDS)
        except BlockingIOError:
            return
        except OSError:
            packet, fds = b"", []
        if packet:
            self._on_packet(packet, fds)
        else:
            self._drop()
            self._on_gone()

    def _drop(self) -> None:
        if self._sock is not None:
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
            self._sock.close()
            self._sock = None

    def _flush(self) -> None:
        while self._unsent and self._sock is not None:
            try:
                self._sock.send(self._unsent[0])
            except BlockingIOError:
                self._loop.add_writer(self._sock.fileno(), self._flush)
                return
            except OSError:
                return  # its end is about to be read
            del self._unsent[0]
        if self._sock is not None:
            self._loop.remove_writer(self._sock.fileno())


class Lease:
    """The client's process, by its pidfd: `ended` calls once when it has ended."""

    def __init__(self, ended: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = ended
        self._pidfd: int | None = None
        self.over = False

    def renew(self, pidfd: int) -> None:
        """Watch this one instead of an earlier one; owns `pidfd`."""
        self._forget()
        self.over = False
        self._pidfd = pidfd
        self._loop.add_reader(pidfd, self._on_end)

    def _on_end(self) -> None:
        self._forget()
        self.over = True
        self._ended()

    def _forget(self) -> None:
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
