"""A kernel of ours for one command: the flags that shape it, its manager, its client, its end.

Used by `run` and `exec`. It is an ordinary jupyter_client KernelManager with a kernelspec that
exists in memory only, so nothing has to be installed, and the provisioner is the same as for every
other Jupyter client.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager

from cantelop_kernels.cli import terminal
from cantelop_kernels.client import Client
from cantelop_kernels.errors import (
    CantelopError,
    DaemonUnavailable,
    DeadlineExceeded,
    NotFound,
    OutOfMemory,
    SandboxGone,
)
from cantelop_kernels.schema import SessionView

READY_DEADLINE = 120
"""Seconds from a kernel that listens to its first answer (1.3 s under emulation)."""

END_DEADLINE = 30.0

_POLL = 0.5
"""Seconds between looks at whether the kernel lives; the manager offers no event for it."""


_NOTICES = 2.0
"""Seconds between looks at what there is to tell."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of every command that starts a sandbox."""
    group = parser.add_argument_group("sandbox")
    group.add_argument("--app", metavar="A", help="the App (policy) to run under")
    group.add_argument("--image", metavar="I", help="image name or digest, instead of the App's")
    group.add_argument(
        "--vcpus", type=vcpus, metavar="N", help="virtual CPUs, instead of the App's"
    )
    group.add_argument(
        "--memory", type=mebibytes, metavar="MIB", help="memory, instead of the App's"
    )
    group.add_argument(
        "--allow-emulation",
        action="store_true",
        help="run even without hardware virtualization (no security boundary)",
    )


def vcpus(text: str) -> int:
    """An argparse type."""
    return _positive(text, "a whole number of CPUs, such as 2")


def count(text: str) -> int:
    """An argparse type."""
    return _positive(text, "a whole number, such as 3")


def mebibytes(text: str) -> int:
    """An argparse type."""
    return _positive(text, "a whole number of MiB, such as 512")


def _positive(text: str, what: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:20]) < 1 << 31):
        raise argparse.ArgumentTypeError(f"must be {what}, not {text[:40]!r}")
    return int(text)


def positive_seconds(text: str) -> float:
    """An argparse type."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(
            f"must be a number of seconds, more than 0, such as 30, not {text[:40]!r}"
        )
    return value


def provisioner_config(args: argparse.Namespace) -> dict[str, Any]:
    """The provisioner's stanza: only what was asked for, the rest is as the App says."""
    wanted = {
        "app": args.app,
        "image": args.image,
        "vcpus": args.vcpus,
        "memory_mib": args.memory,
        "allow_emulation": args.allow_emulation or None,
        "grace_seconds": 0.0,  # nobody comes back for the kernel of a command
        "last_words": False,  # the command tells itself how its kernel died
    }
    return {name: value for name, value in wanted.items() if value is not None}


