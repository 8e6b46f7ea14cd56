"""The agent's end of the control channel: whole messages in, whole messages out."""

from __future__ import annotations

from cantelop_kernels import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from socket import socket
    from typing import Any

    from .loop import Loop


class Control:
    """Owns `sock` (connected, non-blocking). `on_lost` is called once, with the reason."""

    def __init__(
        self,
        loop: Loop,
        sock: socket,
        on_message: Callable[[dict[str, Any]], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._on_message = on_message
        self._on_lost = on_lost
        self._decoder = wire.Decoder(wire.TO_GUEST)
        self._unsent = bytearray()
        self._lost = False
        loop.add_reader(sock.fileno(), self._readable)

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue one message; it leaves at once where the host is reading."""
        if self._lost:
            return
        self._unsent += wire.encode(wire.check(message, wire.FROM_GUEST))
        self._writable()

    def _readable(self) -> None:
        try:
            data = self._sock.recv(wire.MAX_GUEST_WRITE)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._lose(str(error))
            return
        if not data:
            self._lose("the host closed the control channel")
            return
        try:
            for message in self._decoder.feed(data):
                self._on_message(message)
        except wire.WireError as error:
            self._lose(str(error))

    def _writable(self) -> None:
        while self._unsent:
            try:
                sent = self._sock.send(self._unsent[: wire.MAX_GUEST_WRITE])
            except (BlockingIOError, InterruptedError):
                self._loop.add_writer(self._sock.fileno(), self._writable)
                return
            except OSError as error:
                self._lose(str(error))
                return
            del self._unsent[:sent]
        self._loop.remove_writer(self._sock.fileno())

    def _lose(self, reason: str) -> None:
        if self._lost:
            return
        self._lost = True
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        self._on_lost(reason)
