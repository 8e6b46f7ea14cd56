"""THREATS 23 to 28: root in one guest takes all that there is; host and neighbour do not care.

The attacks are those of the list, bounded in time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from jupyter_client.asynchronous.client import AsyncKernelClient

from cantelop_kernels import cgroup, client, schema
from tests.fakes.host_stack import KEY, connected, output
from tests.vm.test_boundaries import members
from tests.vm.test_residue import UID_BASE, environment, ours, serve, wait_for_none

pytestmark = [pytest.mark.vm, pytest.mark.timeout(600)]

MIB = 1 << 20
ROOT = (
    "import subprocess as s; print(s.run(['sudo', *{argv}], capture_output=True, text=True).{out})"
)


@dataclass
class Scene:
    """Two sessions of one daemon, and the folder of the attacker's sandbox."""

    daemon: client.Client
    attacker: schema.SessionView
    neighbour: AsyncKernelClient
    folder: Path

    def memory(self) -> dict[str, int]:
        """PSS of each process of the attacker's sandbox, in bytes."""
        return {name: one.memory_full_info().pss for name, one in members(self.folder).items()}

    def taken(self) -> cgroup.Taken:
        return cgroup.hierarchy("cantelop").find(self.folder.name).taken()

    async def neighbour_answers(self, seconds: float = 10.0) -> float:
        begun = time.monotonic()
        async with asyncio.timeout(seconds):
            assert await output(self.neighbour, "print(1)") == "1\n"
        return time.monotonic() - begun


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return environment(tmp_path_factory.mktemp("resources"))


@pytest.fixture
async def scene(env: dict[str, str]) -> AsyncIterator[Scene]:
    process = await asyncio.to_thread(serve, env)
    try:
        daemon = client.Client(Path(env["CANTELOP_SOCKET"]))
        request = schema.SessionRequest(key=KEY, allow_emulation=True)
        neighbour, attacker = [await daemon.create(request) for _ in range(2)]
        places = sorted((Path(env["CANTELOP_STATE"]) / "sandboxes").glob(f"cantelop-{UID_BASE}-*"))
        async with connected(neighbour) as kernel:
            yield Scene(daemon, attacker, kernel, places[1])
            await daemon.end(neighbour.id)
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, 60)
        await asyncio.to_thread(wait_for_none)
        assert ours() == []


BOMB = """
import os, subprocess
code = "x = bytearray(); import os\\nwhile True:\\n    x += b'a' * (8 << 20)\\n    os.fork()"
subprocess.Popen(["timeout", "-s", "KILL", "15", "sudo", "python3", "-c", code])
print("on", flush=True)
"""


