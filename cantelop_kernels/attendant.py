"""The unprivileged process beside every sandbox: it alone talks to the guest.

Layer 4, a program of its own (`python -m cantelop_kernels.attendant`), started by `sandbox` as root
with its descriptors open. It gives up all rights before it reads the first byte, and then

- passes the daemon's requests to the guest's agent, and the agent's answers back: checked against
  the schema, shortened and made printable on the way;
- relays the five channels: client's ipc socket, vsock, guest;
- keeps the last lines of console, kernel output and VMM messages.

It listens for the daemon, and serves on without one once its session is bound: the next daemon
takes the line up again. It ends when the daemon leaves an unbound sandbox, and, with nobody to
tell, some time after its client has ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import socket
from typing import Any

from cantelop_kernels import confine, link, wire
from cantelop_kernels.caller import DaemonLine, Lease
from cantelop_kernels.channels import Channels
from cantelop_kernels.logbook import Logbook
from cantelop_kernels.tail import printable

_MAX_TEXT = 300
_LAST_BYTES = 1.5
_MAX_INT = 1 << 62
ORPHANED = 60.0
"""Seconds without a daemon after which a session whose client has ended is given up."""


def main() -> None:
    """Entry point; the arguments are descriptors that `sandbox` opened, and rights it chose."""
    parser = argparse.ArgumentParser()
    for name in ("daemon", "guest", "log", "console", "vmm-log"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--confinement", type=json.loads, required=True)
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    confine.enter(args.confinement)
    asyncio.run(_serve(args))


async def _serve(args: argparse.Namespace) -> None:
    logs = Logbook(args.console, args.vmm_log, socket.socket(fileno=args.log))
    channels = Channels()
    attendant = Attendant(
        socket.socket(fileno=args.daemon), socket.socket(fileno=args.guest), channels, logs
    )
    await attendant.over.wait()


class Attendant:
    """Joins the daemon's line and the guest's. `over` is set when there is nothing left to do."""

    def __init__(
        self,
        daemon_listener: socket.socket,
        guest_listener: socket.socket,
        channels: Channels,
        logs: Logbook,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._daemon = DaemonLine(daemon_listener, self._from_daemon, self._without_daemon)
        self._lease = Lease(self._without_daemon)
        self._channels = channels
        self._logs = logs
        self._guest: socket.socket | None = None
        self._lost = ""
        self._bound = False
        self._decoder = wire.Decoder(wire.FROM_GUEST)
        self._asked: dict[int, str] = {}
        self._said: set[str] = set()
        self.over = asyncio.Event()
        guest_listener.setblocking(False)
        self._loop.add_reader(guest_listener.fileno(), self._accept_guest, guest_listener)

    def _accept_guest(self, listener: socket.socket) -> None:
        """The agent dials once in its life; nobody else in the guest may take its place."""
        self._guest, _ = listener.accept()
        self._loop.remove_reader(listener.fileno())
        listener.close()
        self._guest.setblocking(False)
        self._loop.add_reader(self._guest.fileno(), self._from_guest)

    def _without_daemon(self) -> None:
        """The daemon has gone, or the client has: go on, unless that serves nobody."""
        if self._daemon.connected:
            return
        if not self._bound:
            self._give_up()
        elif self._lease.over:
            self._loop.call_later(ORPHANED, self._give_up_if_orphaned)

    def _give_up_if_orphaned(self) -> None:
        if not self._daemon.connected and self._lease.over:
            self._give_up()

    def _give_up(self) -> None:
        """The guest powers off when it loses its control line."""
        self._channels.close()
        self.over.set()

    def _from_daemon(self, packet: bytes, fds: list[int]) -> None:
        message = link.decode(packet, link.TO_ATTENDANT)
        match message["type"]:
            case "logs_request":
                self._daemon.tell({"type": "logs", "id": message["id"], **self._logs.texts()})
            case "traffic_request":
                to_client, to_kernel = self._channels.traffic()
                sums = {"to_client": to_client, "to_kernel": to_kernel}
                self._daemon.tell({"type": "traffic", "id": message["id"], **sums})
            case "lease":
                self._lease.renew(fds[0])
                self._daemon.tell({"type": "done", "id": message["id"]})
            case "bind":
                *listeners, lease = fds
                self._bound = True
                self._channels.give([socket.socket(fileno=fd) for fd in listeners])
                self._lease.renew(lease)
                self._pass_on(message)
            case _:
                self._pass_on(message)

    def _pass_on(self, message: dict[str, Any]) -> None:
        """To the guest. Its line takes 64 KiB at once or is stuck; either way nothing is kept."""
        self._asked[message["id"]] = wire.ANSWERS.get(message["type"], "done")
        try:
            frame = wire.encode(message)
            if self._guest is None or self._guest.send(frame) != len(frame):
                raise OSError(self._lost or "the guest's control line is stuck")
        except (OSError, wire.WireError) as error:
            self._asked.pop(message["id"], None)
            self._daemon.tell(
                {"type": "failed", "id": message["id"], "reason": printable(str(error))}
            )

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
                raise wire.WireError(link.GUEST_CLOSED)
            for message in self._decoder.feed(data):
                self._take(message)
        except wire.WireError as error:
            self._lose_guest(str(error))

    def _take(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if "id" in message:
            wanted = self._asked.pop(message["id"], None)
            if wanted is None or kind not in (wanted, "failed"):
                raise wire.WireError("an answer that nobody asked for")
        elif kind in self._said:
            raise wire.WireError(f"{kind!r} for the second time")
        self._said.add(kind)
        modest = {key: _modest(value) for key, value in message.items()}
        if kind == "exited":
            self._channels.finish(_LAST_BYTES, lambda: self._daemon.tell(modest, keep=True))
            return
        if kind == "ready":
            self._channels.open()
        self._daemon.tell(modest, keep=kind == "hello")

    def _lose_guest(self, reason: str) -> None:
        assert self._guest is not None
        self._loop.remove_reader(self._guest.fileno())
        self._guest.close()
        self._guest = None
        self._lost = reason
        self._channels.close()
        self._daemon.tell({"type": "lost", "reason": printable(reason)}, keep=True)


def _modest(value: object) -> object:
    """A value from the guest, short and printable."""
    if isinstance(value, str):
        return printable(value)[:_MAX_TEXT]
    if isinstance(value, int) and not isinstance(value, bool):
        return max(-_MAX_INT, min(_MAX_INT, value))
    return value


if __name__ == "__main__":
    main()
