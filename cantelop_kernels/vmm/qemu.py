"""QEMU's microvm machine: KVM where the CPU has it, else emulation (TCG), which runs anywhere.

Layer 3. The vsock device is vhost-device-vsock, a process of its own that shares the guest's memory
and speaks the same hybrid vsock as Firecracker. Both run confined in the jail, each in a root of
its own (`mount_namespaces(7)`), where the paths of this module's constants hold.
(QEMU docs/system/i386/microvm.rst; kernel-parameters.txt.)
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from cantelop_kernels import runtime, seccomp, vsock, watch, wire
from cantelop_kernels.errors import ConfigError, DeadlineExceeded, LaunchError
from cantelop_kernels.jail import RUN, Jail, Rights
from cantelop_kernels.process import Process
from cantelop_kernels.runtime import Runtime
from cantelop_kernels.slot import Slot
from cantelop_kernels.vmm import Drive, Machine, VmSpec

BINARY = "qemu-system-x86_64"
_VHOST_SOCKET = "vhost.sock"
_HELPER = "/usr/bin/vhost-device-vsock"
_HELPER_DEADLINE = 5.0
_FIRMWARE = ("bios-microvm.bin", "linuxboot_dma.bin", "pvh.bin")
_FIRMWARE_FOLDERS = (Path("/usr/share/qemu"), Path("/usr/share/seabios"))
_MODULES = "qemu/accel-tcg-x86_64.so"
_IMAGE = Path("/image")
_DISK = Path("/disk")

_EMULATED_CPU = "max,-erms,-svm,xlevel=0x80000008"
"""A CPU with "enhanced rep movsb" makes kernel and libc copy with it: byte by byte when emulated.
Without it an emulated guest has its kernel up a second sooner (8.0 -> 6.8 s). Without svm QEMU
would end the CPU's extended leaves before those that tell the size of the cache and of addresses.
"""

_REAL_CPU = "host,-vmx,-svm"
"""A guest gets no virtualization of its own (THREATS.md 1)."""

_ALWAYS = (
    *("console=ttyS0", "quiet", "panic=-1", "reboot=t"),
    *("random.trust_cpu=on", "ipv6.disable=1"),
)


def find_binary() -> Path:
    """Raises ConfigError where QEMU is not installed."""
    found = shutil.which(BINARY)
    if found is None:
        raise ConfigError(
            f"{BINARY} is not installed", hint="apt-get install qemu-system-x86 (or make setup)"
        )
    return Path(found)


def emulation_args(tsc_khz: int) -> tuple[str, ...]:
    """Kernel arguments that emulation needs to boot reliably, and those that make it quick.

    Without the first line the kernel at times fails to calibrate its clock and hangs. The rest
    turns off self-tests, mitigations and hardening: emulation is no security boundary to begin
    with. Nor are 12,000 lock prefixes patched away because there is one CPU: each would empty
    QEMU's TLB.
    """
    return (
        *("tsc=reliable", f"tsc_early_khz={tsc_khz}", f"lpj={tsc_khz * 4}", "no_timer_check"),
        *("mitigations=off", "cryptomgr.notests", "rodata=off", "nokaslr", "audit=0"),
        *("lsm=capability", "noreplace-smp"),
        *("init_on_alloc=0", "hardened_usercopy=off", "randomize_kstack_offset=off"),
        "initcall_blacklist=jent_mod_init,load_system_certificate_list",
    )


@dataclass(frozen=True, slots=True)
class Runtimes:
    """What QEMU and its vsock helper find in their roots; for each its own."""

    machine: Runtime
    helper: Runtime


async def runtimes(state: Path, binary: Path, vhost_vsock: Path) -> Runtimes:
    """Gather them. Raises as `runtime.ensure`."""
    programs = [binary, *_modules(binary)]
    return Runtimes(
        await runtime.ensure(state / "runtime" / "qemu", programs, _firmware()),
        await runtime.ensure(
            state / "runtime" / "vsock", [vhost_vsock], places={vhost_vsock: _HELPER}
        ),
    )


def _modules(binary: Path) -> list[Path]:
    """Distributions' QEMU loads its emulation as a module, from beside the libraries."""
    usr = binary.parent.parent
    folders = [*(usr / "lib").glob("*-linux-gnu"), usr / "lib64", usr / "lib"]
    return [path for folder in folders if (path := folder / _MODULES).exists()]


def _firmware() -> list[Path]:
    found = [folder / name for name in _FIRMWARE for folder in _FIRMWARE_FOLDERS]
    return [path for path in found if path.exists()]