async def test_a_fork_bomb_that_fills_the_memory(scene: Scene) -> None:
    """THREATS 23: only that guest suffers."""
    async with connected(scene.attacker) as kernel:
        assert await output(kernel, BOMB) == "on\n"
        waits = [await scene.neighbour_answers() for _ in range(40)]
    assert sorted(waits)[len(waits) // 2] < 2.0
    assert scene.taken().peak <= (scene.attacker.memory_mib + 704) * MIB
    tasks = sum(one.num_threads() for one in members(scene.folder).values())
    assert tasks < 256


FILL = "dd if=/dev/zero of={path} bs=1M; df {path} --output=avail; rm -f {path}"


async def test_full_disks_are_told_as_such(scene: Scene) -> None:
    """THREATS 24: ENOSPC in the guest, and the disk on the host is no larger than it may be."""
    async with connected(scene.attacker) as kernel:
        for path in ("/dev/shm/fill", "/run/fill"):
            code = ROOT.format(argv=["sh", "-c", FILL.format(path=path)], out="stderr")
            assert "No space left on device" in await output(kernel, code)
        inodes = "import os\\nfor n in range(10**7): open(f'/dev/shm/{n}', 'w').close()"
        code = ROOT.format(argv=["timeout", "20", "python3", "-c", inodes], out="returncode")
        await output(kernel, code)
        code = "try:\n    f = open('big', 'wb'); f.truncate(1 << 40)\nexcept OSError as e: print(e)"
        await output(kernel, code)
    disk = scene.folder / "scratch.img"
    assert disk.stat().st_size == 4096 * MIB
    await scene.neighbour_answers()


CONSOLE = "timeout 10 cat /dev/zero | tr '\\\\0' 'x' > /dev/ttyS0; timeout 5 yes > /dev/console"


async def test_a_flooded_console(scene: Scene) -> None:
    """THREATS 25: the log keeps its size, VMM and attendant theirs."""
    async with connected(scene.attacker) as kernel:
        before = scene.memory()
        code = ROOT.format(argv=["sh", "-c", CONSOLE], out="returncode")
        await output(kernel, code, seconds=120)
        after = scene.memory()
        logs = await scene.daemon.logs(scene.attacker.id)
    assert len(logs.console) <= 64 * 1024
    assert after["attendant"] - before["attendant"] < 4 * MIB
    assert after["qemu-system-x86_64"] - before["qemu-system-x86_64"] < 100 * MIB
    await scene.neighbour_answers()


FLOOD = """
import socket, time
held = []
end = time.monotonic() + 15
for n in range(5000):
    if time.monotonic() > end: break
    s = socket.socket(socket.AF_VSOCK)
    s.setblocking(False)
    try: s.connect((2, 1024 + n % 4))
    except OSError: pass
    held.append(s)
print(len(held))
time.sleep(2)
"""


async def test_a_flood_of_vsock_connections(scene: Scene) -> None:
    """THREATS 26: capped, and others are served. The attacker loses his own connection by it, and
    then is ended for not answering."""
    async with connected(scene.attacker) as kernel:
        kernel.execute(ROOT.format(argv=["python3", "-c", FLOOD], out="stdout"))
        waits: list[float] = []
        most = 0
        while len(waits) < 60:
            waits.append(await scene.neighbour_answers())
            most = max([most, *(one.num_fds() for one in members(scene.folder).values())])
    assert most <= 1024
    assert sorted(waits)[len(waits) // 2] < 2.0


async def test_endless_output_can_be_interrupted(scene: Scene) -> None:
    """THREATS 27: a reader that does not read; then the interrupt."""
    async with connected(scene.attacker) as kernel:
        before = scene.memory()
        code = "import time\nwhile True: print('x' * 65536); time.sleep(0.02)"
        asked = kernel.execute(code)
        await asyncio.sleep(10)  # nobody reads
        assert scene.memory()["attendant"] - before["attendant"] < 16 * MIB
        await scene.neighbour_answers()
        await scene.daemon.signal(scene.attacker.id, 2)
        async with asyncio.timeout(60):
            while True:
                reply = await kernel.get_shell_msg(timeout=60)
                if reply["parent_header"].get("msg_id") == asked:
                    break
        assert reply["content"]["ename"] == "KeyboardInterrupt"


async def test_output_without_end_costs_the_host_nothing(scene: Scene) -> None:
    """THREATS 27: as fast as it can; IPython keeps what a cell prints, and dies of it."""
    async with connected(scene.attacker) as kernel:
        before = scene.memory()["attendant"]
        kernel.execute("while True: print('x' * (1 << 20))")
        async with asyncio.timeout(90):
            while "attendant" in (now := scene.memory()):
                assert now["attendant"] - before < 32 * MIB
                await scene.neighbour_answers()
    view = await scene.daemon.get(scene.attacker.id)
    assert view.exit is not None and view.exit.oom


async def test_the_cpu_quota_holds(scene: Scene) -> None:
    """THREATS 28: one virtual CPU and the half that its helpers have, and no more."""
    async with connected(scene.attacker) as kernel:
        code = "import subprocess\nfor _ in range(4): subprocess.Popen(['timeout', '8', 'yes'], \
stdout=subprocess.DEVNULL)"
        await output(kernel, code)
        before, begun = scene.taken().cpu, time.monotonic()
        await asyncio.sleep(5)
        used = (scene.taken().cpu - before) / (time.monotonic() - begun)
    assert used < 1.6
