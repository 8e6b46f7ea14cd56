"""Real Firecracker under its real jailer, as far as a host without hardware virtualization goes.

KVM makes the machine and its guest comes to nothing, but the process is the one that sandboxes run
in: what it may do, what it sees, and that it has taken its configuration. Needs the programs (on
the PATH, or `cantelop setup-firecracker` into the tests' state folder) and a /dev/kvm.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from cantelop_kernels import host, jail, scratch, trees, vsock, watch
from cantelop_kernels.image import ImageStore
from cantelop_kernels.jail import Jail
from cantelop_kernels.process import Process
from cantelop_kernels.slot import Slot
from cantelop_kernels.vmm import Drive, VmSpec
from cantelop_kernels.vmm.firecracker import Firecracker
from cantelop_kernels.vmm.firecracker_config import Document
from cantelop_kernels.vmm.firecracker_release import Release, find
from tests.fakes.host_stack import eventually
from tests.vm.guest_vm import STATE

UID_BASE = 945_000
SLOT = Slot(0, UID_BASE)


@pytest.fixture
async def release() -> Release:
    found = await find(STATE)
    if found is None:
        pytest.skip("no Firecracker here: cantelop setup-firecracker")
    if not host.kvm_device():
        pytest.skip("no /dev/kvm")
    return found


@dataclass
class Jailed:
    """One that runs. What it says is read by a pipe, as the attendant does."""

    process: Process
    place: Jail
    said: int

    @property
    def proc(self) -> Path:
        return Path(f"/proc/{self.process.pid}")

    @property
    def status(self) -> dict[str, str]:
        lines = (line.partition(":") for line in (self.proc / "status").read_text().splitlines())
        return {key: value.strip() for key, _, value in lines}

    def is_firecracker(self) -> bool:
        return (self.proc / "comm").read_text().strip() == "firecracker"

    def console(self) -> str:
        return os.read(self.said, 65536).decode(errors="replace")


def machine(folder: Path) -> VmSpec:
    image = ImageStore(STATE).resolve("python3")
    drives = (Drive(image.root, True), Drive(folder / "scratch.img", False))
    return VmSpec(1, 256, image.vmlinux, image.initramfs, drives)


@asynccontextmanager
async def jailed(release: Release) -> AsyncIterator[Jailed]:
    jail.sandboxes(STATE).mkdir(mode=0o755, exist_ok=True)
    vmm = Firecracker(release, host.cgroup_version(), disk_bytes=1 << 28, disk_operations=9999)
    place = jail.make(STATE, SLOT, run_at=vmm.run_at(SLOT))
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    try:
        await scratch.make(place.folder / "scratch.img", 64, SLOT.vmm_uid)
        async with vmm.run(machine(place.folder), place, console=writer, log=writer) as made:
            one = Jailed(made.process, place, reader)
            try:
                async with asyncio.timeout(20):
                    socket = asyncio.ensure_future(watch.appears(place.run / vsock.SOCKET))
                    ended = asyncio.ensure_future(made.ended())
                    await asyncio.wait([socket, ended], return_when=asyncio.FIRST_COMPLETED)
                    socket.cancel()
                    assert not ended.done(), f"{ended.result()}: {one.console()}"
                    ended.cancel()
                yield one
            finally:
                os.close(writer)
                writer = -1
    finally:
        os.close(reader)
        if writer >= 0:
            os.close(writer)
        await trees.remove(place.folder)


async def test_it_has_no_right_that_it_does_not_need(release: Release) -> None:
    """THREATS.md 6."""
    async with jailed(release) as one:
        await eventually(lambda: one.is_firecracker() and one.status["Seccomp"] == "2")
        status = one.status
        assert status["Uid"].split() == [str(SLOT.vmm_uid)] * 4
        assert status["Gid"].split() == [str(SLOT.gid)] * 4
        assert status["Groups"] == ""
        assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0
        assert int(status["CapBnd"], 16) == int(status["CapAmb"], 16) == 0
        assert status["NoNewPrivs"] == "1"
        limits = (one.proc / "limits").read_text().splitlines()
        (files,) = [line.split()[3] for line in limits if line.startswith("Max open files")]
        (core,) = [line.split()[4] for line in limits if line.startswith("Max core file size")]
        (size,) = [line.split()[3] for line in limits if line.startswith("Max file size")]
        assert (files, core, size) == ("2048", "0", str(64 << 20))


async def test_it_sees_its_own_root_and_an_empty_network(release: Release) -> None:
    """THREATS.md 7."""
    async with jailed(release) as one:
        root = one.proc / "root"
        assert {str(path.relative_to(root)) for path in root.rglob("*")} - {"dev/userfaultfd"} == {
            *("firecracker", "firecracker.pid", "run"),
            *("dev", "dev/kvm", "dev/net", "dev/net/tun", "dev/urandom"),
            *("vm", "vm/config.json", "vm/disk0", "vm/disk1", "vm/initramfs", "vm/kernel"),
            *("io", "io/v.sock"),
        }
        own = {kind: (one.proc / "ns" / kind).readlink() for kind in ("mnt", "net", "ipc", "uts")}
        assert all(Path(f"/proc/self/ns/{kind}").readlink() != name for kind, name in own.items())
        lines = (one.proc / "net" / "dev").read_text().splitlines()[2:]
        assert [line.split(":")[0].strip() for line in lines] == ["lo"]
        opened = {str(fd.readlink()) for fd in (one.proc / "fd").iterdir()}
        outside = {name for name in opened if name.startswith("/") and name != "/dev/null"}
        files = {f"/vm/{name}" for name in ("kernel", "initramfs", "disk0", "disk1")}
        assert outside <= {"/dev/kvm", "/dev/urandom", *files}
        assert (one.proc / "fd" / "0").readlink() == Path("/dev/null")


async def test_nothing_it_can_change_is_the_images(release: Release) -> None:
    """THREATS.md 2, from the VMM's side."""
    async with jailed(release) as one:
        vm = one.place.run.parent / "vm"
        assert vm.stat().st_uid == 0 and stat.S_IMODE(vm.stat().st_mode) == 0o755
        for path in vm.iterdir():
            owner, mode = path.stat().st_uid, stat.S_IMODE(path.stat().st_mode)
            assert (owner, mode) == ((SLOT.vmm_uid, 0o600) if path.name == "disk1" else (0, 0o644))


async def test_the_attendant_reaches_the_socket_and_nobody_else_does(release: Release) -> None:
    async with jailed(release) as one:
        found = (one.place.run / vsock.SOCKET).lstat()
        assert stat.S_ISSOCK(found.st_mode) and found.st_gid == SLOT.gid
        assert stat.S_IMODE(found.st_mode) & 0o067 == 0o060
        assert stat.S_IMODE(one.place.run.stat().st_mode) == 0o770
        assert stat.S_IMODE(one.place.folder.stat().st_mode) == 0o750


async def test_it_has_no_api(release: Release) -> None:
    async with jailed(release) as one:
        await eventually(one.is_firecracker)
        sockets = (one.proc / "net" / "unix").read_text()
        assert "/io/v.sock" in sockets and "firecracker.socket" not in sockets
        argv = (one.proc / "cmdline").read_text().split("\0")
        assert "--no-api" in argv and "--no-seccomp" not in argv and "--enable-pci" not in argv


async def test_what_it_does_not_accept_is_told_on_the_console(
    release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Document, "encode", lambda _: b"{}")
    with pytest.raises(AssertionError, match=r"(?s)status 1.*missing field `drives`"):
        async with jailed(release):
            pass
