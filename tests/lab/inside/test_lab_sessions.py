"""Sessions on real Firecracker under its real jailer, with cgroup version 2: what users do, and
what attackers try (THREATS 1 to 13)."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from jupyter_client.manager import KernelManager

from cantelop_kernels import client, jail, schema
from cantelop_kernels.errors import LaunchError
from tests.fakes.host_stack import KEY, connected, eventually, output, status_of
from tests.lab.inside.stack import OTHER, READY, STATE, UID_BASE, Daemon, serve, stop
from tests.vm.test_boundaries import members, others_stay_outside

pytestmark = [pytest.mark.lab, pytest.mark.timeout(240)]

REPO = Path(__file__).parents[3]


@pytest.fixture
async def session(daemon: Daemon) -> AsyncIterator[schema.SessionView]:
    made = await daemon.create()
    yield made
    await daemon.client.end(made.id)


def folder_of(view: schema.SessionView) -> Path:
    (found,) = jail.sandboxes(STATE).glob(f"cantelop-{UID_BASE}-*")
    return found


def test_doctor_is_green(daemon: Daemon) -> None:
    argv = ["cantelop", "doctor", "--json"]
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    failed = {name: check for name, check in checks.items() if check["status"] == "fail"}
    assert failed == {} and done.returncode == 0
    assert checks["firecracker"]["found"].startswith("1.12.1 has known flaws, which are allowed")


CAPABILITIES = ("Prm", "Eff", "Bnd", "Amb")
"""The jailer leaves inheritable ones, which are worth nothing without a bounding set."""


async def test_every_process_is_confined(daemon: Daemon, session: schema.SessionView) -> None:
    """THREATS 1, 2, 6, 7, 11; the limits are those of the sandbox's cgroup."""
    folder = folder_of(session)
    async with connected(session, seconds=READY) as kernel:
        assert await output(kernel, "print(6 * 7)", seconds=READY) == "42\n"
        found = members(folder)
        assert set(found) == {"firecracker", "attendant"}
        uids = set()
        for name, process in found.items():
            status = status_of(process.pid)
            uids.add(status["Uid"].split()[0])
            assert status["Groups"] == "", name
            assert {status[f"Cap{kind}"] for kind in CAPABILITIES} == {"0" * 16}, name
            assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2"), name
            for kind in ("mnt", "net", "pid", "ipc", "uts", "cgroup"):
                ours = Path(f"/proc/self/ns/{kind}").readlink()
                assert Path(f"/proc/{process.pid}/ns/{kind}").readlink() != ours, (name, kind)
        assert len(uids) == 2 and all(int(uid) in range(UID_BASE, UID_BASE + 4096) for uid in uids)
        tops = os.listdir(f"/proc/{found['firecracker'].pid}/root")
        assert set(tops) <= {
            "dev",
            "firecracker",
            "io",
            "vm",
            "run",
            "sys",
            "proc",
            "firecracker.pid",
        }
        assert os.listdir(f"/proc/{found['attendant'].pid}/root") == ["run"]
        leaf = Path("/sys/fs/cgroup/cantelop") / folder.name
        assert (leaf / "cpu.max").read_text() == "150000 100000\n"
        assert int((leaf / "memory.max").read_text()) == (384 + 128) << 20
        assert (leaf / "memory.swap.max").read_text() == "0\n"
        assert (leaf / "pids.max").read_text() == "256\n"
        code = "import os; print(os.path.exists('/dev/kvm'), open('/proc/cpuinfo').read())"
        said = await output(kernel, code, seconds=READY)
        assert said.startswith("False ") and not re.search(r"\b(vmx|svm)\b", said)
        refused = "import subprocess as s; print(s.run('sudo dd if=/dev/zero of=/dev/vda bs=4k \
count=1 conv=fsync', shell=True, capture_output=True, text=True).stderr)"
        answer = await output(kernel, refused, seconds=READY)
        assert re.search("not permitted|Read-only|I/O error", answer)
        others_stay_outside(folder, session)


async def test_the_death_of_the_vmm_is_told(daemon: Daemon) -> None:
    """THREATS 3, by its effect on the host: the sandbox goes, whole, and is told as gone."""
    view = await daemon.create()
    folder = folder_of(view)
    members(folder)["firecracker"].kill()
    async with asyncio.timeout(30):
        while True:
            known = {one.id: one for one in await daemon.client.sessions()}
            if known[view.id].state == "exited":
                break
            await asyncio.sleep(0.1)
    ended = known[view.id].exit
    assert ended is not None and "virtual machine ended" in ended.reason
    await eventually(lambda: not folder.exists(), 10)


