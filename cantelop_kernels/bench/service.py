"""A daemon of the bench's own: its socket, settings and uids, and its end with the bench.

Layer 6. What runs on the machine already is left alone; only the state folder, and with it the
images, is shared.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cantelop_kernels import client, config
from cantelop_kernels.bench import host
from cantelop_kernels.client import Client
from cantelop_kernels.errors import DeadlineExceeded, LaunchError
from cantelop_kernels.process import Process
from cantelop_kernels.schema import Info
from cantelop_kernels.slot import MAX_SLOTS, STRIDE, uid_range

APP = "default"
"""The App that is measured: with the operator's image and size."""

PROGRAM = (sys.executable, "-m", "cantelop_kernels", "serve")
"""The daemon. The tests have another one with the same flags."""

_END = 60.0
"""Seconds for the daemon to destroy what it holds."""

_FILLED = 300.0
"""Seconds for the pool to be full: several boots at a time, under emulation."""

_LOOK = 0.2
"""Seconds between looks at the pool, which offers no event."""


@dataclass(frozen=True, slots=True)
class Service:
    """A daemon that serves. `warm` is the size of its pool; 0 where it has none."""

    client: Client
    info: Info
    uid_base: int
    warm: int

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.info.pid)

    def sandboxes(self) -> set[psutil.Process]:
        """Every process of every sandbox; the daemon itself is none."""
        found = host.family([self.info.pid]) | host.of_uids(uid_range(self.uid_base))
        return {process for process in found if process.pid != self.info.pid}

    async def settle(self) -> None:
        """Wait until the pool is full, and so at rest; at once where there is none."""
        await warm(self.client, APP, self.warm)


async def warm(service: Client, app: str, count: int) -> bool:
    """Wait until the pool holds so many sandboxes of `app` ready. False: there is no pool.

    Raises DeadlineExceeded, and LaunchError where the pool's sandboxes do not come up.
    """
    pool = getattr(service, "pool", None)
    if pool is None:
        return False
    try:
        async with asyncio.timeout(_FILLED):
            while True:
                views: list[Any] = [view for view in await pool() if app in view.apps]
                if sum(view.ready for view in views) >= count:
                    return True
                _check(views)
                await asyncio.sleep(_LOOK)
    except TimeoutError:
        raise DeadlineExceeded(f"the pool was not full within {_FILLED:g} s") from None


async def warm_memory(service: Client, app: str) -> list[int]:
    """Bytes in use in each warm guest, as it said itself; empty where there is no pool."""
    pool = getattr(service, "pool", None)
    views: list[Any] = await pool() if pool else []
    return [used for view in views if app in view.apps for used in view.memory_used]


def _check(views: Sequence[Any]) -> None:
    failed = next((view for view in views if view.failures), None)
    if failed is not None:
        raise LaunchError(f"a warm sandbox did not come up: {failed.last_error}")


@asynccontextmanager
async def serving(
    settings: config.Config,
    state: Path,
    warm: int,
    *,
    nth: int = 1,
    program: Sequence[str] = PROGRAM,
) -> AsyncIterator[Service]:
    """Run a daemon until the end of the context. `settings` are the operator's.

    `nth` tells several daemons of one bench apart: each takes its uids after the operator's own.
    The daemon ends with this process, also where that is killed. Raises what the daemon says.
    """
    uid_base = settings.uid_base + nth * STRIDE * MAX_SLOTS
    held = warm if has_pool() else 0
    with tempfile.TemporaryDirectory(prefix="cantelop-bench-") as name:
        folder = Path(name)
        (folder / "c.toml").write_text(_toml(settings, uid_base, held))
        async with _daemon(program, folder, state):
            found = Client(folder / "c.sock")
            yield Service(found, await found.info(), uid_base, held)


def has_pool() -> bool:
    """Whether this version keeps sandboxes warm."""
    return "warm" in config.App.class_trait_names()


def _toml(settings: config.Config, uid_base: int, warm: int) -> str:
    app = settings.app(APP)
    lines = [
        f"uid_base = {uid_base}",
        f"allow_emulation = {str(settings.allow_emulation).lower()}",
        f"max_sessions = {settings.max_sessions}",
        f"boot_deadline = {settings.boot_deadline}",
        f"[apps.{APP}]",
        f'image = "{app.image}"',
        f"vcpus = {app.vcpus}",
        f"memory_mib = {app.memory_mib}",
        f"scratch_mib = {app.scratch_mib}",
    ]
    lines += [f"warm = {warm}"] if warm else []
    return "\n".join(lines) + "\n"


@asynccontextmanager
async def _daemon(program: Sequence[str], folder: Path, state: Path) -> AsyncIterator[None]:
    socket = folder / "c.sock"
    read, write = os.pipe()
    try:
        try:
            process = _spawn(program, folder, state, write)
        finally:
            os.close(write)
        try:
            await client.until_ready(read, socket)
            yield
        finally:
            await process.stop(_END)
            process.close()
    finally:
        os.close(read)


def _spawn(program: Sequence[str], folder: Path, state: Path, ready: int) -> Process:
    argv = ["setpriv", "--pdeathsig=TERM", "--", *program]
    argv += ["--socket", str(folder / "c.sock"), "--config", str(folder / "c.toml")]
    argv += ["--ready-fd", str(ready)]
    with (folder / "log").open("wb") as log:
        return Process.spawn(
            argv,
            env={**os.environ, "CANTELOP_STATE": str(state)},
            stdout=log.fileno(),
            stderr=log.fileno(),
            pass_fds=(ready,),
        )
