"""What ends a session besides its owner and its kernel: silence, doing nothing, and its age.

Layer 5. One task looks at every session now and then. A kernel that runs a cell is never idle, and
one of which nobody can tell (a command of one's own) is never taken for idle. A sandbox whose agent
does not answer (a VMM, helper or attendant that was stopped, THREATS.md 4) is of use to nobody.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from cantelop_kernels.config import App, Config
from cantelop_kernels.errors import DeadlineExceeded, NotFound, SandboxGone
from cantelop_kernels.exits import cell_id
from cantelop_kernels.sandbox import Sandbox
from cantelop_kernels.session import Session
from cantelop_kernels.usage import disk_used

LOOK_SECONDS = 15.0
WARNING_SHARE = 0.1
"""Of its lifetime: so long before its end a session is warned of it."""
DISK_SHARE = 0.9
"""Of its disk; the file system keeps a few hundredths of it for itself."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Leases:
    """`look` is called by `run`, and by tests."""

    config: Config
    _warned: set[str] = field(default_factory=set)
    _full: set[str] = field(default_factory=set)

    async def run(self, sessions: Iterable[Session]) -> None:
        """Look for ever. `sessions` is a live view of all of them."""
        while True:
            await asyncio.sleep(self._pause())
            running = [one for one in sessions if one.is_running]
            results = await asyncio.gather(*map(self.look, running), return_exceptions=True)
            for one, result in zip(running, results, strict=True):
                if isinstance(result, Exception):
                    log.error("could not look after session %s: %r", one.id, result)
            self._warned &= {one.id for one in running}
            self._full &= {one.id for one in running}

    async def look(self, session: Session) -> None:
        """End the session where its App says so."""
        try:
            app = self.config.app(session.app)
        except NotFound:  # taken out of the configuration; its sessions live on, without limits
            app = App("none", {})
        if session.sandbox is None:
            return
        if app.lifetime_seconds:
            self._look_at_age(session, app.lifetime_seconds)
        self._look_at_disk(session, session.sandbox)
        silence = self.config.silence_seconds
        try:
            status = await session.sandbox.link.request("status_request", deadline=silence)
        except DeadlineExceeded:
            log.warning("session %s does not answer", session.id)
            session.stop(f"its sandbox did not answer for {silence:g} s")
            return
        except SandboxGone:
            return  # it has just ended
        session.cell = cell_id(status["cell"])
        idle = status["idle_seconds"]
        if app.idle_seconds and status["busy"] is False and idle >= app.idle_seconds:
            log.info("session %s did nothing for %.0f s", session.id, idle)
            session.stop(f"idle for {app.idle_seconds:g} s, the limit of its App")

    def _look_at_age(self, session: Session, lifetime: float) -> None:
        left = session.created + lifetime - time.time()
        if left <= 0:
            session.stop(f"older than {lifetime:g} s, the limit of its App")
        elif left <= lifetime * WARNING_SHARE and session.id not in self._warned:
            self._warned.add(session.id)
            text = f"this session ends in {left:.0f} s: its App allows {lifetime:g} s"
            session.notices.append(text)
            log.warning("session %s ends in %.0f s: %s", session.id, left, session.app)

    def _look_at_disk(self, session: Session, sandbox: Sandbox) -> None:
        """The guest says "No space left on device", and not how much there was."""
        used, limit = disk_used(sandbox), session.plan.scratch_mib << 20
        if used < limit * DISK_SHARE or session.id in self._full:
            return
        self._full.add(session.id)
        session.notices.append(
            f"its disk is nearly full: {used >> 20} of {limit >> 20} MiB, the scratch_mib of its"
            f" App {session.app!r}"
        )
        log.warning("session %s has filled its disk of %d MiB", session.id, limit >> 20)

    def _pause(self) -> float:
        """Often enough for the shortest limit of any App."""
        apps: list[App] = list(self.config.apps.values())
        limits = [x for app in apps for x in (app.idle_seconds, app.lifetime_seconds) if x]
        limits.append(self.config.silence_seconds)
        return min([LOOK_SECONDS, *(max(0.2, limit / 10) for limit in limits)])
