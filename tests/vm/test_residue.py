"""Many runs, some killed at a random moment: afterwards the machine is as it was before.

`CANTELOP_RESIDUE_RUNS` sets the number (a quarter of them is killed); the default is small, since
every run boots a microVM under emulation.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.vm, pytest.mark.timeout(1200)]

REPO = Path(__file__).parents[2]
UID_BASE = 760_000
UIDS = range(UID_BASE, UID_BASE + 4096)
RUNS = int(os.environ.get("CANTELOP_RESIDUE_RUNS", "8"))
COMMAND = [sys.executable, "-m", "cantelop_kernels"]


def ours() -> list[str]:
    """Processes of sandboxes, whoever started them."""
    found = []
    for process in psutil.process_iter(["uids", "name"]):
        if process.info["uids"] and process.info["uids"].real in UIDS:
            found.append(process.info["name"])
    return found


def machine(state: Path) -> dict[str, object]:
    """All of the host that a sandbox could leave something in."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return {
        "processes": sorted(ours()),
        "namespaces": subprocess.run(
            ["ip", "netns", "list"], capture_output=True, text=True, check=False
        ).stdout,
        "mounts": sorted(line.split(" ", 3)[3] for line in mounts),
        "cgroups": sorted(str(p) for p in Path("/sys/fs/cgroup").glob(f"**/cantelop-{UID_BASE}-*")),
        "sandboxes": sorted(p.name for p in (state / "sandboxes").glob(f"cantelop-{UID_BASE}-*")),
        "loop devices": sorted(p.name for p in Path("/sys/block").glob("loop*/loop/backing_file")),
    }


async def one_run(env: dict[str, str], kill_after: float | None) -> int:
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        "exec",
        "print('ran')",
        env=env,
        stdout=asyncio.subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(kill_after or 120):
            out, err = await process.communicate()
        assert out == b"ran\n" and process.returncode == 0, err.decode()
    except TimeoutError:
        process.kill()
        await process.wait()
    return process.returncode or 0


async def all_runs(env: dict[str, str], seed: int) -> list[int]:
    """Two at a time, so that one sandbox is always there while another comes or goes."""
    chance = random.Random(seed)
    kills = [chance.uniform(0.2, 12.0) if n % 4 == 0 else None for n in range(RUNS)]
    two = asyncio.Semaphore(2)

    async def limited(kill_after: float | None) -> int:
        async with two:
            return await one_run(env, kill_after)

    return await asyncio.gather(*(limited(kill) for kill in kills))


def wait_for_none(seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while ours() and time.monotonic() < deadline:
        time.sleep(0.05)


def environment(folder: Path) -> dict[str, str]:
    """Of a daemon and its clients, all below `folder` but for the image."""
    (folder / "c.toml").write_text(f"uid_base = {UID_BASE}\n")
    (folder / "run").mkdir()
    return os.environ | {
        "CANTELOP_STATE": os.environ.get("CANTELOP_TEST_STATE") or str(REPO / ".cache" / "state"),
        "CANTELOP_CONFIG": str(folder / "c.toml"),
        "CANTELOP_SOCKET": str(folder / "run" / "d.sock"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
    }


def serve(env: dict[str, str]) -> subprocess.Popen[bytes]:
    """A daemon that already answers."""
    read, write = os.pipe()
    argv = [*COMMAND, "serve", "--allow-emulation", "--ready-fd", str(write)]
    daemon = subprocess.Popen(argv, env=env, pass_fds=[write])
    os.close(write)
    with os.fdopen(read) as ready:
        assert ready.read() == "ready\n"
    return daemon


def test_runs_and_kills_leave_nothing(tmp_path: Path) -> None:
    env = environment(tmp_path)
    state = Path(env["CANTELOP_STATE"])
    before = machine(state)
    daemon = serve(env)
    try:
        seed = int(time.time())
        print(f"seed {seed}")
        ended = asyncio.run(all_runs(env, seed))
        wait_for_none()
        assert ours() == []
        assert list((tmp_path / "run" / "d.ipc").iterdir()) == []
        files = len(os.listdir(f"/proc/{daemon.pid}/fd"))
        assert files < 20, f"the daemon holds {files} files with no session"
        print(f"{len(ended)} runs, {sum(code == -9 for code in ended)} killed")
    finally:
        daemon.terminate()
        assert daemon.wait(30) == 0
    assert machine(state) == before
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["d.lock"]


@contextmanager
def ending(daemon: subprocess.Popen[bytes]) -> Iterator[None]:
    """It ends in order, whatever came before."""
    try:
        yield
    finally:
        daemon.terminate()
        assert daemon.wait(60) == 0


COUNT = """
import time
print('up', flush=True)
for n in range(30):
    print(n, flush=True)
    time.sleep(0.2)
"""


def test_a_killed_daemon_costs_no_session_anything(tmp_path: Path) -> None:
    """A cell runs on without a daemon, and the next daemon ends what is left to be ended."""
    env = environment(tmp_path)
    state = Path(env["CANTELOP_STATE"])
    before = machine(state)
    daemon = serve(env)
    client = subprocess.Popen(
        [*COMMAND, "exec", COUNT],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert client.stdout is not None and client.stdout.readline() == "up\n"
    daemon.kill()
    daemon.wait()
    time.sleep(1)
    with ending(serve(env)):
        out = client.stdout.read()  # communicate() would leave out what readline() has read ahead
        _, err = client.communicate(timeout=60)
        assert client.returncode == 0, err
        assert out.split() == [str(n) for n in range(30)]
        wait_for_none()
        assert ours() == []
    assert machine(state) == before


def test_a_client_and_its_daemon_that_die_leave_nothing_but_for_the_next(tmp_path: Path) -> None:
    env = environment(tmp_path)
    state = Path(env["CANTELOP_STATE"])
    before = machine(state)
    daemon = serve(env)
    client = subprocess.Popen([*COMMAND, "exec", COUNT], env=env, stdout=subprocess.PIPE, text=True)
    with client:
        assert client.stdout is not None and client.stdout.readline() == "up\n"
        daemon.kill()
        daemon.wait()
        client.kill()
    with ending(serve(env)):
        wait_for_none()
        assert ours() == []
    assert machine(state) == before
