"""One measurement each, over one kernel: an ordinary KernelManager and an unmodified client.

Layer 6. Called by `suite`. Times are in seconds, by the client's clock, from the request to the
last thing that a user waits for. All raise DeadlineExceeded where the kernel does not answer, and
the error of a kernel that has died (OutOfMemory, SandboxGone).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from queue import Empty
from textwrap import dedent
from typing import Any

import psutil
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager

from cantelop_kernels.bench import host
from cantelop_kernels.cli import kernel
from cantelop_kernels.errors import CantelopError, DeadlineExceeded
from cantelop_kernels.process import DEVNULL

DEADLINE = 180.0
"""Seconds for any one answer."""

OUTPUT_DEADLINE = 900.0
"""Seconds for all the output of one cell; 1 GB takes about two minutes from an emulated guest."""

_QUIET = 2.0
"""Seconds without a message until it is asked whether the kernel lives, and, where the reply is
there already, until the message that ends the output counts as lost."""

_SLOW = 0.001
"""Seconds that the slow reader takes over each message, once it reads."""

_LONG = 1000
"""Characters that the slow reader's messages have besides their number."""

_SILENT: dict[str, Any] = {"stdout": DEVNULL, "stderr": DEVNULL}
"""For a local kernel, whose warnings would come between the lines of the progress."""

_MEGABYTE = 1_000_000

_MEMORY = """
_m = dict(line.split(":") for line in open("/proc/meminfo"))
print(1024 * (int(_m["MemTotal"].split()[0]) - int(_m["MemAvailable"].split()[0])))
"""


@dataclass(frozen=True, slots=True)
class _Pace:
    """How a reader takes its time: seconds before the first message, and after each one."""

    first: float
    each: float


