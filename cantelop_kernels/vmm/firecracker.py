"""Firecracker, started by its jailer only: hardware virtualization, and nothing of it to talk to.

Layer 3. A machine is configured by a file in its jail (`--config-file`) and has no API socket at
all (`--no-api`). Everything can be said in that file; an API would have root read answers from a
process that its guest may have taken over (invariant 1), and would lie in the jail for whoever gets
there. Pausing and snapshots will need it; then an unprivileged process has to be the one who asks.

The jailer confines it: own root by pivot_root, own uid and gid, no supplementary groups, no
capabilities, the default seccomp filters. Namespaces (`confine`) and the empty bounding set
come from this side. Below the jail's folder (`jail`):

- `firecracker/<slot.name>/root/`  its `/`: root's until the jailer gives it to the VM's uid (0700)
- `…/root/vm/`  (0755, root) kernel, initramfs, drives as hard links; `config.json`, `cpu.json`
- `…/root/io/`  (0770) `Jail.run`, with the vsock's sockets. Not `/run`, which the jailer closes to
  the slot's group, and so to the attendant, who has it as working folder

All of that is there before the jailer starts, and is made where only root can change names; later
root opens nothing below it. (firecracker docs/jailer.md, docs/vsock.md; src/jailer/src/env.rs.)
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from cantelop_kernels import vsock, wire
from cantelop_kernels.errors import LaunchError
from cantelop_kernels.jail import Jail
from cantelop_kernels.process import Process
from cantelop_kernels.slot import Slot
from cantelop_kernels.vmm import Machine, VmSpec
from cantelop_kernels.vmm.firecracker_config import (
    Balloon,
    BootSource,
    CpuConfig,
    Document,
    Drive,
    Entropy,
    Logger,
    MachineConfig,
    RateLimiter,
    Vsock,
)
from cantelop_kernels.vmm.firecracker_release import DISCARD, Release

_VM, _IO, _CONFIG, _CPU = "vm", "io", "config.json", "cpu.json"
_UMASK = 0o007  # the attendant reaches the vsock socket through the slot's group
_ENV = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
_MAX_VCPUS = 32
_MAX_FILES = 2048
"""More than the 1,023 vsock connections that Firecracker lets a guest have (vsock/unix/mod.rs), so
that it refuses one too many rather than fail to accept it."""

_ENTROPY_RATE = 64 << 10
"""Bytes a second. The guest's kernel takes some dozens now and then; who asks for more can wait."""

_BOOT_ARGS = (
    *("console=ttyS0", "quiet", "panic=-1", "reboot=k"),
    *("random.trust_cpu=on", "ipv6.disable=1"),
    *("pci=off", "i8042.noaux", "i8042.nomux", "i8042.dumbkbd"),
)
"""A reset by the keyboard controller ends Firecracker. The last line spares the search for what it
does not have. Mitigations stay on."""

_STATUSES = {
    148: "it made a forbidden system call, and was killed for it",
    149: "bus error",
    150: "segmentation fault",
    151: "a file grew beyond its limit",
    152: "it does not accept its configuration",
    153: "it does not know one of its arguments",
}
"""firecracker src/vmm/src/lib.rs, FcExitCode."""

_JAILER_NEEDS = (
    *("sys_admin", "sys_chroot"),  # namespaces, pivot_root
    *("mknod", "chown", "dac_override"),  # /dev/kvm and the folders in the new root
    *("setuid", "setgid"),
)
_RIGHTS = (
    *("/usr/bin/setpriv", "--inh-caps=-all," + ",".join(f"+{one}" for one in _JAILER_NEEDS), "--"),
    *("/usr/bin/setpriv", "--bounding-set=-all", "--"),
    *("/usr/bin/prlimit", "--core=0", "--"),
)
"""The jailer is root with these capabilities only, and what it executes can never get one again:
the bounding set is empty, and inheritable ones need a file that has them (capabilities(7)). In two
steps, since nothing becomes inheritable that the bounding set has lost."""


