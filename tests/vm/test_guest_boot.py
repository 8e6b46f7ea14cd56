"""The guest alone, in a real VM: boot, kernel, limits, and every way it ends."""

from __future__ import annotations

import json
import signal
import statistics
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.vm.guest_vm import MEMORY_MIB, GuestVm, guest_vm

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from jupyter_client.blocking.client import BlockingKernelClient

pytestmark = [pytest.mark.vm, pytest.mark.timeout(180)]

SURVEY = """
import json, os, resource, socket, subprocess, sys, time
def read(path):
    with open(path) as file: return file.read().strip()
def sh(command):
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout.strip()
print(json.dumps({
    "uid": os.getuid(), "groups": os.getgroups(), "cwd": os.getcwd(), "ppid": os.getppid(),
    "sudo": sh("sudo -n id -u"), "hostname": socket.gethostname(), "time": time.time(),
    "resolves": socket.gethostbyname(socket.gethostname()),
    "machine_id": read("/etc/machine-id"), "env": dict(os.environ),
    "init": read("/proc/1/cmdline"), "agent_oom": read("/proc/1/oom_score_adj"),
    "own_oom": read("/proc/self/oom_score_adj"), "cgroup": read("/proc/self/cgroup"),
    "memory_max": int(read("/sys/fs/cgroup/kernel/memory.max")),
    "mounts": [line.split()[1] for line in open("/proc/mounts")],
    "writable": sh("sudo touch /usr/written && echo yes"),
    "shm": sh("echo x > /dev/shm/x && cat /dev/shm/x"),
    "pty": len(os.openpty()), "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    "path": [entry for entry in sys.path if entry],
    "plain_path": json.loads(sh("python3 -c 'import json, sys; print(json.dumps(sys.path[1:]))'")),
    "isolated": sys.flags.isolated + sys.flags.no_site + sys.flags.safe_path,
    "orphan_modules": [name for name in sys.modules if name.startswith("cantelop")],
}))
"""

ORPHANS = """
import subprocess
for _ in range(20):
    subprocess.run(["sh", "-c", "sleep 0.01 & exit 0"])
import time; time.sleep(1)
print(subprocess.run("grep -sh State /proc/[0-9]*/status | grep -c zombie", shell=True,
                     capture_output=True, text=True).stdout)
"""


def run(client: BlockingKernelClient, code: str, timeout: float = 60) -> str:
    """What the cell printed; fails where the cell did."""
    printed: list[str] = []

    def output(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream":
            printed.append(message["content"]["text"])

    reply = client.execute_interactive(code, timeout=timeout, output_hook=output)
    assert reply["content"]["status"] == "ok", reply["content"]
    return "".join(printed)


def start(vm: GuestVm, **fields: Any) -> BlockingKernelClient:
    """From power-on to the first answer, with the times of it all in `vm.marks`."""
    vm.host.accept()
    vm.mark("hello")
    vm.host.bind(**fields)
    vm.host.expect("done")
    vm.host.expect("ready")
    vm.mark("ready")
    client = vm.host.client()
    msg_id = client.execute("1")
    while client.get_shell_msg(timeout=60)["parent_header"].get("msg_id") != msg_id:
        pass
    vm.mark("first reply")
    client.wait_for_ready(timeout=60)
    return client


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[GuestVm, BlockingKernelClient]]:
    """One guest for all tests that leave it as it was."""
    with guest_vm() as vm:
        client = start(vm, hostname="box-7", env={"GREETING": "hallo"})
        print("seconds from power-on:", {name: round(at, 2) for name, at in vm.marks.items()})
        yield vm, client
        client.stop_channels()


def test_the_kernel_is_an_ordinary_user_of_a_machine_of_its_own(
    running: tuple[GuestVm, BlockingKernelClient],
) -> None:
    seen = json.loads(run(running[1], SURVEY))
    assert seen["uid"] == 1000 and seen["groups"][0] == 1000
    assert seen["sudo"] == "0" and seen["writable"] == "yes"
    assert seen["cwd"] == "/workspace" and seen["ppid"] == 1
    assert seen["hostname"] == "box-7" and seen["resolves"] == "127.0.1.1"
    assert abs(seen["time"] - time.time()) < 10
    assert len(seen["machine_id"]) == 32
    assert seen["env"]["HOME"] == "/home/sandbox" and seen["env"]["GREETING"] == "hallo"
    assert "cantelop_guest" in seen["init"]
    assert (seen["agent_oom"], seen["own_oom"]) == ("-1000", "0")
    assert seen["cgroup"] == "0::/kernel"
    assert seen["memory_max"] < MEMORY_MIB << 20
    assert {"/", "/proc", "/sys", "/dev", "/dev/pts", "/dev/shm", "/run"} <= set(seen["mounts"])
    assert seen["shm"] == "x" and seen["pty"] == 2 and seen["files"] == 65536
    assert seen["path"] == seen["plain_path"]
    assert seen["isolated"] == 0 and seen["orphan_modules"] == []


