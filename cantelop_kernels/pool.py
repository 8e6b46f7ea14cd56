"""Warm sandboxes: booted and exercised ahead, each handed to one session, never taken back.

Layer 5. One task refills, one boot at a time; a claim is a synchronous look at a shelf, so that two
can never get the same sandbox. Where a shelf is empty the session boots its own, which is slower
and no error. A used sandbox has no way back: `claim` is the only exit, and a boot the only way in.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from cantelop_kernels.admission import Admission, Need
from cantelop_kernels.errors import CantelopError
from cantelop_kernels.sandbox import Plan, Sandbox, boot
from cantelop_kernels.schema import PoolView
from cantelop_kernels.slot import SlotTable
from cantelop_kernels.vmm import Vmm

BREAKER = 5
"""Failed boots in a row after which a shelf is tried only now and then."""

FIRST_PAUSE = 2.0
_LONGEST_PAUSE = 300.0
_QUIET_SECONDS = 1.5
"""A kernel that has just been given has the processor to itself for so long before a boot wants it:
its user waits for the first cell, and nobody waits for the boot."""

_LOOK_SECONDS = 30.0
"""How often image names are looked up anew: a build may have given one to another image."""

_DECAY_SECONDS = 600.0
"""A shelf that was found empty wants one more, up to its ceiling, and one less after so long."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kind:
    """What makes two sandboxes that belong to nobody alike."""

    digest: str
    vcpus: int
    memory_mib: int
    scratch_mib: int

    @classmethod
    def of(cls, plan: Plan) -> Kind:
        return cls(plan.image.digest, plan.vcpus, plan.memory_mib, plan.scratch_mib)


@dataclass(frozen=True, slots=True)
class Wish:
    """So many warm sandboxes of this plan for an App; `plan` raises where the image is not there.

    `plan` may hash files: it is called in a thread.
    """

    app: str
    plan: Callable[[], Plan]
    floor: int
    ceiling: int


@dataclass(slots=True)
class _Warm:
    sandbox: Sandbox
    since: float
    memory_used: int
    watch: asyncio.Task[None] | None = None


@dataclass(slots=True)
class _Shelf:
    plan: Plan
    apps: list[str]
    floor: int = 0
    ceiling: int = 0
    extra: int = 0
    missed_at: float = 0.0
    ready: deque[_Warm] = field(default_factory=deque)
    booting: bool = False
    failures: int = 0
    last_error: str = ""
    retry_at: float = 0.0

    @property
    def target(self) -> int:
        return min(self.floor + self.extra, self.ceiling)

    def view(self) -> PoolView:
        plan = self.plan
        return PoolView(
            apps=self.apps,
            image=plan.image.name,
            digest=plan.image.digest,
            vcpus=plan.vcpus,
            memory_mib=plan.memory_mib,
            target=self.target,
            ready=len(self.ready),
            booting=int(self.booting),
            failures=self.failures,
            last_error=self.last_error,
            retry_seconds=round(max(0.0, self.retry_at - time.monotonic()), 1),
            memory_used=[one.memory_used for one in self.ready],
        )


class Launcher:
    """Boots sandboxes within the host's limits; each gives its place back when it is destroyed."""

    def __init__(
        self, vmm: Vmm, slots: SlotTable, admission: Admission, observe: Observer | None = None
    ) -> None:
        self._vmm, self._slots, self._admission = vmm, slots, admission
        self._observe = observe or Observer()

    async def boot(
        self, plan: Plan, ticket: int, on_step: Callable[[str], None] = lambda _: None
    ) -> Sandbox:
        """Uses up `ticket`, whatever happens. Raises as `sandbox.boot` does."""
        begun = time.monotonic()
        gone = partial(self._admission.give, ticket)
        try:
            sandbox = await boot(plan, self._vmm, self._slots, gone, on_step)
        except CantelopError as error:
            self._observe.boot_failed(str(error.details.get("step", "")))
            raise
        self._observe.booted(time.monotonic() - begun)
        return sandbox


class Observer:
    """What the metrics want to know; this one wants nothing."""

    def booted(self, seconds: float) -> None: ...
    def boot_failed(self, step: str) -> None: ...
    def claimed(self, warm: bool, seconds: float) -> None: ...


