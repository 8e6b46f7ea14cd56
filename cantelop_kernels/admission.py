"""How many sandboxes this host can carry, and who waits for the next place.

Layer 5. Memory is never promised twice; virtual CPUs share the real ones up to a factor. Claims
wait in the order in which they came; what is only wished for (a warm sandbox) never waits and never
goes before them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from cantelop_kernels.errors import Exhausted


@dataclass(frozen=True, slots=True)
class Need:
    """What one sandbox takes of the host."""

    memory_mib: int
    vcpus: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What all of them may take. `overhead_mib` is the VMM's own memory, per sandbox."""

    memory_mib: int
    vcpus: int
    sandboxes: int
    overhead_mib: int


class Admission:
    """A ledger with a queue. Everything but `take` is synchronous, so nothing is half decided."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.on_freed: Callable[[], None] = lambda: None
        """Called after each `give`, once those who wait have had their turn."""
        self._granted: dict[int, Need] = {}
        self._waiting: deque[tuple[Need, asyncio.Future[int]]] = deque()
        self._tickets = count(1)

    def __repr__(self) -> str:
        return f"<Admission {len(self._granted)} granted, {len(self._waiting)} waiting>"

    @property
    def granted(self) -> int:
        return len(self._granted)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def force(self, need: Need) -> int:
        """A ticket for a sandbox that is there already, whatever the limits now say."""
        ticket = next(self._tickets)
        self._granted[ticket] = need
        return ticket

    def try_take(self, need: Need) -> int | None:
        """A ticket, where there is room and nobody waits."""
        return self.force(need) if not self._waiting and self._fits(need) else None

    async def take(self, need: Need, seconds: float, make_room: Callable[[], bool]) -> int:
        """A ticket, after at most so many seconds. `make_room` is asked whether something that is
        only kept ready can go; then its place comes free soon. Raises Exhausted."""
        self._check_possible(need)
        ticket = self.try_take(need)
        if ticket is not None:
            return ticket
        place: tuple[Need, asyncio.Future[int]]
        place = (need, asyncio.get_running_loop().create_future())
        self._waiting.append(place)
        make_room()
        try:
            async with asyncio.timeout(seconds):
                await asyncio.wait([place[1]])
        except TimeoutError:
            if not place[1].done():
                raise self._exhausted(seconds) from None
        except asyncio.CancelledError:
            if place[1].done():
                self.give(place[1].result())
            raise
        finally:
            if place in self._waiting:
                self._waiting.remove(place)
                self._serve()
        return place[1].result()

    def _exhausted(self, seconds: float) -> Exhausted:
        return Exhausted(
            f"no room for another sandbox within {seconds:g} s: {self._full()}",
            hint="end one (cantelop ps, kill), or raise the limit in the configuration",
        )

    def give(self, ticket: int) -> None:
        """Give a place back; giving it twice is harmless."""
        if self._granted.pop(ticket, None) is not None:
            self._serve()
            self.on_freed()

    def _serve(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            need, future = self._waiting.popleft()
            future.set_result(self.force(need))

    def _fits(self, need: Need) -> bool:
        taken, limits = self._granted.values(), self._limits
        memory = sum(one.memory_mib + limits.overhead_mib for one in taken)
        return (
            len(taken) < limits.sandboxes
            and memory + need.memory_mib + limits.overhead_mib <= limits.memory_mib
            and sum(one.vcpus for one in taken) + need.vcpus <= limits.vcpus
        )

    def _check_possible(self, need: Need) -> None:
        limits = self._limits
        if need.memory_mib + limits.overhead_mib > limits.memory_mib or need.vcpus > limits.vcpus:
            raise Exhausted(
                f"a sandbox of {need.memory_mib} MiB and {need.vcpus} vCPUs is more than this host"
                f" gives to all: {limits.memory_mib} MiB and {limits.vcpus} vCPUs",
                hint="ask for less, or raise max_memory_mib in the configuration",
            )

    def _full(self) -> str:
        taken, limits = self._granted.values(), self._limits
        memory = sum(one.memory_mib + limits.overhead_mib for one in taken)
        return (
            f"{len(taken)} of {limits.sandboxes} sandboxes, {memory} of {limits.memory_mib} MiB, "
            f"{sum(one.vcpus for one in taken)} of {limits.vcpus} vCPUs are taken"
        )
