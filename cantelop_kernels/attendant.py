"""The unprivileged process beside every sandbox: it alone talks to the guest.

Layer 4, a program of its own (`python -m cantelop_kernels.attendant`), started by `sandbox` as root
with its descriptors open. It gives up all rights before it reads the first byte, and then

- passes the daemon's requests to the guest's agent, and the agent's answers back: checked against
  the schema, shortened and made printable on the way;
- relays the five channels: client's ipc socket, vsock, guest;
- keeps the last lines of console, kernel output and VMM messages.

It ends when the daemon's end of the control line closes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

from cantelop_kernels import jail, link, vsock, wire
from cantelop_kernels.relay import Relay
from cantelop_kernels.tail import Tail, printable

MAX_RELAYS = 256
CHUNK = 256 * 1024
_MAX_TEXT = 300
_LAST_BYTES = 1.5
_DIAL_DEADLINE = 10.0
_MAX_INT = 1 << 62


def main() -> None:
    """Entry point; the arguments are file descriptors and ids that `sandbox` opened and chose."""
    parser = argparse.ArgumentParser()
    for name in ("control", "guest", "log", "console", "vmm-log", "uid", "gid"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    jail.drop_privileges(args.uid, args.gid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_serve(args))


async def _serve(args: argparse.Namespace) -> None:
    logs = Logbook(args.console, args.vmm_log, socket.socket(fileno=args.log))
    channels = Channels()
    attendant = Attendant(
        socket.socket(fileno=args.control), socket.socket(fileno=args.guest), channels, logs
    )
    await attendant.over.wait()


class Logbook:
    """The three logs, each a bounded tail: guest console, kernel process, VMM and helper."""

    def __init__(self, console: int, vmm: int, kernel: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._tails = {console: Tail(link.LOG_TAIL), vmm: Tail(link.LOG_TAIL)}
        self._console, self._vmm = console, vmm
        self._kernel = Tail(link.LOG_TAIL)
        for fd in self._tails:
            os.set_blocking(fd, False)
            self._loop.add_reader(fd, self._read, fd)
        kernel.setblocking(False)
        self._loop.add_reader(kernel.fileno(), self._accept, kernel)

    def texts(self) -> dict[str, str]:
        """What is there now, with what still lies in the pipes."""
        for fd in self._tails:
            while self._read(fd):
                pass
        return {
            "console": self._tails[self._console].text(),
            "kernel": self._kernel.text(),
            "vmm": self._tails[self._vmm].text(),
        }

    def _read(self, fd: int) -> bool:
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(fd)
        self._tails[fd].feed(data)
        return bool(data)

    def _accept(self, listener: socket.socket) -> None:
        """The guest has one log connection at a time; a further one waits in the backlog."""
        connection, _ = listener.accept()
        connection.setblocking(False)
        self._loop.remove_reader(listener.fileno())
        self._loop.add_reader(connection.fileno(), self._read_kernel, connection, listener)

    def _read_kernel(self, connection: socket.socket, listener: socket.socket) -> None:
        try:
            data = connection.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._kernel.feed(data)
            return
        self._loop.remove_reader(connection.fileno())
        connection.close()
        self._loop.add_reader(listener.fileno(), self._accept, listener)


class Channels:
    """The clients' side of the five channels, and the relays behind it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._listeners: list[socket.socket] = []
        self._relays: set[Relay] = set()
        self._finished: Callable[[], None] | None = None
        self._dials: set[asyncio.Task[None]] = set()

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
        self._relays.discard(relay)
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


