"""Firecracker by hand, one guest of the image `python3`: what the lab itself is measured by.

No jail and nothing of `cantelop_kernels.vmm`; `GuestHost` stands in front of it, as before QEMU.
"""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from cantelop_kernels import config, scratch, vsock, wire
from cantelop_kernels.image import ImageStore
from tests.fakes.guest_host import GuestHost

FIRECRACKER = Path("/usr/local/bin/firecracker")
JAILER = Path("/usr/local/bin/jailer")
MEMORY_MIB = 512
API = "api.sock"

KERNEL_ARGS = (
    *("console=ttyS0", "quiet", "panic=-1", "reboot=k", "random.trust_cpu=on", "ipv6.disable=1"),
    *("pci=off", "i8042.noaux", "i8042.nomux", "i8042.nopnp", "i8042.dumbkbd"),
)
"""Firecracker has no PCI and, of a keyboard, the reset line only (its docs/kernel-policy.md and
its own default command line); a reset by that line ends it."""


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=60)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60)
        self.sock.connect(self._path)


def put(api: Path, resource: str, **body: Any) -> None:
    """One call of Firecracker's API; fails where it was refused."""
    connection = _Connection(api)
    headers = {"Content-Type": "application/json"}
    connection.request("PUT", resource, json.dumps(body), headers)
    answer = connection.getresponse()
    assert answer.status == 204, (resource, answer.status, answer.read())
    connection.close()


class RawVm:
    """`marks` has the seconds from InstanceStart; `console` the guest's serial lines."""

    def __init__(self, host: GuestHost, process: subprocess.Popen[bytes]) -> None:
        self.host = host
        self.process = process
        self.console: list[str] = []
        self.marks: dict[str, float] = {}
        self._began = time.monotonic()
        self._reader = threading.Thread(target=self._read_console, daemon=True)
        self._reader.start()

    def mark(self, name: str) -> None:
        self.marks[name] = round(time.monotonic() - self._began, 2)

    def ended(self, timeout: float) -> int:
        """Wait for the machine's own end; its status."""
        status = self.process.wait(timeout)
        self.mark("off")
        self._reader.join(timeout)
        return status

    def _read_console(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.console.append(line.decode(errors="replace").rstrip())


def configure(api: Path, disk: Path) -> None:
    """Everything but the start, in the order of the documentation."""
    image = ImageStore(config.state_path()).resolve("python3")
    put(api, "/machine-config", vcpu_count=1, mem_size_mib=MEMORY_MIB)
    boot = {"kernel_image_path": str(image.vmlinux), "initrd_path": str(image.initramfs)}
    put(api, "/boot-source", **boot, boot_args=" ".join(KERNEL_ARGS))
    drives = {"root": (image.root, True), "scratch": (disk, False)}
    for name, (path, read_only) in drives.items():
        drive = {"drive_id": name, "path_on_host": str(path), "is_read_only": read_only}
        put(api, f"/drives/{name}", **drive, is_root_device=False)
    put(api, "/vsock", guest_cid=wire.GUEST_CID, uds_path=vsock.SOCKET)
    put(api, "/entropy")


@contextmanager
def raw_vm() -> Iterator[RawVm]:
    """Power on. Everything is gone when the context is left."""
    with ExitStack() as held:
        folder = Path(tempfile.mkdtemp(prefix="raw-", dir=config.state_path()))
        held.callback(shutil.rmtree, folder)
        disk = folder / "scratch.img"
        with disk.open("wb") as file:
            file.truncate(4096 << 20)
        subprocess.run(scratch.mkfs_command(disk), check=True)
        host = held.enter_context(GuestHost(folder))
        argv = [str(FIRECRACKER), "--api-sock", API, "--id", "raw", "--level", "Warning"]
        process = held.enter_context(
            subprocess.Popen(argv, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        )
        held.callback(process.kill)
        wait_for(folder / API, process)
        configure(folder / API, disk)
        vm = RawVm(host, process)
        put(folder / API, "/actions", action_type="InstanceStart")
        vm.mark("started")
        yield vm


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    while not path.exists():
        assert process.poll() is None, f"firecracker ended with {process.returncode}"
        time.sleep(0.01)
