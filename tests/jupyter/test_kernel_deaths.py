"""Kernels that die: by their own cells, and because their VMM does."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import nbformat
import pytest
from jupyter_client.ioloop.manager import AsyncIOLoopKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError

from tests.jupyter.conftest import READY, Stack

pytestmark = pytest.mark.vm

GREEDY = """
print("up", flush=True)
kept = []
while True:
    kept.append(b"x" * (8 << 20))
"""


async def kernel_death(cell: Any, name: str, deed: Any) -> float:
    """Run one cell; once it has printed do `deed`; seconds from there to DeadKernelError."""
    client = NotebookClient(nbformat.v4.new_notebook(cells=[cell]), kernel_name=name)
    task = asyncio.ensure_future(client.async_execute())
    async with asyncio.timeout(READY):
        while not cell.outputs and not task.done():
            await asyncio.sleep(0.02)
    began = time.monotonic()
    deed()
    with pytest.raises(DeadKernelError):
        await asyncio.wait_for(task, READY)
    return time.monotonic() - began


async def test_the_vmm_is_killed_in_the_middle_of_a_cell(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    def kill() -> None:
        (vmm,) = stack.vmms()
        os.kill(vmm.pid, signal.SIGKILL)

    code = "import time; print('up', flush=True); time.sleep(100)"
    took = await kernel_death(nbformat.v4.new_code_cell(code), "cantelop-python3", kill)
    assert took < 3
    assert "the kernel died" in caplog.text
    assert await asyncio.to_thread(stack.live) == []


async def test_a_cell_that_allocates_everything(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    took = await kernel_death(nbformat.v4.new_code_cell(GREEDY), "cantelop-small", lambda: None)
    assert took < 30
    ended = (await asyncio.to_thread(stack.last)).exit
    assert ended is not None
    assert ended.oom
    assert 0 < ended.memory_peak <= ended.memory_limit < 320 << 20
    limit, peak = ended.memory_limit / (1 << 20), ended.memory_peak / (1 << 20)
    for part in ("out of memory", f"{limit:.0f} MiB", f"peak {peak:.0f} MiB"):
        assert part in ended.reason
        assert part in caplog.text
    assert await asyncio.to_thread(stack.live) == []


async def test_autorestart(stack: Stack) -> None:
    """jupyter_server's way: the kernel comes back by itself, where its clients already are.

    It restarts "now", which hangs where a dead guest leaves its clients' connections half open.
    """
    manager = AsyncIOLoopKernelManager(kernel_name="cantelop-python3")
    await manager.start_kernel()
    restarted = asyncio.Event()
    manager.add_restart_callback(restarted.set)
    client = manager.client()
    client.start_channels()
    try:
        await client.wait_for_ready(timeout=READY)
        (vmm,) = stack.vmms()
        os.kill(vmm.pid, signal.SIGKILL)
        await asyncio.wait_for(restarted.wait(), READY)
        async with asyncio.timeout(READY):  # the callback comes before the new kernel
            while not await manager.is_alive():
                await asyncio.sleep(0.1)
        await client.wait_for_ready(timeout=READY)
        reply = await client.execute_interactive("1", timeout=READY)
        assert reply["content"]["status"] == "ok"
    finally:
        client.stop_channels()
        await manager.shutdown_kernel(now=True)
    assert await asyncio.to_thread(stack.live) == []
