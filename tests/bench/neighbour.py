"""`python -m tests.bench.neighbour`: what a hostile guest costs the one beside it.

Two sandboxes. One is asked for `execute('1')` again and again, while the other is first busy and
well-behaved (one process that computes), and then hostile in several ways, one after another. It
prints the median of each, and its ratio to the well-behaved one. Run it on a machine that does
nothing else; under emulation it needs two free cores.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from jupyter_client.asynchronous.client import AsyncKernelClient

from cantelop_kernels import client, schema
from tests.fakes.host_stack import KEY, connected, output
from tests.vm.test_residue import environment, serve

ROUNDS = 100
SECONDS = 40
HOSTILE = {
    "cpu": "import subprocess as s\nfor _ in range(8): s.Popen(['timeout', '{t}', 'yes'], \
stdout=s.DEVNULL)",
    "forks": "import subprocess as s\ns.Popen(['timeout', '-s', 'KILL', '{t}', 'sh', '-c', \
'while :; do sleep 60 & done'])",
    "memory": "import subprocess as s\ns.Popen(['timeout', '{t}', 'python3', '-c', 'x = []\\nwhile \
1: x.append(bytearray(1 << 20))'])",
    "disk": "import subprocess as s\ns.Popen(['timeout', '{t}', 'dd', 'if=/dev/zero', 'of=/tmp/x', \
'bs=1M', 'oflag=append', 'conv=notrunc'])",
}
BUSY = "import subprocess as s\ns.Popen(['timeout', '{t}', 'yes'], stdout=s.DEVNULL)"


async def median(kernel: AsyncKernelClient) -> float:
    """Of `ROUNDS` round trips, in seconds; stops early where they take too long."""
    times: list[float] = []
    end = time.monotonic() + SECONDS
    while len(times) < ROUNDS and time.monotonic() < end:
        begun = time.monotonic()
        await output(kernel, "1")
        times.append(time.monotonic() - begun)
    return statistics.median(times)


async def beside(daemon: client.Client, kernel: AsyncKernelClient, code: str) -> float:
    """The median while a fresh neighbour runs `code`."""
    other = await daemon.create(schema.SessionRequest(key=KEY, allow_emulation=True))
    try:
        async with connected(other, seconds=60) as theirs:
            await output(theirs, code.replace("{t}", str(SECONDS + 5)), seconds=60)
            return await median(kernel)
    finally:
        await daemon.end(other.id)


async def measure(env: dict[str, str]) -> None:
    daemon = client.Client(Path(env["CANTELOP_SOCKET"]))
    own = await daemon.create(schema.SessionRequest(key=KEY, allow_emulation=True))
    async with connected(own, seconds=60) as kernel:
        await median(kernel)
        calm = await beside(daemon, kernel, BUSY)
        print(f"well-behaved  {calm * 1e3:6.1f} ms", flush=True)
        for name, code in HOSTILE.items():
            found = await beside(daemon, kernel, code)
            print(f"{name:12}  {found * 1e3:6.1f} ms  {found / calm:.2f}", flush=True)
    await daemon.end(own.id)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        env = environment(Path(folder))
        process = serve(env)
        try:
            asyncio.run(measure(env))
        finally:
            process.terminate()
            process.wait(60)


if __name__ == "__main__":
    main()
