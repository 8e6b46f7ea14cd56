"""The last lines of a stream that nobody trusts: bounded, and safe to print.

Layer 0. Consoles and kernel output are written by guests; escape sequences in them could drive the
terminal of whoever reads the log.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with everything but printable characters, newlines and tabs taken out."""
    kept = text.replace("\r\n", "\n").replace("\r", "\n")
    return "".join(c for c in kept if c in "\n\t" or c.isprintable())


class Tail:
    """Keeps the last `limit` characters of what is fed, and no more bytes than that needs."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._data = b""

    def feed(self, data: bytes) -> None:
        self._data = (self._data + data)[-4 * self._limit :]

    def text(self) -> str:
        return printable(self._data.decode(errors="replace"))[-self._limit :]
