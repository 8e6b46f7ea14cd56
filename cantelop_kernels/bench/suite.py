"""The whole run: every measure on every target, the targets taking turns.

Layer 6. Called by `cli.bench` and `tests/bench`. Each measure goes over all targets before the next
one begins, so that what else the machine does meets them alike; before each sample all of them are
at rest.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import Any

from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager

from cantelop_kernels.bench import host, measures
from cantelop_kernels.bench.figures import Results, Row
from cantelop_kernels.bench.targets import Target

Tell = Callable[[str], None]
"""Told what begins now."""

_MIB = 1 << 20
_REST = 2.0
"""Seconds between the last thing that an idle kernel did and the window in which it is watched."""

_SLEEP = "import time; time.sleep(100)"
_LOOP = "while True: pass"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything; sizes of output in MB (10**6 bytes)."""

    starts: int = 20
    round_trips: int = 200
    iopub_mb: int = 50
    prints: int = 10_000
    stall_seconds: float = 5.0
    """In which the slow reader reads nothing at all, to begin with."""
    passing_mb: int = 1000
    sandboxes: int = 4
    """Warm ones, idle ones, and simultaneous starts."""
    bursts: int = 3
    restarts: int = 3
    interrupts: int = 3
    idle_seconds: float = 30.0


FULL = Sizes()
QUICK = Sizes(3, 30, 10, 2000, 2.0, 50, 2, 1, 1, 1, 5.0)


@dataclass(frozen=True, slots=True)
class _Open:
    """A target's kernel that goes through the measures of `Suite._sessions`."""

    target: Target
    km: AsyncKernelManager
    kc: AsyncKernelClient

    @property
    def name(self) -> str:
        return self.target.about.name


Measure = Callable[[_Open], Awaitable[Any]]


async def measure(
    targets: Sequence[Target], sizes: Sizes, machine: dict[str, Any], tell: Tell
) -> Results:
    """Run everything. Raises the error of a kernel that does not start or answer."""
    about = [target.about for target in targets]
    results = Results(machine, asdict(sizes), about, rows(sizes))
    suite = _Suite(targets, sizes, results, tell)
    await suite.starts()
    await suite.sessions()
    await suite.idle()
    await suite.bursts()
    return results


def rows(sizes: Sizes) -> list[Row]:
    """All figures of a run, in the order in which they are shown."""
    count = sizes.sandboxes
    return [
        Row("start_kernel_info", "start to kernel_info reply", "s"),
        Row("start_execute", "start to execute_reply", "s"),
        Row("start_execute_p99", "start to execute_reply, p99", "s"),
        Row("burst", f"{count} starts at once", "s"),
        Row("burst_p99", f"{count} starts at once, p99", "s"),
        Row("restart", "restart to execute_reply", "s"),
        Row("shutdown", "shutdown", "s"),
        Row("round_trip", "execute round trip", "ms"),
        Row("round_trip_p99", "execute round trip, p99", "ms"),
        Row("interrupt_sleep", "interrupt of time.sleep", "ms"),
        Row("interrupt_loop", "interrupt of a busy loop", "ms"),
        Row("iopub", f"iopub, {sizes.iopub_mb} MB", "MB/s", "higher"),
        Row("prints", f"{sizes.prints:,} flushed prints", "s"),
        Row("prints_lost", "lost of them", ""),
        Row("prints_lost_slow", "lost of them, slow reader", ""),
        Row("growth", f"daemon, growth over {sizes.passing_mb:,} MB", "MiB"),
        Row("memory_host", "idle kernel, memory on the host", "MiB"),
        Row("memory_guest", "idle kernel, memory in the guest", "MiB"),
        Row("cpu", "idle kernel, CPU", "%"),
        Row("cpu_daemon", f"daemon with {count} idle, CPU", "%"),
    ]


