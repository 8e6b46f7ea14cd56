"""The five channels of a session: clients' ipc sockets on one side, the guest's ports on the other.

Layer 4, a part of the attendant. Bytes pass unchanged; nothing here knows ZMQ.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from cantelop_kernels import vsock, wire
from cantelop_kernels.relay import Relay

MAX_RELAYS = 256
CHUNK = 64 * 1024
_DIAL_DEADLINE = 10.0


class Channels:
    """The clients' side of the five channels, and the relays behind it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._listeners: list[socket.socket] = []
        self._relays: set[Relay] = set()
        self._finished: Callable[[], None] | None = None
        self._dials: set[asyncio.Task[None]] = set()
        self._ended_traffic = (0, 0)

    def traffic(self) -> tuple[int, int]:
        """Bytes so far: to the clients, to the kernel."""
        counts = [self._ended_traffic, *(relay.passed for relay in self._relays)]
        return sum(left for left, _ in counts), sum(right for _, right in counts)

    def give(self, listeners: list[socket.socket]) -> None:
        """Take the five listening sockets, in the order of `wire.CHANNELS`; not served yet."""
        self._listeners = listeners

    def open(self) -> None:
        """Serve the clients: the guest listens now (before that, a dial would be in vain)."""
        for port, listener in zip(wire.CHANNEL_PORTS.values(), self._listeners, strict=True):
            listener.setblocking(False)
            self._loop.add_reader(listener.fileno(), self._accept, listener, port)

    def finish(self, seconds: float, finished: Callable[[], None]) -> None:
        """The kernel has ended: let clients read its last bytes, but no longer than `seconds`.

        `finished` is called once, when no connection is left.
        """
        self._stop_accepting()
        self._finished = finished
        self._loop.call_later(seconds, self.close)
        self._look_if_finished()

    def close(self) -> None:
        """End every connection at once, so that no client waits on a kernel that is gone."""
        self._stop_accepting()
        for relay in list(self._relays):
            relay.close()
        self._look_if_finished()

    def _stop_accepting(self) -> None:
        for listener in self._listeners:
            self._loop.remove_reader(listener.fileno())
            listener.close()
        self._listeners = []
        for dial in self._dials:
            dial.cancel()

    def _relay_closed(self, relay: Relay) -> None:
        if relay in self._relays:
            self._relays.discard(relay)
            left, right = self._ended_traffic
            self._ended_traffic = (left + relay.passed[0], right + relay.passed[1])
        self._look_if_finished()

    def _look_if_finished(self) -> None:
        if self._finished is not None and not self._relays:
            finished, self._finished = self._finished, None
            finished()

    def _accept(self, listener: socket.socket, port: int) -> None:
        try:
            client, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        if len(self._relays) + len(self._dials) >= MAX_RELAYS:
            client.close()
            return
        client.setblocking(False)
        dial = asyncio.ensure_future(self._join(client, port))
        self._dials.add(dial)
        dial.add_done_callback(self._dials.discard)

    async def _join(self, client: socket.socket, port: int) -> None:
        """A guest that does not answer costs its client the connection, after a while."""
        try:
            async with asyncio.timeout(_DIAL_DEADLINE):
                guest, early = await vsock.dial(vsock.SOCKET, port)
            client.sendall(early)  # at most a few KiB, into an empty buffer
        except (OSError, TimeoutError):
            client.close()
            return
        except asyncio.CancelledError:
            client.close()
            raise
        self._relays.add(
            Relay(
                self._loop,
                client,
                guest,
                to_left=CHUNK,
                to_right=CHUNK,
                on_close=self._relay_closed,
            )
        )
