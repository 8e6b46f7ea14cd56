"""Where guests' memory may go: pages shared by content, and disks.

Layer 6, part of `preflight`.
"""

from __future__ import annotations

from pathlib import Path

from cantelop_kernels.preflight.model import Check, text_of


def ksm(*, emulated: bool, run: Path = Path("/sys/kernel/mm/ksm/run")) -> Check:
    """Kernel samepage merging: 1 is running (admin-guide/mm/ksm.rst of Linux)."""
    if text_of(run) != "1":
        return Check("KSM", "ok", "pages of different guests are not merged")
    found = "pages of equal content are merged: by timing a guest learns what another one holds"
    if emulated:
        return Check("KSM", "ok", f"{found}; that adds nothing to emulation")
    return Check("KSM", "warn", found, f"echo 2 > {run}, and stop what turns it on (ksmtuned)")


def swap(*, emulated: bool, swaps: Path = Path("/proc/swaps")) -> Check:
    """Swap in compressed memory (zram) ends with the machine; any other is a disk."""
    disks = [name for name in swap_areas(text_of(swaps)) if not name.startswith("/dev/zram")]
    if not disks:
        return Check("swap", "ok", "guests' memory goes to no disk")
    found = f"guests' memory can be written to {', '.join(disks)}, and stays there"
    if emulated:
        return Check("swap", "ok", f"{found}; that adds nothing to emulation")
    return Check("swap", "warn", found, f"swapoff {' '.join(disks)}, or encrypt it (crypttab)")


def swap_areas(swaps: str) -> list[str]:
    """Files and devices of /proc/swaps, whose first line is a heading (proc_swaps(5))."""
    lines = [line.split() for line in swaps.splitlines()[1:]]
    return [words[0] for words in lines if words]
