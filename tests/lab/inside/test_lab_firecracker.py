"""Real Firecracker in the lab boots the guest image, and its agent answers over hybrid vsock."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cantelop_kernels import config, wire
from tests.lab import firecracker
from tests.lab.inside import raw_firecracker
from tests.lab.inside.raw_firecracker import FIRECRACKER, JAILER, RawVm, raw_vm

pytestmark = pytest.mark.lab

JAIL_UID = 951_000

Note = Callable[[str, object], None]


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Note:
    """Figures for the report outside, whatever form of junit.xml is chosen."""
    return lambda name, value: request.node.user_properties.append((name, value))


@pytest.fixture(scope="module")
def vm() -> Iterator[RawVm]:
    with raw_vm() as made:
        yield made


@pytest.mark.parametrize("program", [FIRECRACKER, JAILER])
def test_it_is_the_release_that_was_checked(program: Path) -> None:
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    assert f"v{firecracker.VERSION}" in said.stdout


def test_the_agent_says_hello(vm: RawVm, note: Note) -> None:
    try:
        hello = vm.host.accept(timeout=200)
    except TimeoutError:
        pytest.fail("no hello; the guest's console:\n" + "\n".join(vm.console[-30:]))
    vm.mark("hello")
    note("boot", vm.marks)
    assert hello["version"] == wire.VERSION and hello["vcpus"] == 1
    assert abs(hello["memory"] - (raw_firecracker.MEMORY_MIB << 20)) < 64 << 20


def test_a_cell_runs(vm: RawVm, note: Note) -> None:
    vm.host.bind()
    vm.host.expect("done")
    vm.host.expect("ready", timeout=200)
    vm.mark("ready")
    client = vm.host.client()
    printed: list[str] = []

    def output(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream":
            printed.append(message["content"]["text"])

    client.wait_for_ready(timeout=200)
    reply = client.execute_interactive("print(6 * 7)", timeout=200, output_hook=output)
    vm.mark("cell")
    client.stop_channels()
    note("boot", vm.marks)
    assert reply["content"]["status"] == "ok" and printed == ["42\n"]


def test_the_jailer_confines_it_with_cgroup_v2() -> None:
    """Started and not configured: that it runs as it should is all that is asked here."""
    with tempfile.TemporaryDirectory(prefix="jails-", dir=config.state_path()) as base:
        argv = [
            *(str(JAILER), "--id", "lab", "--exec-file", str(FIRECRACKER)),
            *("--uid", str(JAIL_UID), "--gid", str(JAIL_UID), "--chroot-base-dir", base),
            *("--cgroup-version", "2", "--cgroup", "pids.max=64", "--new-pid-ns"),
        ]
        subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, timeout=60)
        leaf = Path("/sys/fs/cgroup/firecracker/lab")
        root = Path(base) / "firecracker" / "lab" / "root"
        pid = int((root / "firecracker.pid").read_text())
        try:
            assert (leaf / "pids.max").read_text() == "64\n"
            assert (leaf / "cgroup.procs").read_text().split() == [str(pid)]
            assert sorted(os.listdir(f"/proc/{pid}/root")) == sorted(os.listdir(root))
            assert Path(f"/proc/{pid}").stat().st_uid == JAIL_UID
        finally:
            pidfd = os.pidfd_open(pid)
            (leaf / "cgroup.kill").write_text("1")
            _wait(pidfd)
            leaf.rmdir()
            leaf.parent.rmdir()


def _wait(pidfd: int) -> None:
    import select

    assert select.select([pidfd], [], [], 30)[0]
    os.close(pidfd)
