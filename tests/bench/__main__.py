"""Measure a sandboxed kernel and a plain local one, side by side, and print the ratios.

Run as `python -m tests.bench [--starts N]` on an otherwise idle machine; writes `out/bench.json`
too. Nothing here asserts: figures of a busy machine are no failure of the code.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager
from rich.console import Console
from rich.table import Table

from cantelop_kernels.client import ensure_daemon
from cantelop_kernels.process import wait_pidfd

ROOT = Path(__file__).parents[2]
KERNELS = {"local": "python3", "microVM": "cantelop-python3"}
ROUND_TRIPS = 100
IOPUB_MB = 20
_IMPORT = "import time; "

Figures = dict[str, float]


@asynccontextmanager
async def kernel(name: str) -> AsyncIterator[tuple[AsyncKernelManager, AsyncKernelClient]]:
    """A started kernel and a client that has had its first reply."""
    manager = AsyncKernelManager(kernel_name=name)
    await manager.start_kernel()
    client = manager.client()
    client.start_channels()
    try:
        await client.wait_for_ready(timeout=120)
        await run(client, "1")
        yield manager, client
    finally:
        client.stop_channels()
        await manager.shutdown_kernel(now=True)


async def run(client: AsyncKernelClient, code: str) -> int:
    """Execute; the characters that arrived on stdout."""
    size = 0

    def hook(message: dict[str, Any]) -> None:
        nonlocal size
        if message["msg_type"] == "stream":
            size += len(message["content"]["text"])

    await client.execute_interactive(code, output_hook=hook, timeout=300)
    return size


async def start_time(name: str) -> float:
    begun = time.perf_counter()
    async with kernel(name):
        return time.perf_counter() - begun


async def round_trip(client: AsyncKernelClient) -> float:
    async def one() -> float:
        begun = time.perf_counter()
        await run(client, "1")
        return time.perf_counter() - begun

    return statistics.median([await one() for _ in range(ROUND_TRIPS)])


async def flood(client: AsyncKernelClient) -> float:
    begun = time.perf_counter()
    size = await run(client, f"for _ in range({IOPUB_MB}): print('x' * 1_000_000)")
    took = time.perf_counter() - begun
    assert size == IOPUB_MB * 1_000_001, f"lost output: {size}"
    return took


async def interrupt(manager: AsyncKernelManager, client: AsyncKernelClient, code: str) -> float:
    """From the interrupt of a running cell to its reply."""
    client.execute(f"print('go', flush=True)\n{code}")
    while (await client.get_iopub_msg(timeout=60))["msg_type"] != "stream":
        pass
    begun = time.perf_counter()
    await manager.interrupt_kernel()
    await client.get_shell_msg(timeout=60)
    return time.perf_counter() - begun


async def restart(manager: AsyncKernelManager, client: AsyncKernelClient) -> float:
    begun = time.perf_counter()
    await manager.restart_kernel(now=True)
    await client.wait_for_ready(timeout=120)
    await run(client, "1")
    return time.perf_counter() - begun


async def measure(name: str, starts: int) -> Figures:
    figures = {
        "start to first execute_reply (s)": statistics.median(
            [await start_time(name) for _ in range(starts)]
        )
    }
    async with kernel(name) as (manager, client):
        figures["execute('1') round trip (ms)"] = 1000 * await round_trip(client)
        figures[f"{IOPUB_MB} MB of iopub (s)"] = await flood(client)
        for code in (f"{_IMPORT}time.sleep(100)", "while True: pass"):
            figures[f"interrupt of `{code.removeprefix(_IMPORT)}` (s)"] = await interrupt(
                manager, client, code
            )
        figures["restart to first execute_reply (s)"] = await restart(manager, client)
        begun = time.perf_counter()
        client.stop_channels()
        await manager.shutdown_kernel()
        figures["graceful shutdown (s)"] = time.perf_counter() - begun
    return figures


def table(results: dict[str, Figures]) -> Table:
    made = Table(
        "", *results, "ratio", title="Plain local ipykernel and microVM, same run (medians)"
    )
    local, sandboxed = results.values()
    for name, value in local.items():
        other = sandboxed[name]
        made.add_row(name, f"{value:.3g}", f"{other:.3g}", f"{other / value:.2f}")
    return made


async def stop(pid: int) -> None:
    """End the daemon, and wait until it has taken everything away."""
    pidfd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        await wait_pidfd(pidfd)
    finally:
        os.close(pidfd)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--starts", type=int, default=5, help="how many starts to take the median of"
    )
    starts = parser.parse_args().starts
    with tempfile.TemporaryDirectory(prefix="cantelop-bench-") as folder:
        os.environ["JUPYTER_PATH"] = str(ROOT / "share" / "jupyter")
        os.environ["CANTELOP_SOCKET"] = f"{folder}/c.sock"
        os.environ["CANTELOP_CONFIG"] = f"{folder}/c.toml"
        Path(folder, "c.toml").write_text("uid_base = 950000\nallow_emulation = true\n")
        daemon = await ensure_daemon()
        try:
            results = {label: await measure(name, starts) for label, name in KERNELS.items()}
        finally:
            await stop((await daemon.info()).pid)
    Console().print(table(results))
    out = ROOT / "out" / "bench.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
