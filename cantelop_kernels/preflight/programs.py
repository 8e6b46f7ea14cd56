"""The programs that make a virtual machine: there, and able to run here.

Layer 6, part of `preflight`.
"""

from __future__ import annotations

from pathlib import Path

from cantelop_kernels import host, tools
from cantelop_kernels.config import Config
from cantelop_kernels.errors import CantelopError
from cantelop_kernels.preflight.model import Check
from cantelop_kernels.process import run
from cantelop_kernels.vmm.choice import firecracker_found
from cantelop_kernels.vmm.qemu import find_binary

_DEADLINE = 20.0


async def vmms(settings: Config, state: Path) -> list[Check]:
    """The VMM for production, with what is known against it, and QEMU where that is used."""
    found = await firecracker_found(settings, state, hardware=host.hardware_kvm())
    first = Check("firecracker", found.status, found.text, found.fix)
    if found.used:
        return [first]
    return [first, await qemu(), await vsock(tools.find_vhost_device_vsock(state))]


async def qemu() -> Check:
    try:
        path = find_binary()
        version = (await run([str(path), "--version"], deadline=_DEADLINE)).stdout
    except CantelopError as error:
        return Check("qemu", "fail", error.message, error.hint)
    return Check("qemu", "ok", f"{version.splitlines()[0] if version else 'QEMU'} ({path})")


async def vsock(path: Path | None) -> Check:
    """QEMU's vsock device is a process of its own, at `path`; Firecracker brings its own. Neither
    wants /dev/vhost-vsock of the host."""
    if path is None:
        return Check(
            "vsock",
            "warn",
            f"{tools.VHOST_DEVICE_VSOCK} is not there yet; a daemon's first start fetches it",
            "start the daemon once while the package mirror can be reached",
        )
    try:
        said = (await run([str(path), "--version"], deadline=_DEADLINE)).stdout.strip()
    except CantelopError as error:
        return Check(
            "vsock",
            "fail",
            f"{path} does not run here: {error.message}",
            "it wants glibc 2.34 or newer; remove it to have it fetched again",
        )
    return Check("vsock", "ok", f"{said or path.name} ({path})")
