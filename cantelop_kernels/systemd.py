"""What systemd and a service say to each other: readiness, and sockets that are open already.

Layer 1. Both work without systemd as well: without its environment variables nothing happens.
(sd_notify(3), sd_listen_fds(3))
"""

from __future__ import annotations

import os
import socket

_FIRST_FD = 3


def notify(state: str) -> None:
    """Tell the service manager, such as `READY=1`; nothing where there is none."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.sendto(state.encode(), address)


def listening_socket() -> socket.socket | None:
    """The one socket that was handed to this process, ready to accept; None where none was.

    Called once: the variables are taken out of the environment.
    """
    pid, count = os.environ.pop("LISTEN_PID", ""), os.environ.pop("LISTEN_FDS", "")
    os.environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or count != "1":
        return None
    os.set_inheritable(_FIRST_FD, False)
    sock = socket.socket(fileno=_FIRST_FD)
    sock.setblocking(False)
    return sock
