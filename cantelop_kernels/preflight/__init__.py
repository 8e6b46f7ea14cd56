"""Can this machine run sandboxes? Each check says what it found, what it means and how to fix it.

Layer 6, behind `cantelop doctor`, and before the daemon listens (`boundary`). Looks and changes
nothing; may be run as any user, and tells what only root can see as such. A check never raises for
what it is there to find, and looks where it is told to, so that tests can make machines up.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from cantelop_kernels import config, host
from cantelop_kernels.config import App, Config
from cantelop_kernels.errors import ConfigError
from cantelop_kernels.preflight import cpu, files, jupyter, linux, memory, programs, service, users
from cantelop_kernels.preflight.model import Check, Status
from cantelop_kernels.slot import uid_range

__all__ = ["Check", "Status", "boundary", "checks", "refusal", "settings_check"]


async def checks(state: Path, socket: Path, *, allow_emulation: bool) -> list[Check]:
    """All of them, in the order in which a launch would stumble over them."""
    settings, first = settings_check()
    allowed = allow_emulation or settings.allow_emulation
    hardware = host.hardware_kvm()
    return [
        first,
        cpu.virtualization(hardware, host.kvm_device(), allowed=allowed),
        cpu.nested_paging(hardware),
        *await programs.vmms(settings, state),
        linux.namespaces(),
        linux.cgroups(required=True),
        await linux.nftables(),
        _uids(settings),
        files.state_folder(state),
        *[await asyncio.to_thread(files.image, state, name) for name in files.images_of(settings)],
        *await service.daemon(socket),
        *jupyter.kernelspecs(),
        files.ownership(files.trusted_files(state, settings)),
        cpu.mitigations(emulated=not hardware),
        cpu.smt(emulated=not hardware),
        memory.ksm(emulated=not hardware),
        memory.swap(emulated=not hardware),
    ]


def boundary(settings: Config, state: Path) -> list[Check]:
    """Those whose failure makes a boundary hollow; the daemon does not start with one of them.

    Before it has done anything: its first deed is to kill every process of the uids that it takes
    for sandboxes'. Whether guests run on the hardware is the VMM's to say (`Vmm.emulated`).
    """
    return [
        _uids(settings),
        files.ownership(files.trusted_files(state, settings)),
        linux.namespaces(),
        linux.cgroups(required=True),
    ]


def refusal(found: list[Check]) -> ConfigError | None:
    """The first that failed, as the error with which a daemon does not start."""
    failed = next((check for check in found if check.status == "fail"), None)
    if failed is None:
        return None
    return ConfigError(f"not safe to start ({failed.name}): {failed.found}", hint=failed.fix)


def settings_check() -> tuple[Config, Check]:
    """The operator's settings, or the defaults where they cannot be read."""
    try:
        return config.load(), Check("configuration", "ok", "valid")
    except ConfigError as error:
        plain = Config("defaults", {"apps": {"default": App("default", {})}})
        return plain, Check("configuration", "fail", error.message, error.hint)


def _uids(settings: Config) -> Check:
    return users.uids(uid_range(settings.uid_base), users.host_users(), users.host_groups())
