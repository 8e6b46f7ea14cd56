"""Hybrid vsock: a guest's vsock ports as Unix sockets on the host.

Layer 2. Firecracker and vhost-device-vsock speak the same: to reach guest port P, connect to the
VMM's socket, send `CONNECT P\\n` and read `OK <n>\\n`; a guest that dials the host (CID 2) on
port P arrives at the socket `<path>_P`, which must be listening before.
(firecracker docs/vsock.md; vhost-device-vsock README.)
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOCKET = "v.sock"
"""Name of the VMM's socket inside its working folder."""

_REPLY_MAX = 32


def listen(folder: Path, port: int, *, uid: int, gid: int) -> socket.socket:
    """A listening socket for what the guest dials on `port`, to be handed to the attendant.

    The folder may be the VMM's to change: nothing here follows a name in it (THREATS.md 10).
    `uid`, `gid` own the file; the VMM's helper connects through the group.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        path = folder / f"{SOCKET}_{port}"
        before = os.umask(0o117)  # no chmod afterwards: it would follow a link put in its place
        try:
            bind(listener, folder, path.name)
        finally:
            os.umask(before)
        os.chown(path, uid, gid, follow_symlinks=False)
        listener.listen(16)
    except BaseException:
        listener.close()
        raise
    return listener


def bind(listener: socket.socket, folder: Path, name: str) -> None:
    """bind(2), wherever the folder lies."""
    with _short_path(folder, name) as path:
        listener.bind(path)


def connect(sock: socket.socket, folder: Path, name: str) -> None:
    """connect(2), likewise. Raises OSError."""
    with _short_path(folder, name) as path:
        sock.connect(path)


@contextmanager
def _short_path(folder: Path, name: str) -> Iterator[str]:
    """By way of the folder's descriptor: a Unix path may have 107 bytes at most."""
    fd = os.open(folder, os.O_DIRECTORY | os.O_PATH | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)


async def dial(path: str, port: int) -> tuple[socket.socket, bytes]:
    """Connect to a guest port; also returns what the guest had already said behind the `OK`.

    Called by the attendant only, which has no rights beyond the sandbox's own. Raises
    ConnectionError where nobody listens there, OSError where the VMM is gone.
    """
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        await loop.sock_connect(sock, path)
        await loop.sock_sendall(sock, f"CONNECT {port}\n".encode())
        reply = b""
        while b"\n" not in reply:
            data = await loop.sock_recv(sock, 4096)
            reply += data
            if not data or (b"\n" not in reply and len(reply) > _REPLY_MAX):
                raise ConnectionError(f"nobody listens on port {port} of the guest")
        line, _, rest = reply.partition(b"\n")
        if not line.startswith(b"OK "):
            raise ConnectionError(f"the VMM refused port {port}")
    except BaseException:
        sock.close()
        raise
    return sock, rest