@dataclass(frozen=True, slots=True)
class Firecracker:
    """`disk_bytes` and `disk_operations` are per second and drive; 0 is no limit."""

    release: Release
    cgroup_version: int
    disk_bytes: int = 0
    disk_operations: int = 0
    cgroup_parent: str = "cantelop"
    name: str = "firecracker"
    emulated: bool = False

    def run_at(self, slot: Slot) -> str:
        """See `Vmm.run_at`; the jailer decides it but for the last part."""
        return str(self._root(slot) / _IO)

    def command(self, spec: VmSpec, jail: Jail) -> list[str]:
        """The jailer's command line; it becomes Firecracker, in the same process."""
        slot = jail.slot
        largest = max([0, *(d.path.stat().st_size for d in spec.drives if not d.read_only)])
        return [
            str(self.release.jailer),
            *("--id", slot.name, "--exec-file", str(self.release.firecracker)),
            *("--uid", str(slot.vmm_uid), "--gid", str(slot.gid)),
            *("--chroot-base-dir", str(jail.folder)),
            *("--cgroup-version", str(self.cgroup_version)),
            *("--parent-cgroup", f"{self.cgroup_parent}/{slot.name}"),
            *("--resource-limit", f"no-file={_MAX_FILES}"),
            *("--resource-limit", f"fsize={largest}"),
            *("--", "--config-file", f"/{_VM}/{_CONFIG}", "--no-api"),
        ]

    def document(self, spec: VmSpec) -> Document:
        """What Firecracker is told; paths are those inside the jail. Raises LaunchError."""
        if spec.vcpus > _MAX_VCPUS:
            raise LaunchError(
                f"Firecracker gives a guest {_MAX_VCPUS} vCPUs at most, not {spec.vcpus}",
                hint="ask for fewer (vcpus in the App or the kernelspec)",
            )
        return Document(
            machine_config=MachineConfig(spec.vcpus, spec.memory_mib),
            cpu_config=_at(_CPU),
            boot_source=BootSource(_at("kernel"), _at("initramfs"), " ".join(_BOOT_ARGS)),
            drives=tuple(
                Drive(name, _at(name), drive.read_only, self._disk_limit())
                for name, drive in zip(_drive_names(spec), spec.drives, strict=True)
            ),
            vsock=Vsock(wire.GUEST_CID, f"/{_IO}/{vsock.SOCKET}"),
            entropy=Entropy(
                RateLimiter.of(bytes_per_second=_ENTROPY_RATE, operations_per_second=0)
            ),
            balloon=None if DISCARD.of(self.release.version) else Balloon(),
            logger=Logger(),
        )

    @asynccontextmanager
    async def run(
        self, spec: VmSpec, jail: Jail, *, console: int, log: int
    ) -> AsyncIterator[Machine]:
        """See `Vmm.run`. Raises LaunchError where the files cannot be put into the jail."""
        self.furnish(spec, jail)
        process = await self._spawn(spec, jail, console=console, log=log)
        try:
            yield Machine(process, statuses=_STATUSES)
        finally:
            await process.stop(0.0)
            process.close()

    def furnish(self, spec: VmSpec, jail: Jail) -> None:
        """Put into the jail what the machine needs, before anything runs in it."""
        folder = jail.folder / self._root(jail.slot) / _VM
        folder.mkdir()
        folder.chmod(0o755)
        files = {"kernel": spec.kernel, "initramfs": spec.initramfs}
        files |= dict(zip(_drive_names(spec), (drive.path for drive in spec.drives), strict=True))
        for name, source in files.items():
            _link(source, folder / name)
        _write_new(folder / _CPU, CpuConfig().encode())
        _write_new(folder / _CONFIG, self.document(spec).encode())

    async def _spawn(self, spec: VmSpec, jail: Jail, *, console: int, log: int) -> Process:
        """The one place where it is started. Stdin is /dev/null: the serial port takes no input."""
        argv = [*_RIGHTS, *self.command(spec, jail)]
        return await jail.start_with_rights(argv, env=_ENV, stdout=console, log=log, umask=_UMASK)

    def _root(self, slot: Slot) -> Path:
        return Path(self.release.firecracker.name) / slot.name / "root"

    def _disk_limit(self) -> RateLimiter | None:
        return RateLimiter.of(
            bytes_per_second=self.disk_bytes, operations_per_second=self.disk_operations
        )


def _at(name: str) -> str:
    return f"/{_VM}/{name}"


def _drive_names(spec: VmSpec) -> list[str]:
    """In the order in which the guest numbers them."""
    return [f"disk{number}" for number in range(len(spec.drives))]


def _link(source: Path, target: Path) -> None:
    """A hard link, never through a symbolic one: the file itself, whatever happens to its name."""
    if not stat.S_ISREG(source.lstat().st_mode):
        raise LaunchError(f"{source} is no regular file")
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        raise LaunchError(
            f"{source} lies on another file system than the sandboxes",
            hint="Firecracker needs images and sandboxes of a state folder in one file system",
        ) from None


def _write_new(path: Path, data: bytes) -> None:
    """For the VMM to read; nobody but root can change it."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with os.fdopen(fd, "wb") as file:
        os.fchmod(fd, 0o644)
        file.write(data)
