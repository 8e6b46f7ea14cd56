"""What processes cost on this host: memory as PSS, CPU time, and which processes to count.

Layer 6. Called by `targets` and `suite`. Root sees every process; other users only their own.
A process that ends while it is looked at counts as nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import psutil

Processes = Callable[[], Iterable[psutil.Process]]
"""Looked up at every call, since they come and go."""


def family(pids: Iterable[int]) -> set[psutil.Process]:
    """The processes of these pids that run, and all they have started."""
    found: set[psutil.Process] = set()
    for pid in pids:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            found |= {process, *process.children(recursive=True)}
    return found


def of_uids(uids: range) -> set[psutil.Process]:
    """Every process that runs as one of these users."""
    return {process for process in psutil.process_iter() if _uid(process) in uids}


def pss(processes: Iterable[psutil.Process]) -> int:
    """Bytes, each shared page counted in parts, so that a sum counts it once.

    The page cache (of an image's root, say) belongs to no process and is not in it.
    """
    return sum(map(_pss, processes))


def rss(process: psutil.Process) -> int:
    """Bytes; 0 where it has ended. Much cheaper than `pss`."""
    with suppress(psutil.Error):
        return int(process.memory_info().rss)
    return 0


def cpu_seconds(processes: Iterable[psutil.Process]) -> dict[psutil.Process, float]:
    """User and system time of each one so far, in steps of 10 ms (proc(5))."""
    return {process: _cpu(process) for process in processes}


async def cpu_share(processes: Processes, seconds: float) -> float:
    """The part of one core that these use, over a window of so long."""
    before, since = cpu_seconds(processes()), time.perf_counter()
    await asyncio.sleep(seconds)  # the window: there is no event to wait for
    after, took = cpu_seconds(processes()), time.perf_counter() - since
    return sum(spent - before.get(process, 0.0) for process, spent in after.items()) / took


def _uid(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        return int(process.uids().real)
    return -1


def _pss(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        return int(process.memory_full_info().pss)
    return 0


def _cpu(process: psutil.Process) -> float:
    with suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0
