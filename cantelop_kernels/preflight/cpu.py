"""The processor: can it run guests, and what do guests learn of each other through it?

Layer 6, part of `preflight`. Side channels matter where guests run on the hardware; under
emulation, which is no boundary to begin with, they are told and nothing more.
"""

from __future__ import annotations

import re
from pathlib import Path

from cantelop_kernels.preflight.model import Check, text_of

_PAGING = (("kvm_intel", "ept"), ("kvm_amd", "npt"))
"""Module and parameter, which is also the CPU's flag."""

_WEAK = re.compile(r"\bvulnerable\b|\bno mitigations\b", re.IGNORECASE)


def virtualization(hardware: bool, kvm_device: bool, *, allowed: bool) -> Check:
    """THREATS 5: without hardware, a start is refused unless emulation was allowed."""
    if hardware:
        return Check("virtualization", "ok", "the CPU runs guests in hardware (KVM)")
    lacks = "no /dev/kvm"
    if kvm_device:
        lacks = "/dev/kvm is there, but the CPU has neither vmx nor svm, so it cannot run guests"
    if allowed:
        return Check(
            "virtualization",
            "warn",
            f"{lacks}: sandboxes are emulated, which is slow and no security boundary",
            "run untrusted code only on a machine with hardware virtualization",
        )
    return Check(
        "virtualization",
        "fail",
        lacks,
        "use a machine with (nested) virtualization turned on, or --allow-emulation to try it out",
    )


def nested_paging(
    hardware: bool,
    cpuinfo: Path = Path("/proc/cpuinfo"),
    modules: Path = Path("/sys/module"),
) -> Check:
    """EPT (Intel) or NPT (AMD): without it the host keeps each guest's page tables by software."""
    name = "nested paging"
    if not hardware:
        return Check(name, "ok", "not used: no guest runs on the hardware")
    for module, flag in _PAGING:
        if text_of(modules / module / "parameters" / flag) in ("N", "0"):
            return Check(
                name,
                "warn",
                f"{module} was loaded with {flag}=0: guests are slow, and the code that stands in"
                " for it has a history of holes",
                f"take {flag}=0 out of /etc/modprobe.d and load {module} again",
            )
    words = set(text_of(cpuinfo).split())
    found = [flag for _, flag in _PAGING if flag in words]
    if not found:
        return Check(
            name,
            "warn",
            "the CPU shows neither ept nor npt: guests are slow, and the code that stands in for it"
            " has a history of holes",
            "turn it on in the firmware, or in the settings of the machine that this one runs on",
        )
    return Check(name, "ok", f"the CPU has {found[0]}")


def smt(*, emulated: bool, control: Path = Path("/sys/devices/system/cpu/smt/control")) -> Check:
    """Two threads of a core share its caches and buffers (admin-guide/hw-vuln/ of Linux)."""
    state = text_of(control)
    if state != "on":
        return Check("SMT", "ok", f"simultaneous multithreading is {state or 'not there'}")
    found = "on: two guests on the threads of one core can learn from each other's caches"
    if emulated:
        return Check("SMT", "ok", f"{found}; that adds nothing to emulation")
    return Check(
        "SMT",
        "warn",
        found,
        f"echo off > {control} (or boot with nosmt) where sandboxes do not trust each other",
    )


def mitigations(
    *, emulated: bool, folder: Path = Path("/sys/devices/system/cpu/vulnerabilities")
) -> Check:
    """What Linux says of each known flaw of this CPU (sysfs-devices-system-cpu of Linux)."""
    name = "CPU flaws"
    weak = vulnerable({path.name: text_of(path) for path in _files(folder)})
    if not weak:
        return Check(name, "ok", "Linux knows of none that it does not mitigate")
    found = f"not, or not wholly, mitigated: {', '.join(weak)}"
    if emulated:
        return Check(name, "ok", f"{found}; that adds nothing to emulation")
    return Check(
        name,
        "warn",
        f"{found}: a guest may read memory of others",
        f"install the CPU's microcode, boot without mitigations=off, and see {folder}",
    )


def vulnerable(states: dict[str, str]) -> list[str]:
    """Names of the flaws, sorted, whose state says that something is open."""
    return sorted(name for name, state in states.items() if _WEAK.search(state))


def _files(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_file()]
    except OSError:
        return []