async def test_a_guest_that_powers_off_is_reaped(daemon: Daemon) -> None:
    """THREATS 3, by root in the guest."""
    view = await daemon.create()
    folder = folder_of(view)
    async with connected(view, seconds=READY) as kernel:
        kernel.execute(
            "import subprocess; subprocess.run('echo c | sudo tee /proc/sysrq-trigger', \
shell=True)"
        )
        await eventually(lambda: not folder.exists(), 60)


async def test_jupyter_execute_runs_the_quickstart(daemon: Daemon, tmp_path: Path) -> None:
    notebook = tmp_path / "quickstart.ipynb"
    notebook.write_bytes((REPO / "notebooks" / "quickstart.ipynb").read_bytes())
    argv = ["jupyter", "execute", "--kernel_name=cantelop-python3", "--startup_timeout=300"]
    argv += ["--timeout=300", "--inplace", str(notebook)]
    done = await asyncio.to_thread(
        subprocess.run, argv, check=False, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    cells = json.loads(notebook.read_text())["cells"]
    assert any(out["output_type"] == "display_data" for c in cells for out in c.get("outputs", []))


def test_interrupt_restart_and_out_of_memory(daemon: Daemon) -> None:
    """The same manager, client and connection file all the way."""
    manager = KernelManager(kernel_name="cantelop-python3")
    manager.start_kernel()
    kernel = manager.client()
    kernel.start_channels()
    try:
        kernel.wait_for_ready(timeout=READY)
        kernel.execute("import time; print('on', flush=True); time.sleep(600)")
        while kernel.get_iopub_msg(timeout=60)["msg_type"] != "stream":
            pass
        begun = time.monotonic()
        manager.interrupt_kernel()
        assert kernel.get_shell_msg(timeout=60)["content"]["ename"] == "KeyboardInterrupt"
        print(f"interrupted after {time.monotonic() - begun:.2f} s")
        manager.restart_kernel(now=True)
        kernel.wait_for_ready(timeout=READY)
        assert kernel.execute_interactive("1 + 1", timeout=60)["content"]["execution_count"] == 1
        kernel.execute("x = []\nwhile True: x.append('a' * (8 << 20))")
        deadline = time.monotonic() + 60
        while manager.is_alive() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not manager.is_alive()
        told = json.loads(
            subprocess.run(
                ["cantelop", "ps", "--json"], check=True, capture_output=True, text=True
            ).stdout
        )
        assert any("out of memory" in json.dumps(one).lower() for one in told)
    finally:
        kernel.stop_channels()
        manager.shutdown_kernel(now=True)


def test_the_pool_fills_and_is_filled_again(installed: None, tmp_path: Path) -> None:
    process, env = serve(tmp_path, OTHER, "warm = 1\n")
    try:
        daemon = client.Client(Path(env["CANTELOP_SOCKET"]))

        async def use() -> None:
            await warm(daemon)
            for _ in range(2):
                view = await daemon.create(schema.SessionRequest(key=KEY))
                assert view.warm
                async with connected(view, seconds=READY) as kernel:
                    assert await output(kernel, "print(1)", seconds=60) == "1\n"
                await daemon.end(view.id)
                await warm(daemon)

        asyncio.run(use())
    finally:
        stop(process, OTHER)


async def warm(daemon: client.Client) -> None:
    async with asyncio.timeout(READY):
        while not (views := await daemon.pool()) or not views[0].ready:
            await asyncio.sleep(0.5)


async def test_a_limit_that_the_kernel_refuses_stops_the_launch(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """THREATS 13 for version 2: somebody has taken the leaf's name."""
    taken = [Path("/sys/fs/cgroup/cantelop") / f"cantelop-{UID_BASE}-{n}" for n in range(4)]
    for folder in taken:
        folder.mkdir()
    try:
        with pytest.raises(LaunchError, match="exists already"):
            await daemon.create()
    finally:
        for folder in taken:
            folder.rmdir()
    assert os.listdir(jail.sandboxes(STATE)) == []


async def test_sessions_outlive_the_daemon(installed: None, tmp_path: Path) -> None:
    """Killed and started again, it adopts what runs."""
    process, env = serve(tmp_path, OTHER)
    try:
        daemon = client.Client(Path(env["CANTELOP_SOCKET"]))
        view = await daemon.create(schema.SessionRequest(key=KEY))
        async with connected(view, seconds=READY) as kernel:
            await output(kernel, "kept = 42", seconds=60)
            process.send_signal(signal.SIGKILL)
            await asyncio.to_thread(process.wait, 30)
            process, _ = serve(tmp_path, OTHER)
            assert await output(kernel, "print(kept)", seconds=60) == "42\n"
        assert [one.state for one in await daemon.sessions()] == ["running"]
        await daemon.end(view.id)
    finally:
        await asyncio.to_thread(stop, process, OTHER)
