"""What a daemon that died left behind: found by uid and name, and taken away.

Layer 5. Runs once, before a daemon serves. In normal running every acquisition has its own undo and
nothing is left for this. Nothing outside the daemon's own uid range, state folder and socket folder
is touched.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import psutil

from cantelop_kernels.errors import DeadlineExceeded
from cantelop_kernels.jail import sandboxes
from cantelop_kernels.process import wait_pidfd
from cantelop_kernels.slot import uid_range

_DEADLINE = 10.0


async def reap(state: Path, uid_base: int) -> list[str]:
    """Kill the left-over processes, then remove their folders; returns what was found, in words.

    Raises DeadlineExceeded where a process does not die.
    """
    found = await _kill_processes(range_=uid_range(uid_base))
    for folder in sorted(sandboxes(state).glob(f"cantelop-{uid_base}-*")):
        shutil.rmtree(folder)
        found.append(f"folder {folder.name}")
    return found


async def _kill_processes(range_: range) -> list[str]:
    killed: list[str] = []
    for process in psutil.process_iter(["pid", "name", "uids"]):
        uids = process.info["uids"]
        if uids is None or uids.real not in range_:
            continue
        with suppress(ProcessLookupError):
            await _kill(process.info["pid"], range_)
            killed.append(f"process {process.info['pid']} ({process.info['name']})")
    return killed


async def _kill(pid: int, range_: range) -> None:
    """By pidfd, and only once that pid is known to be the process that was meant."""
    fd = os.pidfd_open(pid)
    try:
        if Path(f"/proc/{pid}").stat().st_uid not in range_:
            return
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        async with asyncio.timeout(_DEADLINE):
            await wait_pidfd(fd)
    except FileNotFoundError:
        return
    except TimeoutError:
        raise DeadlineExceeded(
            f"process {pid} of an earlier daemon does not end", hint="look at it, then try again"
        ) from None
    finally:
        os.close(fd)
