"""The daemon's end of the line to an attendant.

Layer 4. A SOCK_SEQPACKET connection: one JSON object a packet, so nothing has to be framed and
nothing can be longer than the receive buffer. The attendant listens, in a folder that only root can
change, so that a daemon that comes after this one can take the line up again. What an attendant
passes on from a guest keeps the schema of `wire.FROM_GUEST`; it is checked again here, since the
attendant is the one that talks to the guest.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from cantelop_kernels import vsock, wire
from cantelop_kernels.errors import DeadlineExceeded, SandboxGone
from cantelop_kernels.schema import Logs

MAX_PACKET = 128 * 1024
LOG_TAIL = 5000
"""Characters of each log that an attendant keeps; three of them fit one packet."""

GUEST_CLOSED = "the guest closed its control line"
"""What an attendant says of a guest that is gone; any other reason is a rule that it broke."""

_REQUEST_DEADLINE = 10.0

SOCKET = "attendant.sock"
"""Name of the attendant's listening socket in the sandbox's folder."""

TO_ATTENDANT: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    **wire.TO_GUEST,  # passed on; `bind` brings the five listening sockets and a lease along
    "logs_request": {"id": (int,)},
    "traffic_request": {"id": (int,)},
    "lease": {"id": (int,)},  # brings a pidfd along: of the client's process, from now on
}
FROM_ATTENDANT: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    **wire.FROM_GUEST,
    "logs": {"id": (int,), "console": (str,), "kernel": (str,), "vmm": (str,)},
    # bytes of the five channels so far
    "traffic": {"id": (int,), "to_client": (int,), "to_kernel": (int,)},
    "lost": {"reason": (str,)},  # the guest is gone, or broke the rules of its channel
}


_ANSWERS = {**wire.ANSWERS, "logs_request": "logs", "traffic_request": "traffic"}


def encode(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode()


def decode(packet: bytes, schemas: Mapping[str, Mapping[str, tuple[type, ...]]]) -> dict[str, Any]:
    """Raises wire.WireError."""
    try:
        message = json.loads(packet)
    except (ValueError, RecursionError) as error:
        raise wire.WireError("a packet that is not JSON") from error
    return wire.check(message, schemas)


def listen(folder: Path) -> socket.socket:
    """The attendant's socket in `folder`, which only root can change or enter by right."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        vsock.bind(listener, folder, SOCKET)
        (folder / SOCKET).chmod(0o600)
        listener.listen(4)
    except BaseException:
        listener.close()
        raise
    return listener


def connect(folder: Path) -> Link:
    """A line to the attendant that listens in `folder`. Raises SandboxGone where none does."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        vsock.connect(sock, folder, SOCKET)
    except OSError as error:
        sock.close()
        raise SandboxGone(f"its attendant does not listen: {error.strerror}") from error
    return Link(sock)


class Link:
    """Owns `sock`. The futures are what the guest says, each at most once.

    When the guest or the attendant is lost they fail with SandboxGone instead.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._ids = count(secrets.randbits(48))  # an answer to an earlier daemon is none to us
        self._answers: dict[int, tuple[str, asyncio.Future[dict[str, Any]]]] = {}
        self._late: set[int] = set()
        self.broken = ""
        """The rule of its channel that the guest broke; its attendant then hung up on it."""
        self.hello: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self.warm: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self.ready: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self.exited: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._loop.add_reader(sock.fileno(), self._readable)

    async def request(
        self,
        type_: str,
        fds: Sequence[int] = (),
        *,
        deadline: float = _REQUEST_DEADLINE,
        **fields: Any,
    ) -> dict[str, Any]:
        """Ask and await the answer. Raises SandboxGone (also where the guest refuses) and
        DeadlineExceeded."""
        number = next(self._ids)
        answer: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._answers[number] = (_ANSWERS.get(type_, "done"), answer)
        try:
            self._send({"type": type_, "id": number, **fields}, fds)
            async with asyncio.timeout(deadline):
                message = await answer
        except TimeoutError:
            self._late.add(number)
            raise DeadlineExceeded(f"the sandbox did not answer {type_!r} in time") from None
        except asyncio.CancelledError:
            self._late.add(number)
            raise
        finally:
            del self._answers[number]
        if message["type"] == "failed":
            raise SandboxGone(f"the guest refused {type_!r}: {message['reason']}")
        return message

    async def logs(self) -> Logs:
        """The last lines of console, kernel and VMM, already made printable."""
        message = await self.request("logs_request")
        return Logs(message["console"], message["kernel"], message["vmm"])

    async def traffic(self) -> tuple[int, int]:
        """Bytes of the channels so far: to the client, to the kernel."""
        message = await self.request("traffic_request")
        return message["to_client"], message["to_kernel"]

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
            self._loop.remove_reader(self._sock.fileno())
            self._lost(f"its attendant sent {error}")

    def _take(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "lost":
            if message["reason"] != GUEST_CLOSED:
                self.broken = message["reason"]
            self._lost(message["reason"])
        elif "id" in message:
            self._answer(message)
        else:
            event: asyncio.Future[dict[str, Any]] = getattr(self, kind)
            if not event.done():
                event.set_result(message)

    def _answer(self, message: dict[str, Any]) -> None:
        """Raises WireError for one that was not asked for, or is of another kind."""
        number, kind = message["id"], message["type"]
        if number in self._late:
            self._late.discard(number)
            return
        wanted, answer = self._answers.get(number, ("", None))
        if answer is None or kind not in (wanted, "failed"):
            raise wire.WireError(f"{kind!r}, which nobody asked for")
        if not answer.done():
            answer.set_result(message)

    def _lost(self, reason: str) -> None:
        answers = [answer for _, answer in self._answers.values()]
        gone = SandboxGone(f"the sandbox is gone: {reason}")
        for future in (self.hello, self.warm, self.ready, self.exited, *answers):
            if not future.done():
                future.set_exception(gone)
                future.exception()  # nobody has to wait for it
