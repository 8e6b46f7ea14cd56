"""A real guest without the host stack: QEMU, the vsock helper, and `GuestHost` in front of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from cantelop_kernels import host, scratch
from cantelop_kernels.image import ImageStore
from cantelop_kernels.tools import find_vhost_device_vsock
from cantelop_kernels.vmm import Drive, VmSpec
from cantelop_kernels.vmm.qemu import Qemu, find_binary
from tests.fakes.guest_host import GuestHost

REPOSITORY = Path(__file__).parents[2]
STATE = Path(
    os.environ.get("CANTELOP_TEST_STATE")
    or os.environ.get("CANTELOP_STATE")
    or REPOSITORY / ".cache" / "state"
)
MEMORY_MIB = 512
SCRATCH_MIB = 4096


class GuestVm:
    """`marks` has the seconds from power-on; `console` the lines and when they came."""

    def __init__(self, host: GuestHost, qemu: subprocess.Popen[bytes]) -> None:
        self.host = host
        self.process = qemu
        self.console: list[str] = []
        self.marks: dict[str, float] = {}
        self._began = time.monotonic()
        self._reader = threading.Thread(target=self._read_console, daemon=True)
        self._reader.start()

    def mark(self, name: str) -> None:
        self.marks[name] = time.monotonic() - self._began

    def ended(self, timeout: float) -> str:
        """Wait for the machine's own power-off; the whole console."""
        self.process.wait(timeout)
        self.mark("off")
        self._reader.join(timeout)
        return "\n".join(self.console)

    def _read_console(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.console.append(line.decode(errors="replace").rstrip())


@contextmanager
def guest_vm(root: Path | None = None) -> Iterator[GuestVm]:
    """Power on; `root` replaces the image's. Everything is gone when the context is left."""
    vhost = find_vhost_device_vsock(STATE)
    assert vhost is not None, "run `make image` first"
    image = ImageStore(STATE).resolve("python3")
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="ctvm-"))
        stack.callback(shutil.rmtree, folder)
        disk = folder / "scratch.img"
        with disk.open("wb") as file:
            file.truncate(SCRATCH_MIB << 20)
        subprocess.run(scratch.mkfs_command(disk), check=True)
        vmm = Qemu(find_binary(), vhost, not host.hardware_kvm(), host.tsc_khz())
        guest_host = stack.enter_context(GuestHost(folder))
        helper = stack.enter_context(subprocess.Popen(vmm.helper_command(), cwd=folder))
        stack.callback(helper.kill)
        while not (folder / "vhost.sock").exists():
            time.sleep(0.01)
        drives = (Drive(root or image.root, True), Drive(disk, False))
        spec = VmSpec(1, MEMORY_MIB, image.vmlinux, image.initramfs, drives)
        qemu = stack.enter_context(
            subprocess.Popen(
                vmm.command(spec), cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
            )
        )
        stack.callback(qemu.kill)
        yield GuestVm(guest_host, qemu)
