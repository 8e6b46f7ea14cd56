"""How the guest reaches the host and is reached: vsock. The one seam that tests replace."""

from __future__ import annotations

import socket
import time

from cantelop_kernels import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    from .loop import Loop

    Accepted = Callable[[socket.socket], None]

    class Listener(Protocol):
        def close(self) -> None: ...

    class Transport(Protocol):
        """Both methods hand out connected, non-blocking stream sockets."""

        def dial_host(self, port: int) -> socket.socket: ...
        def listen(self, port: int, accepted: Accepted) -> Listener: ...


BACKLOG = 64

DIAL_DELAYS = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Seconds between tries to reach the host; a storm of them would wedge the vsock device."""


def dial_patiently(transport: Transport, port: int) -> socket.socket:
    """`dial_host`, tried again a few times. Blocks; for the start of the agent only."""
    for delay in DIAL_DELAYS:
        try:
            return transport.dial_host(port)
        except OSError:
            time.sleep(delay)
    return transport.dial_host(port)


class VsockTransport:
    """AF_VSOCK. `dial_host` raises OSError where nobody listens on the host."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def dial_host(self, port: int) -> socket.socket:
        sock = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
        try:
            sock.settimeout(5)
            sock.connect((wire.HOST_CID, port))
        except OSError:
            sock.close()
            raise
        sock.setblocking(False)
        return sock

    def listen(self, port: int, accepted: Accepted) -> SocketListener:
        sock = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
        sock.bind((socket.VMADDR_CID_ANY, port))
        return SocketListener(self._loop, sock, accepted)


class SocketListener:
    """Owns `sock` (bound, not yet listening); calls `accepted` for each connection."""

    def __init__(self, loop: Loop, sock: socket.socket, accepted: Accepted) -> None:
        self._loop = loop
        self._sock = sock
        self._accepted = accepted
        sock.setblocking(False)
        sock.listen(BACKLOG)
        loop.add_reader(sock.fileno(), self._readable)

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()

    def _readable(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        sock.setblocking(False)
        self._accepted(sock)