@dataclass(frozen=True, slots=True)
class Qemu:
    """`tsc_khz` is the host's; it is used under emulation only."""

    binary: Path
    vhost_vsock: Path
    emulated: bool
    tsc_khz: int
    runtimes: Runtimes | None = None
    """None where a test runs the command lines without a jail."""
    name: str = "qemu"

    def run_at(self, slot: Slot) -> str:
        """See `Vmm.run_at`."""
        return RUN

    def command(self, spec: VmSpec) -> list[str]:
        """The command line, run with the jail's `run` as working folder; paths are as QEMU sees
        them."""
        memory = f"memory-backend-memfd,id=ram,size={spec.memory_mib}M,share=on"
        return [
            str(self.binary),
            *("-M", "microvm,isa-serial=on,pit=on,pic=on,rtc=on,memory-backend=ram"),
            *("-accel", "tcg,thread=multi,tb-size=512" if self.emulated else "kvm"),
            *("-cpu", _EMULATED_CPU if self.emulated else _REAL_CPU),
            *("-smp", str(spec.vcpus), "-m", f"{spec.memory_mib}M", "-object", memory),
            *("-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"),
            *("-serial", "stdio", "-monitor", "none", "-parallel", "none"),
            *("-kernel", str(spec.kernel), "-initrd", str(spec.initramfs)),
            *("-append", " ".join(self._kernel_args())),
            *self._drives(spec),
            *("-device", "virtio-rng-device"),
            *("-chardev", f"socket,id=vsock,path={_VHOST_SOCKET}"),
            *("-device", "vhost-user-vsock-device,chardev=vsock"),
            "-sandbox",
            "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
        ]

    def helper_command(self) -> list[str]:
        """vhost-device-vsock, likewise run in the jail's `run`."""
        return [
            str(self.vhost_vsock),
            *("--guest-cid", str(wire.GUEST_CID)),
            *("--socket", _VHOST_SOCKET, "--uds-path", vsock.SOCKET),
        ]

    @asynccontextmanager
    async def run(
        self, spec: VmSpec, jail: Jail, *, console: int, log: int
    ) -> AsyncIterator[Machine]:
        """See `Vmm.run`. Raises LaunchError where the helper does not come up."""
        assert self.runtimes is not None
        rights = Rights(self.runtimes.helper, seccomp.helper())
        helper = await jail.start([_HELPER, *self.helper_command()[1:]], rights, log=log)
        try:
            await _listening(helper, jail.run / _VHOST_SOCKET)
            inside, mounts = _seen_inside(spec)
            if not self.emulated:
                mounts.append(("/dev/kvm", "/dev/kvm", "d"))
            rights = Rights(self.runtimes.machine, seccomp.vmm(), mounts)
            machine = await jail.start(self.command(inside), rights, stdout=console, log=log)
            try:
                yield Machine(machine, {"the vsock helper": helper})
            finally:
                await _kill(machine)
        finally:
            await _kill(helper)

    def _kernel_args(self) -> tuple[str, ...]:
        return (*_ALWAYS, *(emulation_args(self.tsc_khz) if self.emulated else ()))

    def _drives(self, spec: VmSpec) -> list[str]:
        argv: list[str] = []
        for number, drive in enumerate(spec.drives):
            path = str(drive.path).replace(",", ",,")  # QEMU's own escape in option values
            options = f"id=disk{number},if=none,format=raw,file={path}"
            options += ",readonly=on" if drive.read_only else ",cache=unsafe,discard=unmap"
            argv += ["-drive", options, "-device", f"virtio-blk-device,drive=disk{number}"]
        return argv


def _seen_inside(spec: VmSpec) -> tuple[VmSpec, list[tuple[str, str, str]]]:
    """The same machine with the paths of the jail, and what has to be bound there."""
    mounts: list[tuple[str, str, str]] = []

    def bound(path: Path, folder: Path, flags: str) -> Path:
        inside = folder / f"{len(mounts)}-{path.name}"
        mounts.append((str(path.resolve()), str(inside), flags))
        return inside

    drives = tuple(
        Drive(bound(one.path, _IMAGE if one.read_only else _DISK, "" if one.read_only else "w"),
              one.read_only)
        for one in spec.drives
    )  # fmt: skip
    kernel, initramfs = bound(spec.kernel, _IMAGE, ""), bound(spec.initramfs, _IMAGE, "")
    return VmSpec(spec.vcpus, spec.memory_mib, kernel, initramfs, drives), mounts


async def _listening(helper: Process, path: Path) -> None:
    """Wait until the helper's socket is there; a helper that ends instead is told at once."""
    there = asyncio.ensure_future(watch.appears(path))
    ended = asyncio.ensure_future(helper.wait())
    try:
        async with asyncio.timeout(_HELPER_DEADLINE):
            await asyncio.wait([there, ended], return_when=asyncio.FIRST_COMPLETED)
        if not there.done():
            raise LaunchError(f"the vsock helper ended at once (status {helper.returncode})")
        await there
    except TimeoutError:
        raise DeadlineExceeded("the vsock helper did not come up in time") from None
    finally:
        there.cancel()
        ended.cancel()
        await asyncio.wait([there, ended])


async def _kill(process: Process) -> None:
    await process.stop(0.0)
    process.close()
