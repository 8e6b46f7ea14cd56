"""Which VMM the daemon runs its sandboxes on, as configured and as this host can.

Layer 3, called once by the daemon when it starts. What would make a boundary hollow is refused
here, before anything is started: no hardware, a program that others could change, a version with
known flaws (THREATS.md 5, 12).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cantelop_kernels import host, tools, trust
from cantelop_kernels.config import Config
from cantelop_kernels.errors import CantelopError, ConfigError
from cantelop_kernels.vmm import Vmm
from cantelop_kernels.vmm.firecracker import Firecracker
from cantelop_kernels.vmm.firecracker_release import (
    RECOMMENDED,
    SETUP,
    Release,
    find,
    flaws,
    moot,
    told,
)
from cantelop_kernels.vmm.qemu import Qemu, find_binary, runtimes

_MIB = 1 << 20


async def default_vmm(config: Config, state: Path) -> Vmm:
    """Fetches QEMU's vsock helper where that is not there yet. Raises ConfigError, ToolError and
    ImageError where what is configured cannot be had."""
    hardware = host.hardware_kvm()
    if config.vmm == "firecracker" or (config.vmm == "auto" and hardware):
        release = await find(state)
        if release is not None or config.vmm == "firecracker":
            return firecracker(config, state, release, hardware=hardware)
    return await _qemu(state, emulated=not hardware)


def firecracker(
    config: Config, state: Path, release: Release | None, *, hardware: bool
) -> Firecracker:
    """Raises ConfigError with the reason why it cannot be."""
    if not hardware:
        raise ConfigError(
            "Firecracker needs hardware virtualization, and this machine has none",
            hint='use a host with KVM, or vmm = "auto" or "qemu"',
        )
    if release is None:
        raise ConfigError("Firecracker and its jailer are not installed", hint=SETUP)
    found = flaws(release.version)
    if found and not config.allow_vulnerable_firecracker:
        raise ConfigError(
            f"Firecracker {release.version} has known flaws: {told(found)}",
            hint=f"install {RECOMMENDED} or later ({SETUP}), or set allow_vulnerable_firecracker",
        )
    lacking = file_system_lacks(state)
    if lacking is not None:
        raise ConfigError(lacking[0], hint=lacking[1])
    return Firecracker(
        release,
        host.cgroup_version(),
        disk_bytes=config.disk_mib_per_second * _MIB,
        disk_operations=config.disk_operations_per_second,
        cgroup_parent=config.cgroup_parent,
    )


def file_system_lacks(state: Path) -> tuple[str, str] | None:
    """What keeps a jail below `state` from working, and how to mend it: the jail's /dev/kvm and its
    copy of Firecracker lie there."""
    found = os.statvfs(next(path for path in (state, *state.absolute().parents) if path.exists()))
    flags = {"nodev": os.ST_NODEV, "noexec": os.ST_NOEXEC}
    set_ = [name for name, flag in flags.items() if found.f_flag & flag]
    if not set_:
        return None
    return (
        f"{state} is mounted {' and '.join(set_)}, where Firecracker's jails cannot work",
        "mount it without, or set CANTELOP_STATE to another place",
    )


@dataclass(frozen=True, slots=True)
class Finding:
    """For `doctor`: how it is with Firecracker, what to do about it, and whether sandboxes run on
    it (or would, but for what was found); else they run on QEMU."""

    status: Literal["ok", "warn", "fail"]
    text: str
    fix: str
    used: bool


async def firecracker_found(config: Config, state: Path, *, hardware: bool) -> Finding:
    """What a daemon would make of Firecracker here."""
    needed = config.vmm == "firecracker"
    possible = needed or (config.vmm == "auto" and hardware)
    try:
        release = await find(state)
        if release is None and not needed:
            status: Literal["ok", "warn"] = "warn" if possible else "ok"
            text = "not installed, so QEMU runs the sandboxes"
            return Finding(status, text, SETUP if possible else "", used=False)
        made = firecracker(config, state, release, hardware=hardware or not needed).release.version
    except CantelopError as error:
        return Finding("fail" if possible else "warn", error.message, error.hint, used=possible)
    harmless = "".join(f"; {one.name} does no harm: {one.harmless}" for one in moot(made))
    if known := flaws(made):
        text = f"{made} has known flaws, which are allowed: {told(known)}{harmless}"
        return Finding("warn", text, f"{SETUP} ({RECOMMENDED} or later)", used=possible)
    return Finding("ok", f"{made}{harmless}", "", used=possible)


async def _qemu(state: Path, *, emulated: bool) -> Qemu:
    helper = await tools.ensure_vhost_device_vsock(state)
    binary = find_binary()
    for program in (binary, helper):
        trust.require(program)
    inside = await runtimes(state, binary, helper)
    return Qemu(binary, helper, emulated, host.tsc_khz(), inside)