_AT_ONCE = _Pace(0, 0)


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds from `start_kernel()` to the first replies; both were asked for at once."""

    kernel_info: float
    execute: float


def opened(km: AsyncKernelManager) -> AbstractAsyncContextManager[AsyncKernelClient]:
    """A kernel to work with, and a client that it has answered; shut down in order at the end."""
    return kernel.started(km, **_SILENT)


@asynccontextmanager
async def started(km: AsyncKernelManager) -> AsyncIterator[Start]:
    """A kernel that has just answered; it is shut down in order at the end.

    Unlike `wait_for_ready` this does not wait another 0.2 s to see iopub quiet.
    """
    begun = time.perf_counter()
    replies: list[float] = []

    async def ready(_: AsyncKernelManager, kc: AsyncKernelClient) -> None:
        replies.extend(await _first_replies(kc, begun))

    async with kernel.started(km, ready, **_SILENT):
        yield Start(*replies)


async def restart(km: AsyncKernelManager, kc: AsyncKernelClient) -> float:
    """An orderly restart, to the first execute reply on the channels that are open already."""
    begun = time.perf_counter()
    await km.restart_kernel()
    return (await _first_replies(kc, begun))[1]


async def shutdown(km: AsyncKernelManager) -> float:
    """An orderly one; returns when the manager says that the kernel is gone."""
    begun = time.perf_counter()
    async with _deadline(DEADLINE, "shut down"):
        await km.shutdown_kernel()
    return time.perf_counter() - begun


async def round_trip(kc: AsyncKernelClient) -> float:
    """`execute('1')`, to its reply and to the end of its output."""
    return await run(kc, "1")


async def throughput(kc: AsyncKernelClient, megabytes: int) -> float:
    """MB/s of iopub, printed in pieces of 1 MB. Raises CantelopError where some of it is lost."""
    size = 0

    def count(text: str) -> None:
        nonlocal size
        size += len(text)

    took = await run(kc, f"for _ in range({megabytes}): print('x' * {_MEGABYTE - 1})", count)
    if size != megabytes * _MEGABYTE:
        raise CantelopError(
            f"of {megabytes} MB of output, {size} bytes arrived", hint="measure again"
        )
    return megabytes / took


async def growth(kc: AsyncKernelClient, megabytes: int, process: psutil.Process) -> int:
    """Bytes by which `process` grew, at its most, while so much output went by.

    In flushed pieces of a tenth of a MB, so that what the kernel queues (1000 messages, ZMQ's
    high-water mark) fits a small guest; and not by print, all of which IPython 9 keeps in memory.
    """
    sizes = [host.rss(process)]
    pieces, size = 10 * megabytes, _MEGABYTE // 10
    code = f"""
        import sys
        for _ in range({pieces}):
            type(sys.stdout).write(sys.stdout, "x" * {size})
            sys.stdout.flush()
    """
    await run(kc, dedent(code), lambda _: sizes.append(host.rss(process)))
    return max(sizes) - sizes[0]


@dataclass(frozen=True, slots=True)
class Prints:
    """Flushed prints: seconds until the last had arrived, and how many never did."""

    seconds: float
    lost: int


async def prints(kc: AsyncKernelClient, count: int, stall: float = 0.0) -> Prints:
    """A message each. With `stall` a slow reader: for so many seconds it reads nothing, and then
    takes its time over each message; these are longer, to fill what buffers there are."""
    arrived: set[str] = set()
    more = f", '.' * {_LONG}" if stall else ""
    code = f"for _n in range({count}): print(_n{more}, flush=True)"
    pace = _Pace(stall, _SLOW) if stall else _AT_ONCE
    took = await run(kc, code, lambda text: arrived.update(text.split()), pace)
    return Prints(took, len(set(map(str, range(count))) - arrived))


async def interrupt(km: AsyncKernelManager, kc: AsyncKernelClient, code: str) -> float:
    """From the interrupt of running code to its reply."""
    message = kc.execute(f"print('go', flush=True)\n{code}")
    async with _deadline(DEADLINE, "begin"):
        while (await kc.get_iopub_msg())["msg_type"] != "stream":
            pass
    begun = time.perf_counter()
    await km.interrupt_kernel()
    await _reply(kc, message)
    took = time.perf_counter() - begun
    await _output(kc, message, _ignore, _AT_ONCE)
    return took


async def guest_memory(kc: AsyncKernelClient) -> int:
    """Bytes in use on the machine that the kernel sees, its page cache left out."""
    said: list[str] = []
    await run(kc, _MEMORY, said.append)
    return int("".join(said))


def _ignore(_: str) -> None:
    pass


async def run(
    kc: AsyncKernelClient,
    code: str,
    on_text: Callable[[str], None] = _ignore,
    pace: _Pace = _AT_ONCE,
) -> float:
    """Execute, read all that it prints, then its reply; the seconds that took."""
    begun = time.perf_counter()
    message = kc.execute(code)
    async with _deadline(OUTPUT_DEADLINE, "print all it had to"):
        await _output(kc, message, on_text, pace)
    await _reply(kc, message)
    return time.perf_counter() - begun


async def _output(
    kc: AsyncKernelClient, message: str, on_text: Callable[[str], None], pace: _Pace
) -> None:
    """Until the kernel is idle again, or, where that was lost, until no more comes."""
    if pace.first:
        await asyncio.sleep(pace.first)
    while True:
        try:
            found = await kc.get_iopub_msg(timeout=_QUIET)
        except Empty:
            if await _has_reply(kc):
                return
            await _check_alive(kc)
            continue
        if found["parent_header"].get("msg_id") != message:
            continue
        if found["content"].get("execution_state") == "idle":
            return
        if found["msg_type"] == "stream":
            on_text(found["content"]["text"])
        if pace.each:
            await asyncio.sleep(pace.each)


async def _has_reply(kc: AsyncKernelClient) -> bool:
    socket: Any = kc.shell_channel.socket
    return bool(await socket.poll(0))


async def _first_replies(kc: AsyncKernelClient, begun: float) -> tuple[float, float]:
    info, execute = kc.kernel_info(), kc.execute("1")
    await _reply(kc, info)
    first = time.perf_counter() - begun
    await _reply(kc, execute)
    return first, time.perf_counter() - begun


async def _reply(kc: AsyncKernelClient, message: str) -> dict[str, Any]:
    async with _deadline(DEADLINE, "answer"):
        while True:
            try:
                found: dict[str, Any] = await kc.get_shell_msg(timeout=_QUIET)
            except Empty:
                await _check_alive(kc)
                continue
            if found["parent_header"].get("msg_id") == message:
                return found


async def _check_alive(kc: AsyncKernelClient) -> None:
    km: Any = kc.parent
    if not await km.is_alive():
        raise await kernel.death(km, "while it was measured")


@asynccontextmanager
async def _deadline(seconds: float, what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise DeadlineExceeded(
            f"the kernel did not {what} within {seconds:g} s",
            hint="measure on a machine that is otherwise idle",
        ) from None
