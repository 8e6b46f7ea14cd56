"""One kernel's session in the daemon, from a successful launch to the end of its sandbox."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from logging import Logger, LoggerAdapter
from typing import Any

from cantelop_kernels.client import Client, ensure_daemon
from cantelop_kernels.errors import CantelopError, DaemonUnavailable, NotFound
from cantelop_kernels.schema import SessionView
from cantelop_provisioner import report
from cantelop_provisioner.last_words import LastWords

POLL_DEADLINE = 2.0
"""Seconds a poll may take: below the 3 s at which jupyter_client's restarter polls."""

WAIT_TURN = 10.0
"""Seconds of one long poll; the daemon answers earlier when the kernel ends."""

PAUSE = 0.5
"""Seconds before a daemon that did not answer is asked again."""

Log = Logger | LoggerAdapter[Any]


class Kernel:
    """Asks the daemon about one session, and remembers what cannot change any more.

    No method raises what the daemon or the socket may cause: a daemon that does not answer says
    nothing about the kernel. Where no daemon runs at all, its endpoints tell whether it lives:
    somebody listens there as long as it does. `ip` is theirs, without the number. `last_words` are
    said where it ends unexpectedly; without, somebody else tells.
    """

    def __init__(
        self, client: Client, session: str, ip: str, log: Log, last_words: LastWords | None = None
    ) -> None:
        self.session = session
        self._heartbeat = f"{ip}-5"
        self._last_words = last_words
        self.exit_code: int | None = None
        self.reaped = False
        """Whether `wait` has returned; the sandbox may still have to be ended."""
        self.expected = False
        """Whether somebody asked for the end, so that it is no news."""
        self._client = client
        self._log = log
        self._silent = False
        self._told: set[str] = set()
        self._dying: tuple[str, str] | None = None
        """The cell in which it died, and why, until that has been said."""

    def __repr__(self) -> str:
        state = "alive" if self.exit_code is None else f"ended {self.exit_code}"
        return f"<Kernel {self.session} {state}>"

    async def attach(self) -> None:
        """Make this process the kernel's owner, in place of one that has ended."""
        try:
            await self._client.attach(self.session)
        except NotFound:
            self._learn(None)
        except CantelopError as error:
            self._log.warning("session %s could not be taken over: %s", self.session, error)

    async def poll(self) -> int | None:
        """None while it lives, or while nobody can tell; one short question at most."""
        if self.exit_code is None:
            try:
                async with asyncio.timeout(POLL_DEADLINE):
                    self._learn(await self._client.get(self.session))
            except NotFound:
                self._learn(None)
            except (CantelopError, TimeoutError) as error:
                self._unanswered(error)
                if isinstance(error, DaemonUnavailable) and not _listens(self._heartbeat):
                    self._lost(report.STOPPED if error.details.get("stopped") else report.LOST)
            await self._say_last_words()
        return self.exit_code

    async def _say_last_words(self) -> None:
        dying, self._dying = self._dying, None
        if dying is not None and self._last_words is not None:
            await self._last_words.say(*dying)

    async def wait(self) -> int:
        """Return the exit code once it has ended. Cancel it to stop waiting."""
        while (code := await self.poll()) is None:
            try:
                self._learn(await self._client.wait(self.session, WAIT_TURN))
            except NotFound:
                self._learn(None)
            except CantelopError as error:
                self._unanswered(error)
                await asyncio.sleep(PAUSE)  # there is no event that says "the daemon is back"
        self.reaped = True
        return code

    async def signal(self, signum: int) -> None:
        """To the kernel's process group; nothing happens when it has ended."""
        if self.exit_code is not None:
            return
        try:
            await self._with_daemon(lambda: self._client.signal(self.session, signum))
        except NotFound:
            self._learn(None)
        except CantelopError as error:
            self._log.warning("signal %d did not reach the kernel: %s", signum, error)

    async def end(self) -> None:
        """Destroy the sandbox; idempotent. What cannot be told to the daemon it finds itself:
        it ends a session whose client is gone."""
        self.expected = True
        try:
            await self._with_daemon(lambda: self._client.end(self.session))
        except NotFound:
            pass
        except CantelopError as error:
            self._log.warning("session %s could not be ended: %s", self.session, error)
            return
        if self.exit_code is None:
            self.exit_code = report.KILLED

    async def _with_daemon(self, ask: Callable[[], Awaitable[None]]) -> None:
        """Root's kernel may have outlived the daemon that root's client had started."""
        try:
            await ask()
        except DaemonUnavailable:
            if self.exit_code is not None or not _listens(self._heartbeat):
                raise
            await ensure_daemon(self._client.path)
            await ask()

    def tell(self, notices: list[str]) -> None:
        """Log what the user must know and was not told yet: daemons add to it as time goes by."""
        for text in notices:
            if text not in self._told:
                self._told.add(text)
                self._log.warning("%s", text)

    def _learn(self, view: SessionView | None) -> None:
        self._silent = False
        if view is not None:
            self.tell(view.notices)
        if self.exit_code is not None:
            return
        ended = view.exit if view is not None else None
        if view is not None and ended is None and view.state != "exited":
            return
        self.exit_code = report.exit_code(ended)
        if not self.expected:
            self._log.error("%s [session %s]", report.death(ended), self.session)
            if ended is not None and ended.cell:
                self._dying = (ended.cell, report.death(ended))

    def _lost(self, how: str) -> None:
        self.exit_code = report.GONE
        if not self.expected:
            self._log.error("%s [session %s]", how, self.session)

    def _unanswered(self, error: Exception) -> None:
        if not self._silent:
            self._log.warning("no word from the daemon, the kernel is taken to live: %r", error)
        self._silent = True


def _listens(path: str) -> bool:
    """Whether somebody accepts there. A full backlog is somebody who is busy."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError:
            return True
    return True