def test_orphans_are_reaped(running: tuple[GuestVm, BlockingKernelClient]) -> None:
    assert run(running[1], ORPHANS).strip() == "0"


@pytest.mark.parametrize("code", ["import time; time.sleep(100)", "while True: pass"])
def test_interrupt(running: tuple[GuestVm, BlockingKernelClient], code: str) -> None:
    vm, client = running
    client.execute(f"print('on')\n{code}")
    while client.get_iopub_msg(timeout=10)["msg_type"] != "stream":
        pass
    began = time.monotonic()
    vm.host.request("signal", signum=signal.SIGINT)
    vm.host.expect("done")
    assert client.get_shell_msg(timeout=5)["content"]["ename"] == "KeyboardInterrupt"
    assert time.monotonic() - began < 1


def test_nothing_is_lost_on_the_way(running: tuple[GuestVm, BlockingKernelClient]) -> None:
    _, client = running
    text = run(client, "for i in range(3000): print(i, flush=True)", timeout=120)
    assert text == "".join(f"{i}\n" for i in range(3000))
    assert len(run(client, "print('x' * 50_000_000)", timeout=120)) == 50_000_001


def test_timings(running: tuple[GuestVm, BlockingKernelClient]) -> None:
    """Printed, never asserted: the machine that runs this may be busy."""
    _, client = running
    times = []
    for _ in range(30):
        began = time.monotonic()
        client.execute_interactive("1", output_hook=lambda _: None)
        times.append(time.monotonic() - began)
    began = time.monotonic()
    run(client, "for _ in range(20): print('x' * 1_000_000)")
    print(f"execute('1') {statistics.median(times) * 1000:.0f} ms;", end=" ")
    print(f"20 MB of output {time.monotonic() - began:.2f} s")


def test_status(running: tuple[GuestVm, BlockingKernelClient]) -> None:
    vm, _ = running
    vm.host.request("status_request")
    status = vm.host.expect("status")
    assert status["state"] == "running"
    assert 0 < status["memory_current"] <= status["memory_peak"] < status["memory_limit"]


def test_a_hungry_cell_kills_the_kernel_and_not_the_agent() -> None:
    with guest_vm() as vm:
        client = start(vm, env={"PYTHONHASHSEED": "0"})
        assert run(client, "import sys; print(sys.flags.hash_randomization)") == "0\n"
        client.execute("hoard = []\nwhile True: hoard.append(bytearray(b'x' * (1 << 22)))")
        exited = vm.host.expect("exited", timeout=60)
        assert exited["oom"] is True and exited["signal"] == signal.SIGKILL
        assert exited["memory_peak"] >= exited["memory_limit"] - (1 << 22)
        client.stop_channels()
        vm.host.request("status_request")
        assert vm.host.expect("status")["state"] == "exited"
        vm.host.request("poweroff")
        vm.host.expect("done")
        vm.ended(timeout=20)


def test_a_kernel_with_its_own_argv_and_a_host_that_goes_away() -> None:
    with guest_vm() as vm:
        connection_file = "/run/cantelop/kernel/connection.json"
        argv = ["python", "-m", "ipykernel_launcher", "-f", connection_file]
        client = start(vm, argv=argv, cwd="/tmp")
        assert run(client, "import os; print(os.getcwd())") == "/tmp\n"
        client.stop_channels()
        vm.host.close()
        assert "cantelop: power off" in vm.ended(timeout=20)


def test_a_corrupt_root_is_told_in_one_line_and_ends_the_machine(tmp_path: Path) -> None:
    root = tmp_path / "root.erofs"
    root.write_bytes(b"no file system" * 4096)
    with guest_vm(root) as vm:
        console = vm.ended(timeout=30)
    fatal = [line for line in console.splitlines() if "cantelop: FATAL:" in line]
    assert fatal == ["cantelop: FATAL: cannot mount the root image /dev/vda (erofs)"]