class Attendant:
    """Joins the daemon's control line and the guest's. `over` is set when the daemon is gone."""

    def __init__(
        self,
        control: socket.socket,
        guest_listener: socket.socket,
        channels: Channels,
        logs: Logbook,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._control = control
        self._channels = channels
        self._logs = logs
        self._guest: socket.socket | None = None
        self._lost = ""
        self._decoder = wire.Decoder(wire.FROM_GUEST)
        self._asked: set[int] = set()
        self._said: set[str] = set()
        self._unsent: list[bytes] = []
        self.over = asyncio.Event()
        control.setblocking(False)
        guest_listener.setblocking(False)
        self._loop.add_reader(control.fileno(), self._from_daemon)
        self._loop.add_reader(guest_listener.fileno(), self._accept_guest, guest_listener)

    def _accept_guest(self, listener: socket.socket) -> None:
        """The agent dials once in its life; nobody else in the guest may take its place."""
        self._guest, _ = listener.accept()
        self._loop.remove_reader(listener.fileno())
        listener.close()
        self._guest.setblocking(False)
        self._loop.add_reader(self._guest.fileno(), self._from_guest)

    def _from_daemon(self) -> None:
        try:
            packet, fds, _, _ = socket.recv_fds(self._control, link.MAX_PACKET, 5)
        except BlockingIOError:
            return
        except OSError:
            packet, fds = b"", []
        if not packet:
            self._channels.close()
            self.over.set()
            return
        message = link.decode(packet, link.TO_ATTENDANT)
        if message["type"] == "logs_request":
            self._tell({"type": "logs", "id": message["id"], **self._logs.texts()})
            return
        if message["type"] == "start":
            self._channels.give([socket.socket(fileno=fd) for fd in fds])
        self._pass_on(message)

    def _pass_on(self, message: dict[str, Any]) -> None:
        """To the guest. Its line takes 64 KiB at once or is stuck; either way nothing is kept."""
        self._asked.add(message["id"])
        try:
            frame = wire.encode(message)
            if self._guest is None or self._guest.send(frame) != len(frame):
                raise OSError(self._lost or "the guest's control line is stuck")
        except (OSError, wire.WireError) as error:
            self._asked.discard(message["id"])
            self._tell({"type": "failed", "id": message["id"], "reason": printable(str(error))})

    def _from_guest(self) -> None:
        assert self._guest is not None
        try:
            data = self._guest.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            if not data:
                raise wire.WireError("the guest closed its control line")
            for message in self._decoder.feed(data):
                self._take(message)
        except wire.WireError as error:
            self._lose_guest(str(error))

    def _take(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if "id" in message:
            if message["id"] not in self._asked:
                raise wire.WireError("an answer that nobody asked for")
            self._asked.discard(message["id"])
        elif kind in self._said:
            raise wire.WireError(f"{kind!r} for the second time")
        self._said.add(kind)
        modest = {key: _modest(value) for key, value in message.items()}
        if kind == "exited":
            self._channels.finish(_LAST_BYTES, lambda: self._tell(modest))
            return
        if kind == "ready":
            self._channels.open()
        self._tell(modest)

    def _lose_guest(self, reason: str) -> None:
        assert self._guest is not None
        self._loop.remove_reader(self._guest.fileno())
        self._guest.close()
        self._guest = None
        self._lost = reason
        self._channels.close()
        self._tell({"type": "lost", "reason": printable(reason)})

    def _tell(self, message: dict[str, Any]) -> None:
        """To the daemon; what it cannot take now waits (few: only what was asked for is passed)."""
        self._unsent.append(link.encode(message))
        self._flush()

    def _flush(self) -> None:
        while self._unsent:
            try:
                self._control.send(self._unsent[0])
            except BlockingIOError:
                self._loop.add_writer(self._control.fileno(), self._flush)
                return
            except OSError:
                self.over.set()
                return
            del self._unsent[0]
        self._loop.remove_writer(self._control.fileno())


def _modest(value: object) -> object:
    """A value from the guest, short and printable."""
    if isinstance(value, str):
        return printable(value)[:_MAX_TEXT]
    if isinstance(value, int) and not isinstance(value, bool):
        return max(-_MAX_INT, min(_MAX_INT, value))
    return value


if __name__ == "__main__":
    main()
