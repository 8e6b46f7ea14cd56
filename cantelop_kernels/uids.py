"""All processes of a range of uids: found and killed, whoever started them.

Layer 2. A process that a VMM or helper has forked is no child of the daemon; by its uid it is found
all the same. Used when a sandbox ends, and for what a dead daemon left behind.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Container, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from cantelop_kernels.errors import DeadlineExceeded
from cantelop_kernels.process import run_patiently, wait_pidfd

_DEADLINE = 10.0
_EMPTY_LOOKS = 3
_LOOKS = 50
_ENV = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
"""All that a process with a sandbox's uid may see of the daemon's environment."""


async def kill_all(uids: Iterable[int]) -> None:
    """Kill every process of these uids and wait for their end.

    kill(2) of -1 as that uid reaches all its processes at once, so that none can get away by
    forking; a look at /proc alone would miss one that forks and ends between two readings. Root
    kills as well what is found after that, since a process of that uid may have killed the killer.
    Raises DeadlineExceeded where one does not die.
    """
    for uid in uids:
        await _kill_uid(uid)


async def _kill_uid(uid: int) -> None:
    kill = [*_as_user(uid), "sh", "-c", "kill -KILL -1"]
    for _ in range(_LOOKS):
        await run_patiently(kill, env=_ENV, deadline=_DEADLINE, check=False)
        found = _of(range(uid, uid + 1))
        if not found:
            return
        for pid in found:
            await _kill_one(pid, uid)
    raise DeadlineExceeded(
        f"processes of uid {uid} come back faster than they are killed", hint="look at them (ps)"
    )


async def kill_found(uids: Container[int]) -> list[str]:
    """The same for a range of many uids, where few have a process; returns what was found, in
    words."""
    killed: list[str] = []
    empty = 0
    while empty < _EMPTY_LOOKS:
        found = _of(uids)
        empty = 0 if found else empty + 1
        await kill_all({uid for uid, _ in found.values()})
        killed += [f"process {pid} ({name})" for pid, (_, name) in found.items()]
    return killed


def _as_user(uid: int) -> list[str]:
    """With no capability left: with CAP_KILL, -1 would mean every process of the machine."""
    ids = (f"--reuid={uid}", f"--regid={uid}", "--clear-groups")
    return ["setpriv", *ids, "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", "--"]


def _of(uids: Container[int]) -> dict[int, tuple[int, str]]:
    """Uid and name by pid. Zombies are left out: they run no more, their parent has to reap them.

    Told apart by their real uid, the one that kill(2) goes by.
    """
    found = {}
    for process in psutil.process_iter(["pid", "name", "uids", "status"]):
        ids, status = process.info["uids"], process.info["status"]
        if ids is not None and ids.real in uids and status != psutil.STATUS_ZOMBIE:
            found[process.info["pid"]] = (ids.real, process.info["name"])
    return found


async def _kill_one(pid: int, uid: int) -> None:
    """And wait for its end, if that pid is still the process that was meant."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{pid}").stat().st_uid == uid:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
                async with asyncio.timeout(_DEADLINE):
                    await wait_pidfd(fd)
    except TimeoutError:
        raise DeadlineExceeded(
            f"process {pid} of a sandbox does not end", hint="look at it, then try again"
        ) from None
    finally:
        os.close(fd)
