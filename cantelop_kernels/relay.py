"""Two sockets joined: what arrives on one leaves on the other, unchanged and bounded.

Layer 0, shared with the guest: standard library only. The attendant runs it in front of the vsock,
the guest's agent behind it. Nothing here knows ZMQ; a message may be of any size, since no more
than one chunk per direction is ever held: the sender is slowed down instead.

Both event loops (asyncio's on the host, the agent's small one in the guest) offer the four
methods of `Loop`.
"""

from __future__ import annotations

BURST = 16
"""Chunks that one direction may pass before the others have their turn."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from socket import socket
    from typing import Any, Protocol

    class Loop(Protocol):
        """The part of asyncio's event loop that a relay needs."""

        def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> Any: ...
        def remove_reader(self, fd: Any) -> bool: ...
        def add_writer(self, fd: Any, callback: Callable[..., Any], *args: Any) -> Any: ...
        def remove_writer(self, fd: Any) -> bool: ...


class Relay:
    """Joins `left` and `right` (both non-blocking, owned from here on) until either side ends.

    A side that ends, or fails, ends the other at once: a ZMQ peer has no use for half a
    connection, and a half-open one makes a client hang (JUPYTER.md, trap 6). `on_close` is called
    once, after both are closed. `to_left` and `to_right` cap one send() in that direction.
    """

    def __init__(
        self,
        loop: Loop,
        left: socket,
        right: socket,
        *,
        to_left: int,
        to_right: int,
        on_close: Callable[[Relay], None],
    ) -> None:
        self._loop = loop
        self._on_close = on_close
        self._sockets = (left, right)
        self._closed = False
        self._pumps = (_Pump(self, left, right, to_right), _Pump(self, right, left, to_left))
        for pump in self._pumps:
            pump.resume()

    @property
    def passed(self) -> tuple[int, int]:
        """Bytes so far: to the left, to the right."""
        to_right, to_left = self._pumps
        return to_left.passed, to_right.passed

    def close(self) -> None:
        """Close both sides; harmless when they are closed already."""
        if self._closed:
            return
        self._closed = True
        for sock in self._sockets:
            self._loop.remove_reader(sock.fileno())
            self._loop.remove_writer(sock.fileno())
            sock.close()
        self._on_close(self)


class _Pump:
    """One direction. Holds at most one chunk; reads no further until it has been sent whole."""

    def __init__(self, relay: Relay, source: socket, sink: socket, chunk: int) -> None:
        self._relay = relay
        self._loop = relay._loop
        self._source = source
        self._sink = sink
        self._chunk = chunk
        self._rest = memoryview(b"")
        self.passed = 0

    def resume(self) -> None:
        self._loop.add_reader(self._source.fileno(), self._readable)

    def _readable(self) -> None:
        """As long as chunks come full there is more, and the loop need not be asked in between."""
        for _ in range(BURST):
            size = self._pass_on()
            if size < self._chunk:
                return

    def _pass_on(self) -> int:
        """Bytes that went from source to sink; 0 where that has to wait, or is over."""
        try:
            data = self._source.recv(self._chunk)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            data = b""
        if not data:  # all that came before has been sent: a pump reads only when it holds nothing
            self._relay.close()
            return 0
        self.passed += len(data)
        rest = self._send(memoryview(data))
        if rest is None:
            self._relay.close()
            return 0
        if rest:
            self._rest = rest
            self._loop.remove_reader(self._source.fileno())
            self._loop.add_writer(self._sink.fileno(), self._writable)
            return 0
        return len(data)

    def _writable(self) -> None:
        rest = self._send(self._rest)
        if rest is None:
            self._relay.close()
            return
        self._rest = rest
        if not rest:
            self._loop.remove_writer(self._sink.fileno())
            self.resume()

    def _send(self, data: memoryview) -> memoryview | None:
        """What could not be sent yet, or None where the sink is gone."""
        try:
            return data[self._sink.send(data) :]
        except (BlockingIOError, InterruptedError):
            return data
        except OSError:
            return None