class _OneSpec(KernelSpecManager):
    """Knows one kernelspec, which is in no file."""

    def __init__(self, spec: KernelSpec, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._spec = spec

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        return self._spec


def manager(args: argparse.Namespace) -> AsyncKernelManager:
    """A manager for a kernel in a microVM; nothing is started yet."""
    return provisioned("cantelop", provisioner_config(args))


def provisioned(
    provisioner: str, config: dict[str, Any], python: str = "python3", **fields: Any
) -> AsyncKernelManager:
    """A manager for ipykernel by any provisioner; `fields` are further ones of the kernelspec."""
    spec = KernelSpec(
        argv=[python, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        display_name="Python 3 (microVM)",
        language="python",
        metadata={"kernel_provisioner": {"provisioner_name": provisioner, "config": config}},
        **fields,
    )
    return AsyncKernelManager(kernel_name="cantelop-python3", kernel_spec_manager=_OneSpec(spec))


async def answering(km: AsyncKernelManager, kc: AsyncKernelClient) -> None:
    """Wait until the kernel has answered and its output is subscribed to.

    Raises DeadlineExceeded, or the error of a kernel that died.
    """
    try:
        await kc.wait_for_ready(timeout=READY_DEADLINE)
    except RuntimeError as error:
        if await km.is_alive():
            raise DeadlineExceeded(
                f"the kernel did not answer within {READY_DEADLINE} s",
                hint="look at `cantelop ps` and `cantelop logs ID`",
            ) from error
        raise await death(km, "before it answered") from error


@asynccontextmanager
async def started(
    km: AsyncKernelManager,
    ready: Callable[[AsyncKernelManager, AsyncKernelClient], Awaitable[None]] = answering,
    **launch: Any,
) -> AsyncIterator[AsyncKernelClient]:
    """Start the kernel, yield a client once it is `ready`, and leave nothing of either.

    `launch` goes to `start_kernel`; of it a local kernel's process gets what Popen knows.
    A failed launch raises the provisioner's error. The end is orderly (what the kernel still has
    to flush is flushed) unless this ends by an exception or a cancellation: then it is at once.
    """
    kc: AsyncKernelClient | None = None
    now = True
    try:
        await km.start_kernel(**launch)
        kc = km.client()
        kc.start_channels()
        await ready(km, kc)
        yield kc
        now = False
    finally:
        task = asyncio.ensure_future(_end(km, kc, now=now))
        await _uncancelled(task)


async def _end(km: AsyncKernelManager, kc: AsyncKernelClient | None, *, now: bool) -> None:
    if kc is not None:
        kc.stop_channels()
    async with asyncio.timeout(END_DEADLINE):
        try:
            if km.has_kernel:
                await km.shutdown_kernel(now=now or not await km.is_alive())
        finally:
            await km.cleanup_resources()


async def _uncancelled(task: asyncio.Task[None]) -> None:
    """The undoing goes on to its end, however often its caller is cancelled meanwhile."""
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


async def until_dead(km: AsyncKernelManager) -> None:
    """Returns when the kernel has ended."""
    alive = True
    while alive:
        await asyncio.sleep(_POLL)
        alive = await km.is_alive()


async def death(km: AsyncKernelManager, where: str) -> CantelopError:
    """The error for a kernel that ended by itself; call it before the manager cleans up."""
    try:
        view = await _view(km)
    except DaemonUnavailable as error:
        how = "is gone, and its sandbox with it"
        if error.details.get("stopped"):
            how = "was stopped, and has ended its sandboxes"
        return SandboxGone(
            f"the kernel died {where}: the daemon {how}",
            hint="start the daemon again (sudo cantelop serve), and look at its log",
        )
    ended = view.exit if view else None
    if ended is None:
        return SandboxGone(f"the kernel died {where}", hint="run it again")
    if ended.oom:
        limit, peak = ended.memory_limit, ended.memory_peak
        return OutOfMemory(
            f"the kernel died {where}: out of memory"
            f" (limit {limit / 2**20:.0f} MiB, peak {peak / 2**20:.0f} MiB)",
            hint="use less memory at a time, or ask for more with --memory MIB",
            limit=limit,
            peak=peak,
        )
    return SandboxGone(f"the kernel died {where}: {ended.reason}", hint="run it again")


@asynccontextmanager
async def telling(km: AsyncKernelManager) -> AsyncIterator[None]:
    """Show what the user must be told about the sandbox, now and as it comes: that emulation is no
    boundary, that its disk is nearly full, or its time nearly over."""
    told = 0

    async def tell() -> None:
        nonlocal told
        view = await _view(km)
        for text in view.notices[told:] if view else []:
            terminal.note(text)
            told += 1

    async def go_on() -> None:
        while True:
            await asyncio.sleep(_NOTICES)
            with suppress(CantelopError):  # a daemon that does not answer is another's business
                await tell()

    await tell()
    task = asyncio.ensure_future(go_on())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _view(km: AsyncKernelManager) -> SessionView | None:
    """The session as the daemon sees it; None where there is none, or nobody who knows it."""
    if km.provisioner is None:
        return None
    info = await km.provisioner.get_provisioner_info()
    session = info.get("session")
    if not session:
        return None
    try:
        return await Client(Path(info["socket"])).get(session)
    except NotFound:
        return None
