"""All processes of a range of uids: found and killed, whoever started them.

Layer 2. A process that a VMM or helper has forked is no child of the daemon; by its uid it is found
all the same. Used when a sandbox ends, and for what a dead daemon left behind.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Container
from contextlib import suppress
from pathlib import Path

import psutil

from cantelop_kernels.errors import DeadlineExceeded
from cantelop_kernels.process import wait_pidfd

_DEADLINE = 10.0


async def kill_all(uids: Container[int]) -> list[str]:
    """Kill them and wait for their end; returns what was found, in words.

    Raises DeadlineExceeded where one does not die.
    """
    killed: list[str] = []
    for process in psutil.process_iter(["pid", "name", "uids"]):
        ids = process.info["uids"]
        if ids is None or ids.real not in uids:
            continue
        with suppress(ProcessLookupError):
            await _kill(process.info["pid"], uids)
            killed.append(f"process {process.info['pid']} ({process.info['name']})")
    return killed


async def _kill(pid: int, uids: Container[int]) -> None:
    """By pidfd, and only once that pid is known to be the process that was meant."""
    fd = os.pidfd_open(pid)
    try:
        if Path(f"/proc/{pid}").stat().st_uid not in uids:
            return
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        async with asyncio.timeout(_DEADLINE):
            await wait_pidfd(fd)
    except FileNotFoundError:
        return
    except TimeoutError:
        raise DeadlineExceeded(
            f"process {pid} of a sandbox does not end", hint="look at it, then try again"
        ) from None
    finally:
        os.close(fd)
