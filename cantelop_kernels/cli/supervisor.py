"""Signals to a command: the first one cancels it and its undoing is waited for.

One per process, made by `__main__` and handed to the sub-command as `args.supervisor`.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from cantelop_kernels.cli.report import Stopped

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Supervisor:
    """Runs one coroutine under SIGINT, SIGTERM and SIGHUP.

    The third signal ends the process on the spot; the daemon then undoes what was left. A
    sub-command may put other handlers in place of these (the daemon does).
    """

    def __init__(self) -> None:
        self._got: list[int] = []
        self._task: asyncio.Task[int] | None = None
        self._interrupt: Callable[[], None] | None = None
        self.farewell = ""
        """What a signal leaves of the work, for the person who sent it."""

    def next_interrupt(self, action: Callable[[], None] | None) -> None:
        """The next SIGINT calls `action` and nothing else; the one after it cancels, as ever."""
        self._interrupt = action

    async def run(self, work: Coroutine[Any, Any, int]) -> int:
        """The command's exit code. Raises Stopped where a signal ended it."""
        loop = asyncio.get_running_loop()
        self._task = asyncio.ensure_future(work)
        for signum in _SIGNALS:
            loop.add_signal_handler(signum, self._on_signal, signum)
        try:
            return await self._task
        except asyncio.CancelledError:
            if self._got:
                raise Stopped(self._got[0], self.farewell) from None
            raise
        finally:
            for signum in _SIGNALS:
                loop.remove_signal_handler(signum)

    def _on_signal(self, signum: int) -> None:
        if signum == signal.SIGINT and self._interrupt is not None:
            action, self._interrupt = self._interrupt, None
            action()
            return
        self._got.append(signum)
        if len(self._got) == 1 and self._task is not None:
            self._task.cancel()
        elif len(self._got) > 2:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
