"""Waits until a program we know nothing about listens on all of its sockets."""

from __future__ import annotations

import os
import socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .loop import Loop, Timer

_IN_CREATE = 0x100
_IN_MOVED_TO = 0x80
_IN_NONBLOCK = os.O_NONBLOCK
_IN_CLOEXEC = os.O_CLOEXEC

RETRY = 0.02
"""Seconds between tries once every file is there: listen() follows bind() and shows nowhere."""


class SocketWatch:
    """Calls `on_ready` once all `paths` (in one folder) take connections; `close` any time."""

    def __init__(self, loop: Loop, paths: list[str], on_ready: Callable[[], None]) -> None:
        self._loop = loop
        self._missing = list(paths)
        self._on_ready = on_ready
        self._timer: Timer | None = None
        self._inotify: int | None = _watch_folder(os.path.dirname(paths[0]))
        loop.add_reader(self._inotify, self._changed)
        self._check()

    def close(self) -> None:
        """Idempotent; `on_ready` is not called after it."""
        if self._inotify is not None:
            self._loop.remove_reader(self._inotify)
            os.close(self._inotify)
            self._inotify = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _changed(self) -> None:
        if self._inotify is not None:
            os.read(self._inotify, 4096)
            self._check()

    def _check(self) -> None:
        if self._inotify is None:
            return
        self._missing = [path for path in self._missing if not _listens(path)]
        if not self._missing:
            self.close()
            self._on_ready()
        elif all(os.path.exists(path) for path in self._missing):
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_later(RETRY, self._check)


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(path) == 0


def _watch_folder(folder: str) -> int:
    """An inotify descriptor. ctypes is imported here: only a kernel with its own argv needs it."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    descriptor: int = libc.inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "inotify_init1")
    if libc.inotify_add_watch(descriptor, folder.encode(), _IN_CREATE | _IN_MOVED_TO) < 0:
        os.close(descriptor)
        raise OSError(ctypes.get_errno(), "inotify_add_watch")
    return descriptor
