"""What this machine is: virtualization, clock rate, memory.

Layer 1. Pure functions over the text of /proc files, and a thin reader for each. Called by the VMM
backends (which accelerator, which clock) and by `preflight` (whether sandboxes can run here).
"""

from __future__ import annotations

import re
import stat
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_MEMINFO = Path("/proc/meminfo")
_VMSTAT = Path("/proc/vmstat")
_KVM = Path("/dev/kvm")
_CGROUP = Path("/sys/fs/cgroup")

_MHZ = re.compile(r"^cpu MHz\s*:\s*([0-9.]+)", re.MULTILINE)
_NOMINAL_GHZ = re.compile(r"^model name\s*:.*@\s*([0-9.]+)\s*GHz", re.MULTILINE)
_FLAGS = re.compile(r"^flags\s*:(.*)$", re.MULTILINE)

FALLBACK_KHZ = 2_000_000
"""Used where /proc/cpuinfo names no frequency at all."""


def hardware_virtualization(cpuinfo: str, kvm_exists: bool) -> bool:
    """Whether guests run on the hardware: the CPU has `vmx` or `svm`, and there is a /dev/kvm.

    The device alone says nothing. On a machine without either flag it can exist, open and create
    VMs, and an ordinary guest kernel still never reaches its init.
    """
    found = _FLAGS.search(cpuinfo)
    flags = set(found.group(1).split()) if found else set()
    return kvm_exists and bool(flags & {"vmx", "svm"})


def hardware_kvm() -> bool:
    """`hardware_virtualization` of this machine."""
    return hardware_virtualization(_read(_CPUINFO), kvm_device())


def kvm_device() -> bool:
    """Whether /dev/kvm is there, as a character device."""
    try:
        return stat.S_ISCHR(_KVM.stat().st_mode)
    except OSError:
        return False


def khz_from_cpuinfo(cpuinfo: str) -> int:
    """Best estimate of the time stamp counter's rate, in kHz.

    The nominal rate in the model's name comes first: the TSC ticks at it, whatever the clock does
    now. Otherwise the first "cpu MHz", which inside a VM is the TSC's rate.
    """
    nominal = _NOMINAL_GHZ.search(cpuinfo)
    if nominal:
        return round(float(nominal.group(1)) * 1_000_000)
    current = _MHZ.search(cpuinfo)
    return round(float(current.group(1)) * 1000) if current else FALLBACK_KHZ


def tsc_khz() -> int:
    """`khz_from_cpuinfo` of this machine."""
    return khz_from_cpuinfo(_read(_CPUINFO))


def available_from_meminfo(meminfo: str) -> int:
    """Bytes that can be had without swapping (`MemAvailable`); 0 where it is not said."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB", meminfo, re.MULTILINE)
    return int(found.group(1)) * 1024 if found else 0


def memory_total() -> int:
    """Bytes of this machine (`MemTotal`)."""
    found = re.search(r"^MemTotal:\s*(\d+) kB", _read(_MEMINFO), re.MULTILINE)
    return int(found.group(1)) * 1024 if found else 0


def memory_available() -> int:
    """`available_from_meminfo` of this machine."""
    return available_from_meminfo(_read(_MEMINFO))


def oom_kills_from_vmstat(vmstat: str) -> int:
    """Processes that Linux has killed for want of memory, since it started (`oom_kill`, Linux 4.13
    and later; those killed at the limit of a control group among them)."""
    found = re.search(r"^oom_kill (\d+)$", vmstat, re.MULTILINE)
    return int(found.group(1)) if found else 0


def oom_kills() -> int:
    """`oom_kills_from_vmstat` of this machine."""
    return oom_kills_from_vmstat(_read(_VMSTAT))


def cgroup_version(root: Path = _CGROUP) -> int:
    """2 where the controllers are in one tree, 1 where each has its own (hybrid hosts too)."""
    return 2 if (root / "cgroup.controllers").exists() else 1


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