class _Suite:
    def __init__(
        self, targets: Sequence[Target], sizes: Sizes, results: Results, tell: Tell
    ) -> None:
        self._targets = targets
        self._sizes = sizes
        self._results = results
        self._tell = tell

    async def starts(self) -> None:
        """The first start of each target is not counted: it fills the caches."""
        for number in range(self._sizes.starts + 1):
            self._tell(f"start {number} of {self._sizes.starts}" if number else "first start")
            for target in self._targets:
                found = await self._start(target)
                for name, seconds in found.items() if number else ():
                    self._results.add(name, target.about.name, [seconds])
        for name in ("start_kernel_info", "start_execute", "shutdown"):
            self._results.summarise(name)

    async def _start(self, target: Target) -> dict[str, float]:
        await self._settle()
        km = target.manager()
        async with measures.started(km) as start:
            return {
                "start_kernel_info": start.kernel_info,
                "start_execute": start.execute,
                "shutdown": await measures.shutdown(km),
            }

    async def _settle(self) -> None:
        for target in self._targets:
            await target.settle()

    async def sessions(self) -> None:
        """What a kernel does once it runs: one of each target, all open at once."""
        async with AsyncExitStack() as stack:
            kernels = []
            for target in self._targets:
                self._tell(f"a kernel to work with: {target.about.label}")
                km = target.manager()
                kc = await stack.enter_async_context(measures.opened(km))
                kernels.append(_Open(target, km, kc))
            await self._settle()
            await self._round_trips(kernels)
            await self._output(kernels)
            await self._restarts(kernels)

    async def _each(self, what: str, kernels: Sequence[_Open], one: Measure) -> None:
        for number, opened in enumerate(kernels, 1):
            turn = f" ({number} of {len(kernels)})" if len(kernels) > 1 else ""
            self._tell(f"{what}{turn}")
            await one(opened)

    async def _round_trips(self, kernels: Sequence[_Open]) -> None:
        async def trips(opened: _Open) -> None:
            for _ in range(self._sizes.round_trips):
                took = await measures.round_trip(opened.kc)
                self._results.add("round_trip", opened.name, [1000 * took])

        async def interrupts(opened: _Open) -> None:
            """The first one is not counted: in it the kernel loads what shows tracebacks."""
            await measures.interrupt(opened.km, opened.kc, _SLEEP)
            for name, code in (("interrupt_sleep", _SLEEP), ("interrupt_loop", _LOOP)):
                for _ in range(self._sizes.interrupts):
                    took = await measures.interrupt(opened.km, opened.kc, code)
                    self._results.add(name, opened.name, [1000 * took])

        await self._each("execute round trips", kernels, trips)
        await self._each("interrupts", kernels, interrupts)
        for name in ("round_trip", "interrupt_sleep", "interrupt_loop"):
            self._results.summarise(name)

    async def _output(self, kernels: Sequence[_Open]) -> None:
        sizes, results = self._sizes, self._results

        async def flood(opened: _Open) -> None:
            speed = await measures.throughput(opened.kc, sizes.iopub_mb)
            results.put("iopub", opened.name, speed)

        async def prints(opened: _Open) -> None:
            fast = await measures.prints(opened.kc, sizes.prints)
            results.put("prints", opened.name, fast.seconds)
            results.put("prints_lost", opened.name, fast.lost)

        async def slow(opened: _Open) -> None:
            found = await measures.prints(opened.kc, sizes.prints, sizes.stall_seconds)
            results.put("prints_lost_slow", opened.name, found.lost)

        async def passing(opened: _Open) -> None:
            assert opened.target.daemon is not None
            grown = await measures.growth(opened.kc, sizes.passing_mb, opened.target.daemon)
            results.put("growth", opened.name, grown / _MIB)

        await self._each(f"{sizes.iopub_mb} MB of iopub", kernels, flood)
        await self._each(f"{sizes.prints:,} flushed prints", kernels, prints)
        await self._each(f"{sizes.prints:,} flushed prints, slow reader", kernels, slow)
        served = [opened for opened in kernels if opened.target.daemon is not None]
        await self._each(f"{sizes.passing_mb:,} MB past the daemon", served, passing)

    async def _restarts(self, kernels: Sequence[_Open]) -> None:
        async def restart(opened: _Open) -> None:
            for _ in range(self._sizes.restarts):
                await self._settle()
                took = await measures.restart(opened.km, opened.kc)
                self._results.add("restart", opened.name, [took])

        await self._each("restart", kernels, restart)
        self._results.summarise("restart")

    async def idle(self) -> None:
        """Kernels that wait for somebody: what that costs in memory and CPU."""
        for target in self._targets:
            self._tell(f"{self._sizes.sandboxes} idle: {target.about.label}")
            await self._settle()
            async with AsyncExitStack() as stack:
                await self._idle(target, stack)

    async def _idle(self, target: Target, stack: AsyncExitStack) -> None:
        name, put = target.about.name, self._results.put
        idle = await target.idle(self._sizes.sandboxes, stack)
        guests = await idle.guest_memory()
        daemon = target.daemon
        await asyncio.sleep(_REST)
        share, of_daemon = await asyncio.gather(
            host.cpu_share(idle.processes, self._sizes.idle_seconds),
            host.cpu_share(lambda: [daemon] if daemon else [], self._sizes.idle_seconds),
        )
        put("cpu", name, 100 * share / idle.count)
        put("memory_host", name, host.pss(idle.processes()) / idle.count / _MIB)
        if daemon is not None:
            put("cpu_daemon", name, 100 * of_daemon)
        if guests:
            put("memory_guest", name, statistics.mean(guests) / _MIB)

    async def bursts(self) -> None:
        """Starts at the same moment: each to its first execute reply."""
        for number in range(1, self._sizes.bursts + 1):
            for target in self._targets:
                self._tell(
                    f"{self._sizes.sandboxes} starts at once, {number} of {self._sizes.bursts}:"
                    f" {target.about.label}"
                )
                await self._settle()
                self._results.add("burst", target.about.name, await self._burst(target))
        self._results.summarise("burst")

    async def _burst(self, target: Target) -> list[float]:
        managers = [target.manager() for _ in range(self._sizes.sandboxes)]
        together = asyncio.Barrier(len(managers))
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(_first_execute(km, together)) for km in managers]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]


async def _first_execute(km: AsyncKernelManager, together: asyncio.Barrier) -> float:
    """None is shut down before all have answered."""
    async with measures.started(km) as start:
        await together.wait()
        return start.execute
