"""The agent's event loop: file descriptors, timers, and nothing else.

It offers the four methods of `cantelop_kernels.relay.Loop`. asyncio would do the same and costs
half a second to import under emulation.
"""

from __future__ import annotations

import select
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Callback = tuple[Callable[..., Any], tuple[Any, ...]]

_READ = select.EPOLLIN
_WRITE = select.EPOLLOUT


class Timer:
    """A call to come; `cancel` may be called at any time, also after it ran."""

    def __init__(self, when: float, callback: Callback) -> None:
        self.when = when
        self._callback: Callback | None = callback

    def cancel(self) -> None:
        self._callback = None

    def run(self) -> None:
        if self._callback is not None:
            function, args = self._callback
            function(*args)


class Loop:
    """Single-threaded. Callbacks must tolerate being called with nothing to do."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._readers: dict[int, Callback] = {}
        self._writers: dict[int, Callback] = {}
        self._masks: dict[int, int] = {}
        self._timers: list[Timer] = []
        self._running = False

    def add_reader(self, fd: int, callback: Callable[..., Any], *args: Any) -> None:
        """Call back whenever `fd` can be read, or has ended or failed. Replaces an earlier one."""
        self._readers[fd] = (callback, args)
        self._update(fd)

    def remove_reader(self, fd: int) -> bool:
        """True if there was one. Must be called before `fd` is closed."""
        removed = self._readers.pop(fd, None) is not None
        self._update(fd)
        return removed

    def add_writer(self, fd: int, callback: Callable[..., Any], *args: Any) -> None:
        """Call back whenever `fd` takes bytes, or has failed. Replaces an earlier one."""
        self._writers[fd] = (callback, args)
        self._update(fd)

    def remove_writer(self, fd: int) -> bool:
        """True if there was one. Must be called before `fd` is closed."""
        removed = self._writers.pop(fd, None) is not None
        self._update(fd)
        return removed

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any) -> Timer:
        """Call once, `delay` seconds from now."""
        timer = Timer(time.monotonic() + delay, (callback, args))
        self._timers.append(timer)
        return timer

    def stop(self) -> None:
        """`run` returns after the callbacks of this round."""
        self._running = False

    def close(self) -> None:
        self._epoll.close()

    def run(self) -> None:
        """Until `stop`. An exception in a callback ends it: the agent then powers off."""
        self._running = True
        while self._running:
            for fd, events in self._epoll.poll(self._timeout()):
                self._dispatch(fd, events)
            self._run_timers()

    def _dispatch(self, fd: int, events: int) -> None:
        broken = events & ~(_READ | _WRITE)
        reader = self._readers.get(fd)
        if reader is not None and (events & _READ or broken):
            reader[0](*reader[1])
        writer = self._writers.get(fd)
        if writer is not None and (events & _WRITE or broken):
            writer[0](*writer[1])

    def _update(self, fd: int) -> None:
        """Tell the kernel. An fd nobody watches is taken out, or its hang-up would spin."""
        mask = (_READ if fd in self._readers else 0) | (_WRITE if fd in self._writers else 0)
        before = self._masks.get(fd, 0)
        if mask == before:
            return
        if not mask:
            del self._masks[fd]
            self._epoll.unregister(fd)
            return
        self._masks[fd] = mask
        if before:
            self._epoll.modify(fd, mask)
        else:
            self._epoll.register(fd, mask)

    def _timeout(self) -> float | None:
        if not self._timers:
            return None
        return max(0.0, min(timer.when for timer in self._timers) - time.monotonic())

    def _run_timers(self) -> None:
        if not self._timers:
            return
        now = time.monotonic()
        due = [timer for timer in self._timers if timer.when <= now]
        if due:
            self._timers = [timer for timer in self._timers if timer.when > now]
            for timer in sorted(due, key=_when):
                timer.run()


def _when(timer: Timer) -> float:
    return timer.when
