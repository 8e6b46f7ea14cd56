"""A session's five ipc sockets, in a 0700 folder of the user who asked.

Layer 2. The daemon (root) makes folder and sockets, gives them to the user, and hands the listening
descriptors to the attendant; it never accepts on them itself. A folder is built aside and renamed
into place, so that no step works inside a folder the user can already change.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Collection
from pathlib import Path

from cantelop_kernels import trees, vsock, wire
from cantelop_kernels.errors import CantelopError, ConfigError
from cantelop_kernels.schema import Endpoints

_SUN_PATH = 107
"""unix(7): the most bytes a path may have, without its terminating NUL."""

_PREFIX = "k"

log = logging.getLogger(__name__)


class EndpointFolders:
    """All endpoint folders of one daemon, below `base` (`NAME.ipc/` beside its socket)."""

    def __init__(self, base: Path) -> None:
        self.base = base
        longest = len(str(base / ("x" * 16) / f"{_PREFIX}-5"))
        if longest > _SUN_PATH:
            raise ConfigError(
                f"the folder {base.parent} has too long a name for Unix sockets",
                hint=f"move the daemon's socket up by {longest - _SUN_PATH} characters or more",
            )

    async def prepare(self, keep: Collection[str] = ()) -> None:
        """Make `base`, with nothing in it but the endpoints to `keep`, by token.

        What cannot be removed is set aside and logged: a user's folder keeps nobody from serving.
        """
        for old in trees.leftovers(self.base.parent, self.base.name):
            await _tried(trees.remove_leftover(old))
        if not keep:
            await _tried(trees.remove(self.base))
        self.base.mkdir(mode=0o711, exist_ok=True)
        self.base.chmod(0o711)
        for old in self.base.iterdir():
            if old.name not in keep:
                await _tried(trees.remove(old))

    async def close(self) -> None:
        """Take `base` away, once no session is left."""
        await _tried(trees.remove(self.base))

    def reserve(self) -> Endpoints:
        """A new place; nothing is there until `listen`."""
        token = secrets.token_hex(8)
        return Endpoints(token=token, ip=str(self.base / token / _PREFIX))

    async def listen(self, endpoints: Endpoints, uid: int, gid: int) -> list[socket.socket]:
        """Five listening sockets in the order of `wire.CHANNELS`; the caller closes them.

        May be called again for the same endpoints: the old sockets are then replaced, as a restart
        wants (jupyter_client has unlinked them by then).
        """
        folder = _folder(endpoints)
        aside = folder.with_name(f".{endpoints.token}")
        await trees.remove(aside)
        aside.mkdir(mode=0o700)
        listeners: list[socket.socket] = []
        try:
            for number in range(1, len(wire.CHANNELS) + 1):
                listeners.append(_listener(aside, f"{_PREFIX}-{number}", uid, gid))
            await self.remove(endpoints)
            os.chown(aside, uid, gid)
            aside.rename(folder)
        except BaseException:
            for listener in listeners:
                listener.close()
            await trees.remove(aside)
            raise
        return listeners

    async def remove(self, endpoints: Endpoints) -> None:
        """Take the folder away; nothing happens when it is gone already. Raises CantelopError
        where something that the user has put there cannot be removed."""
        await trees.remove(_folder(endpoints))


def _folder(endpoints: Endpoints) -> Path:
    """Adopted ones may be another daemon's, beside another socket."""
    return Path(endpoints.ip).parent


async def _tried(removal: Awaitable[None]) -> None:
    try:
        await removal
    except CantelopError as error:
        log.warning("%s", error)


def _listener(folder: Path, name: str, uid: int, gid: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        vsock.bind(listener, folder, name)
        (folder / name).chmod(0o600)
        os.chown(folder / name, uid, gid)
        listener.listen(64)
    except BaseException:
        listener.close()
        raise
    return listener
