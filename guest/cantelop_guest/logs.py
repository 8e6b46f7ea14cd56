"""What the kernel process writes to its stdout and stderr, sent to the host as it comes."""

from __future__ import annotations

import os

from cantelop_kernels import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from socket import socket

    from .loop import Loop

MAX_HELD = 256 * 1024
"""Bytes held for a host that is slow or not there yet. What is over is dropped, and counted."""


class LogStream:
    """Never blocks the kernel: the pipe is always drained, whatever the host does."""

    def __init__(self, loop: Loop, source: int, sink: socket) -> None:
        self._loop = loop
        self._source: int | None = source
        self._sink: socket | None = sink
        self._held = bytearray()
        self._dropped = 0
        os.set_blocking(source, False)
        loop.add_reader(source, self._readable)

    def drain(self) -> None:
        """Take over what is in the pipe now; called when the kernel process has ended."""
        while self._read():
            pass
        self._writable()

    def _readable(self) -> None:
        self._read()
        self._writable()

    def _read(self) -> bool:
        """True if there may be more. The pipe's end comes with its last writer, not the kernel."""
        if self._source is None:
            return False
        try:
            data = os.read(self._source, wire.MAX_GUEST_WRITE)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(self._source)
            os.close(self._source)
            self._source = None
            return False
        self._hold(data)
        return True

    def _hold(self, data: bytes) -> None:
        if self._sink is None:
            return
        if len(self._held) + len(data) > MAX_HELD:
            self._dropped += len(data)
            return
        if self._dropped:
            self._held += b"\n[%d bytes of output were dropped here]\n" % self._dropped
            self._dropped = 0
        self._held += data

    def _writable(self) -> None:
        while self._held and self._sink is not None:
            try:
                sent = self._sink.send(self._held[: wire.MAX_GUEST_WRITE])
            except (BlockingIOError, InterruptedError):
                self._loop.add_writer(self._sink.fileno(), self._writable)
                return
            except OSError:
                self._drop_sink()
                return
            del self._held[:sent]
        if self._sink is not None:
            self._loop.remove_writer(self._sink.fileno())

    def _drop_sink(self) -> None:
        """Nobody reads the log any more: go on draining, keep nothing."""
        if self._sink is not None:
            self._loop.remove_writer(self._sink.fileno())
            self._sink.close()
        self._sink = None
        self._held.clear()
