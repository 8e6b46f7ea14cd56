"""What a session uses, read from the host's side and asked of its guest.

Layer 5. The host's figures come from the sandbox's cgroup and cannot be forged; the guest's are
what its agent says, and serve display and idle culling only.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from cantelop_kernels.errors import CantelopError, NotFound
from cantelop_kernels.sandbox import Sandbox
from cantelop_kernels.schema import Usage
from cantelop_kernels.session import Session

_BLOCK = 512
_STATUS_DEADLINE = 3.0


@dataclass(frozen=True, slots=True)
class Host:
    """`cpu` and `throttled` in seconds so far, `memory` and `disk` in bytes."""

    cpu: float
    throttled: float
    memory: int
    disk: int


class Meter:
    """Reads sessions; remembers the last reading of each for the rate in between."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, float]] = {}

    async def read(self, session: Session) -> Usage:
        """Raises NotFound where the session has no sandbox (any more)."""
        sandbox = session.sandbox
        if sandbox is None or not session.is_running:
            raise NotFound(f"session {session.id} does not run", hint="see which do: cantelop ps")
        host = await asyncio.to_thread(read_host, sandbox)
        status = plausible_status(await guest_status(sandbox), session.plan.memory_mib << 20)
        to_client, to_kernel = await _traffic(sandbox)
        return Usage(
            id=session.id,
            busy=status.get("busy"),
            idle_seconds=status.get("idle_seconds"),
            cpu_seconds=round(host.cpu, 3),
            cpu_percent=round(self._rate(session.id, host.cpu), 1),
            throttled_seconds=round(host.throttled, 3),
            memory=host.memory,
            guest_memory_used=status.get("memory_used"),
            kernel_memory=status.get("memory_current"),
            kernel_memory_limit=status.get("memory_limit"),
            disk=host.disk,
            disk_limit=session.plan.scratch_mib << 20,
            to_client=to_client,
            to_kernel=to_kernel,
            network_in=0,  # the guest has no network device yet
            network_out=0,
        )

    def forget(self, ids: set[str]) -> None:
        """Keep readings of these sessions only."""
        self._last = {key: value for key, value in self._last.items() if key in ids}

    def _rate(self, session_id: str, cpu: float) -> float:
        now = time.monotonic()
        then, before = self._last.get(session_id, (now, cpu))
        self._last[session_id] = (now, cpu)
        return 100 * (cpu - before) / (now - then) if now > then else 0.0


def read_host(sandbox: Sandbox) -> Host:
    """Blocking: a few small files."""
    taken = sandbox.leaf.taken()
    return Host(taken.cpu, taken.throttled, taken.memory, disk_used(sandbox))


def disk_used(sandbox: Sandbox) -> int:
    """Bytes of its scratch disk that take place on the host."""
    try:
        return (sandbox.place.folder / "scratch.img").stat().st_blocks * _BLOCK
    except FileNotFoundError:
        return 0


def plausible_status(status: dict[str, Any], memory: int) -> dict[str, Any]:
    """A guest may say what it likes; it has so much `memory`, in bytes, and not more."""
    names = ("memory_used", "memory_current", "memory_limit")
    return status | {name: max(0, min(status[name], memory)) for name in names if name in status}


async def guest_status(sandbox: Sandbox) -> dict[str, Any]:
    """What the guest says of itself; empty where it does not answer in time."""
    try:
        return await sandbox.link.request("status_request", deadline=_STATUS_DEADLINE)
    except CantelopError:
        return {}


async def _traffic(sandbox: Sandbox) -> tuple[int, int]:
    try:
        return await sandbox.link.traffic()
    except CantelopError:
        return 0, 0