class Pool:
    """`run` is the refilling task; everything else is called on the daemon's loop at any time."""

    def __init__(
        self,
        wishes: Iterable[Wish],
        launcher: Launcher,
        admission: Admission,
        *,
        total: int,
        max_age: float,
        warm_deadline: float,
    ) -> None:
        self._wishes = list(wishes)
        self._launcher = launcher
        self._admission = admission
        self._total = total
        self._max_age = max_age
        self._warm_deadline = warm_deadline
        self._shelves: dict[Kind, _Shelf] = {}
        self._unresolved: dict[str, str] = {}
        self._looked_at = float("-inf")
        self._claimed_at = float("-inf")
        self._changed = asyncio.Event()
        self._ends: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Pool {sum(len(one.ready) for one in self._shelves.values())} warm>"

    def claim(self, plan: Plan) -> Sandbox | None:
        """A warm sandbox of that plan, from now on the caller's alone; None where there is none."""
        self._claimed_at = time.monotonic()
        shelf = self._shelves.get(Kind.of(plan))
        if shelf is None:
            return None
        while shelf.ready:
            warm = shelf.ready.popleft()
            self._changed.set()
            self._unwatch(warm)
            if warm.sandbox.alive:
                return warm.sandbox
            self._end(warm)
        shelf.extra = min(shelf.extra + 1, shelf.ceiling - shelf.floor)
        shelf.missed_at = time.monotonic()
        self._changed.set()
        return None

    def make_room(self) -> bool:
        """Give up a warm sandbox, since a claim waits for its place. False where there is none."""
        shelves = [shelf for shelf in self._shelves.values() if shelf.ready]
        if not shelves:
            return False
        shelf = max(shelves, key=lambda one: len(one.ready))
        warm = shelf.ready.popleft()
        log.info("a warm sandbox makes room for a session")
        self._end(warm)
        return True

    def on_freed(self) -> None:
        """A place on the host has come free: for a claim that still waits, or for a refill."""
        if self._admission.waiting:
            self.make_room()
        self._changed.set()

    def suspend(self) -> None:
        """Refill no more, and give up what is warm: the daemon is about to stop."""
        self._total = 0
        self._changed.set()

    def look_again(self) -> None:
        """Look up the images' names at once."""
        self._looked_at = float("-inf")
        self._changed.set()

    def came_up(self, plan: Plan) -> None:
        """A session's own boot of this kind has succeeded: try again at once."""
        shelf = self._shelves.get(Kind.of(plan))
        if shelf is not None and shelf.failures:
            shelf.retry_at = 0.0
            self._changed.set()

    def views(self) -> list[PoolView]:
        return [shelf.view() for shelf in self._shelves.values()]

    @property
    def unresolved(self) -> dict[str, str]:
        """Apps whose image cannot be had, with the reason."""
        return dict(self._unresolved)

    async def run(self) -> None:
        """Refill for ever. Cancelled when the daemon stops; then `close`."""
        while True:
            try:
                await self._turn()
            except Exception:
                log.exception("the pool could not be refilled; next try in %g s", _LOOK_SECONDS)
                await asyncio.sleep(_LOOK_SECONDS)

    async def _turn(self) -> None:
        """Boot one sandbox, or wait until there may be one to boot."""
        self._changed.clear()
        await self._look_up()
        self._retire()
        shelf = self._most_wanting()
        ticket = self._ticket(shelf) if shelf is not None else None
        if shelf is not None and ticket is not None:
            await self._fill(shelf, ticket)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(self._pause()):
                await self._changed.wait()

    async def close(self) -> None:
        """Destroy all that is warm; `run` must have ended. Idempotent."""
        for shelf in self._shelves.values():
            while shelf.ready:
                self._end(shelf.ready.popleft())
        while self._ends:
            await asyncio.wait(self._ends)

    # ---- filling

    async def _look_up(self) -> None:
        """Which shelves there are to be; those that nobody wishes for any more are cleared."""
        if time.monotonic() - self._looked_at < _LOOK_SECONDS:
            return
        self._looked_at = time.monotonic()
        found: dict[Kind, list[tuple[Wish, Plan]]] = {}
        for wish in self._wishes:
            try:
                plan = await asyncio.to_thread(wish.plan)
            except CantelopError as error:
                if self._unresolved.get(wish.app) != str(error):
                    log.warning("no warm sandboxes for the App %r: %s", wish.app, error)
                self._unresolved[wish.app] = str(error)
                continue
            self._unresolved.pop(wish.app, None)
            found.setdefault(Kind.of(plan), []).append((wish, plan))
        for kind in self._shelves.keys() - found.keys():
            for warm in self._shelves.pop(kind).ready:
                self._end(warm)
        for kind, wishes in found.items():
            shelf = self._shelves.setdefault(kind, _Shelf(wishes[0][1], []))
            shelf.apps = [wish.app for wish, _ in wishes]
            shelf.floor = sum(wish.floor for wish, _ in wishes)
            shelf.ceiling = sum(wish.ceiling for wish, _ in wishes)

    def _retire(self) -> None:
        now = time.monotonic()
        for shelf in self._shelves.values():
            if shelf.extra and now - shelf.missed_at > _DECAY_SECONDS:
                shelf.extra, shelf.missed_at = shelf.extra - 1, now
            while shelf.ready and (
                now - shelf.ready[0].since > self._max_age
                or len(shelf.ready) > min(shelf.target, self._total)
            ):
                self._end(shelf.ready.popleft())

    def _most_wanting(self) -> _Shelf | None:
        now = time.monotonic()
        full = sum(len(shelf.ready) for shelf in self._shelves.values()) >= self._total
        if full or now - self._claimed_at < _QUIET_SECONDS:
            return None
        wanting = [
            shelf
            for shelf in self._shelves.values()
            if len(shelf.ready) < shelf.target and shelf.retry_at <= now
        ]
        return min(wanting, key=lambda one: len(one.ready) / one.target, default=None)

    def _ticket(self, shelf: _Shelf) -> int | None:
        return self._admission.try_take(Need(shelf.plan.memory_mib, shelf.plan.vcpus))

    def _pause(self) -> float:
        now = time.monotonic()
        quiet = self._claimed_at + _QUIET_SECONDS - now
        due = [_LOOK_SECONDS, *([quiet] if quiet > 0 else [])]
        for shelf in self._shelves.values():
            due += [shelf.ready[0].since + self._max_age - now] if shelf.ready else []
            due += [shelf.retry_at - now] if shelf.retry_at > now else []
        return max(0.05, min(due))

    async def _fill(self, shelf: _Shelf, ticket: int) -> None:
        shelf.booting = True
        sandbox: Sandbox | None = None
        try:
            sandbox = await self._launcher.boot(shelf.plan, ticket)
            used = await sandbox.warm_up(self._warm_deadline)
            used = max(0, min(used, shelf.plan.memory_mib << 20))  # a guest may say anything
        except CantelopError as error:
            if sandbox is not None:
                await self._destroy(sandbox)
            self._failed(shelf, error)
        except BaseException:
            if sandbox is not None:
                await self._destroy(sandbox)
            raise
        else:
            self._put(shelf, _Warm(sandbox, time.monotonic(), used))
        finally:
            shelf.booting = False

    def _put(self, shelf: _Shelf, warm: _Warm) -> None:
        if shelf.failures >= BREAKER:
            log.warning("warm sandboxes of %s come up again", shelf.plan.image.name)
        shelf.failures, shelf.last_error = 0, ""
        if shelf not in self._shelves.values():  # its image was replaced meanwhile
            self._end(warm)
            return
        shelf.ready.append(warm)
        if self._admission.waiting:  # it has taken the place that a session now waits for
            self.make_room()
            return
        warm.watch = asyncio.ensure_future(self._drop_when_dead(shelf, warm))

    def _failed(self, shelf: _Shelf, error: CantelopError) -> None:
        shelf.failures += 1
        shelf.last_error = error.message
        broken = shelf.failures >= BREAKER
        pause = (
            _LONGEST_PAUSE
            if broken
            else min(FIRST_PAUSE * 2 ** (shelf.failures - 1), _LONGEST_PAUSE)
        )
        shelf.retry_at = time.monotonic() + pause
        log.warning(
            "a warm sandbox of %s did not come up (%d in a row), next try in %.0f s: %s",
            shelf.plan.image.name,
            shelf.failures,
            pause,
            error,
        )
        if shelf.failures == BREAKER:
            log.error("refilling %s is suspended: boots keep failing", shelf.plan.image.name)

    async def _drop_when_dead(self, shelf: _Shelf, warm: _Warm) -> None:
        """A warm sandbox whose VMM dies is no use to anybody."""
        with suppress(CantelopError):
            await warm.sandbox.ended()
        if warm in shelf.ready:
            shelf.ready.remove(warm)
            warm.watch = None
            log.warning("a warm sandbox of %s has died", shelf.plan.image.name)
            self._end(warm)
            self._changed.set()

    def _unwatch(self, warm: _Warm) -> None:
        if warm.watch is not None:
            warm.watch.cancel()
            warm.watch = None

    def _end(self, warm: _Warm) -> None:
        self._unwatch(warm)
        task = asyncio.ensure_future(self._destroy(warm.sandbox))
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)

    async def _destroy(self, sandbox: Sandbox) -> None:
        try:
            await sandbox.destroy()
        except CantelopError as error:
            log.error("a warm sandbox could not be taken away: %s", error)
