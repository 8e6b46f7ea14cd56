"""The lab as a virtual machine: QEMU's emulation with AMD's virtualization in the emulated CPU.

Debian's `kvm_amd` finds it, so /dev/kvm works inside and Firecracker runs there as on a host, some
twenty times slower. There is no network device at all. (QEMU docs/system/i386/microvm.rst.)
"""

from __future__ import annotations

import asyncio
import fcntl
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cantelop_kernels import host
from cantelop_kernels.image_cache import Cache
from cantelop_kernels.vmm.qemu import emulation_args, find_binary
from tests.lab import image, project

VCPUS = 1
"""With two, each a thread of QEMU's, one may trap on an instruction that the other has just
patched, and the kernel panics (seen when a first `cpu.max` turned a static key of the scheduler;
QEMU 7.2). One is no slower.
"""

MEMORY_MIB = 3072
COMMAND = "command"
REPORTS = "reports.sock"
"""In the working folder of a run: whoever listens there gets what the tests report."""

STDIO = "stdio,signal=off"


@dataclass(frozen=True, slots=True)
class Setup:
    """One run, ready to start. `work` is QEMU's working folder; `out` is shared with the lab."""

    work: Path
    out: Path
    kernel: Path
    initramfs: Path
    disks: tuple[Path, ...]
    """Root, modules, project, scratch; only the last is written to."""


@contextmanager
def prepared(state: Path, out: Path, command: str, on_wait: Callable[[], None]) -> Iterator[Setup]:
    """Everything for one run of the shell script `command`; gone when the context is left.

    `out` is emptied. Seconds; raises ImageError where an image is missing. One lab runs at a time
    with one state folder; `on_wait` is called where another does, or where its image is built.
    """
    lab = image.find(state)
    with _alone(state, on_wait):
        yield from _prepare(state, lab, out, command)


@contextmanager
def _alone(state: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    with (state / "cache" / f"{image.NAME}.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _prepare(state: Path, lab: image.LabImage, out: Path, command: str) -> Iterator[Setup]:
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    (out / COMMAND).write_text(command)
    cache = Cache(state / "cache", image.NAME)
    cache.sweep()  # what a run that was killed left
    with cache.scratch() as work:
        initramfs, packed, scratch = (
            work / name for name in ("initrd", "project.img", "scratch.img")
        )

        async def build() -> None:
            await image.build_initramfs(lab, work, initramfs)
            await project.pack_project(lab, work, packed)
            await project.make_scratch(state, work, scratch)

        asyncio.run(build())
        disks = (lab.root / "root.erofs", lab.kernel / "modules.erofs", packed, scratch)
        yield Setup(work, out, lab.kernel / "vmlinux", initramfs, disks)


@contextmanager
def started(
    setup: Setup, *, terminal: str, reports: bool, inherit: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """Power on; off at the end of the context at the latest. stdout is the console, a pipe, which
    the caller closes.

    `inherit` gives QEMU this process's own terminal, and the console goes to a file.
    """
    stdin, stdout = (None, None) if inherit else (subprocess.DEVNULL, subprocess.PIPE)
    console = f"file,path={setup.out / 'console.log'}" if inherit else STDIO
    argv = command(setup, host.tsc_khz(), console, terminal, reports=reports)
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", *argv],
        cwd=setup.work,
        stdin=stdin,
        stdout=stdout,
        start_new_session=not inherit,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def command(setup: Setup, tsc_khz: int, console: str, terminal: str, *, reports: bool) -> list[str]:
    """QEMU's command line. `console` and `terminal` are backends of character devices."""
    return [
        str(find_binary()),
        *("-M", "microvm,isa-serial=on,pit=on,pic=on,rtc=on"),
        *("-accel", "tcg,thread=multi,tb-size=1024", "-cpu", "max,+svm,+npt"),
        *("-smp", str(VCPUS), "-m", f"{MEMORY_MIB}M"),
        *("-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"),
        *("-kernel", str(setup.kernel), "-initrd", str(setup.initramfs)),
        *("-append", " ".join(kernel_args(tsc_khz))),
        *("-chardev", f"{console},id=console", "-serial", "chardev:console"),
        *_disks(setup.disks),
        *("-fsdev", f"local,id=out,path={setup.out},security_model=none"),
        *("-device", "virtio-9p-device,fsdev=out,mount_tag=out"),
        *("-device", "virtio-rng-device", "-device", "virtio-serial-device"),
        *("-chardev", f"{terminal},id=terminal", "-device", "virtconsole,chardev=terminal"),
        *(_reports() if reports else ()),
    ]


def kernel_args(tsc_khz: int) -> tuple[str, ...]:
    """As a guest under emulation, but with the security modules that hosts have."""
    emulation = (one for one in emulation_args(tsc_khz) if not one.startswith("lsm="))
    return ("console=ttyS0", "quiet", "panic=-1", "reboot=t", "random.trust_cpu=on", *emulation)


def _disks(disks: tuple[Path, ...]) -> list[str]:
    argv = []
    for number, path in enumerate(disks):
        last = number == len(disks) - 1
        options = "cache=unsafe,discard=unmap" if last else "readonly=on"
        argv += ["-drive", f"id=disk{number},if=none,format=raw,file={path},{options}"]
        argv += ["-device", f"virtio-blk-device,drive=disk{number}"]
    return argv


def _reports() -> tuple[str, ...]:
    """The lab finds the port by its name."""
    port = "virtserialport,chardev=reports,name=reports"
    return ("-chardev", f"socket,id=reports,path={REPORTS}", "-device", port)
