"""The kernel's five sockets, offered to the host: one relay per connection of a client."""

from __future__ import annotations

from cantelop_kernels import wire
from cantelop_kernels.relay import Relay

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from socket import socket

    from .loop import Loop
    from .transport import Listener, Transport

MAX_RELAYS = 256
TO_KERNEL = 256 * 1024
"""Bytes per send() towards the kernel: an ordinary Unix socket, so no vsock limit applies."""


def connect_unix(path: str) -> socket:
    """A connected, non-blocking socket. Raises OSError where nobody listens."""
    import socket

    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.connect(path)
    except OSError:
        sock.close()
        raise
    return sock


class RelayHub:
    """Opens the listeners once the kernel answers, and closes everything when it is gone."""

    def __init__(self, loop: Loop, transport: Transport, endpoints: dict[str, str]) -> None:
        self._loop = loop
        self._transport = transport
        self._endpoints = endpoints
        self._listeners: list[Listener] = []
        self._relays: set[Relay] = set()
        self._finished: Callable[[], None] | None = None

    def open(self) -> None:
        """Listen on every channel's port. Before this the host's dials are refused."""
        for channel, port in wire.CHANNEL_PORTS.items():
            self._listeners.append(self._transport.listen(port, self._joiner(channel)))

    def finish(self, within: float, done: Callable[[], None]) -> None:
        """The kernel has ended: let what it sent last pass, then call `done`, once.

        A dead kernel's sockets end by themselves, unless a forked child holds them: hence `within`,
        in seconds.
        """
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        self._finished = done
        self._loop.call_later(within, self._close)
        self._check_finished()

    def _close(self) -> None:
        for relay in list(self._relays):
            relay.close()
        self._check_finished()

    def _forget(self, relay: Relay) -> None:
        self._relays.discard(relay)
        self._check_finished()

    def _check_finished(self) -> None:
        if self._finished is not None and not self._relays:
            done, self._finished = self._finished, None
            done()

    def _joiner(self, channel: str) -> Callable[[socket], None]:
        return lambda sock: self._join(sock, self._endpoints[channel])

    def _join(self, sock: socket, path: str) -> None:
        if len(self._relays) >= MAX_RELAYS:
            sock.close()
            return
        try:
            kernel = connect_unix(path)
        except OSError:  # the kernel is on its way out; `exited` says so
            sock.close()
            return
        relay = Relay(
            self._loop,
            kernel,
            sock,
            to_left=TO_KERNEL,
            to_right=wire.MAX_GUEST_WRITE,
            on_close=self._forget,
        )
        self._relays.add(relay)
