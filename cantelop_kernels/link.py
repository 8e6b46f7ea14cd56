"""The daemon's end of the line to an attendant.

Layer 4. A SOCK_SEQPACKET pair: one JSON object a packet, so nothing has to be framed and nothing
can be longer than the receive buffer. What an attendant passes on from a guest keeps the schema of
`wire.FROM_GUEST`; it is checked again here, since the attendant is the one that talks to the guest.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from cantelop_kernels import wire
from cantelop_kernels.errors import DeadlineExceeded, SandboxGone
from cantelop_kernels.schema import Logs

MAX_PACKET = 128 * 1024
LOG_TAIL = 5000
"""Characters of each log that an attendant keeps; three of them fit one packet."""

_REQUEST_DEADLINE = 10.0

TO_ATTENDANT: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    **wire.TO_GUEST,  # passed on; `start` brings the five listening sockets along
    "logs_request": {"id": (int,)},
}
FROM_ATTENDANT: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    **wire.FROM_GUEST,
    "logs": {"id": (int,), "console": (str,), "kernel": (str,), "vmm": (str,)},
    "lost": {"reason": (str,)},  # the guest is gone, or broke the rules of its channel
}


def encode(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode()


def decode(packet: bytes, schemas: Mapping[str, Mapping[str, tuple[type, ...]]]) -> dict[str, Any]:
    """Raises wire.WireError."""
    try:
        message = json.loads(packet)
    except (ValueError, RecursionError) as error:
        raise wire.WireError("a packet that is not JSON") from error
    return wire.check(message, schemas)


class Link:
    """Owns `sock`. `hello`, `ready` and `exited` are what the guest says, each at most once.

    When the guest or the attendant is lost they fail with SandboxGone instead.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._ids = count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.hello: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self.ready: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self.exited: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._loop.add_reader(sock.fileno(), self._readable)

    async def request(self, type_: str, fds: Sequence[int] = (), **fields: Any) -> dict[str, Any]:
        """Ask and await the answer. Raises SandboxGone (also where the guest refuses) and
        DeadlineExceeded."""
        number = next(self._ids)
        answer: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._answers[number] = answer
        try:
            self._send({"type": type_, "id": number, **fields}, fds)
            async with asyncio.timeout(_REQUEST_DEADLINE):
                message = await answer
        except TimeoutError:
            raise DeadlineExceeded(f"the sandbox did not answer {type_!r} in time") from None
        finally:
            del self._answers[number]
        if message["type"] == "failed":
            raise SandboxGone(f"the guest refused {type_!r}: {message['reason']}")
        return message

    async def logs(self) -> Logs:
        """The last lines of console, kernel and VMM, already made printable."""
        message = await self.request("logs_request")
        return Logs(message["console"], message["kernel"], message["vmm"])

    def close(self) -> None:
        """Idempotent; whoever still waits gets SandboxGone."""
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()
        self._lost("the sandbox was ended")

    def _send(self, message: dict[str, Any], fds: Sequence[int]) -> None:
        try:
            socket.send_fds(self._sock, [encode(message)], fds)
        except OSError as error:
            raise SandboxGone(f"the sandbox's attendant is gone: {error}") from error

    def _readable(self) -> None:
        try:
            packet = self._sock.recv(MAX_PACKET)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            self._loop.remove_reader(self._sock.fileno())
            self._lost("its attendant ended")
            return
        try:
            self._take(decode(packet, FROM_ATTENDANT))
        except wire.WireError as error:
            self._lost(f"its attendant sent {error}")

    def _take(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "lost":
            self._lost(message["reason"])
        elif "id" in message:
            answer = self._answers.get(message["id"])
            if answer is not None and not answer.done():
                answer.set_result(message)
        else:
            event: asyncio.Future[dict[str, Any]] = getattr(self, kind)
            if not event.done():
                event.set_result(message)

    def _lost(self, reason: str) -> None:
        gone = SandboxGone(f"the sandbox is gone: {reason}")
        for future in (self.hello, self.ready, self.exited, *self._answers.values()):
            if not future.done():
                future.set_exception(gone)
                future.exception()  # nobody has to wait for it
