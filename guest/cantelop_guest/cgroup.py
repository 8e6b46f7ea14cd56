"""The kernel's control group (v2) inside the guest: what it may use, and what became of it.

A cell that wants all memory must cost the kernel its life, never the agent's: only the agent can
tell the host what happened.
"""

from __future__ import annotations

import os

ROOT = "/sys/fs/cgroup"
MAX_PIDS = 4096
RESERVE = 64 * 1024 * 1024
"""Bytes kept from the kernel: the agent, and what the guest's Linux charges to nobody."""


class KernelCgroup:
    """Made once, before the kernel's process; lives as long as the VM."""

    def __init__(self, memory_total: int) -> None:
        self.path = f"{ROOT}/kernel"
        self.limit = memory_total - min(RESERVE, memory_total // 4)

    def create(self) -> None:
        _write(f"{ROOT}/cgroup.subtree_control", "+memory +pids")
        os.mkdir(self.path)
        _write(f"{self.path}/memory.max", str(self.limit))
        _write(f"{self.path}/memory.oom.group", "1")
        _write(f"{self.path}/pids.max", str(MAX_PIDS))

    def enter(self) -> None:
        """Called by the process that is to become the kernel."""
        _write(f"{self.path}/cgroup.procs", "0")

    @property
    def current(self) -> int:
        return int(_read(f"{self.path}/memory.current"))

    @property
    def peak(self) -> int:
        return int(_read(f"{self.path}/memory.peak"))

    @property
    def cpu_seconds(self) -> float:
        """cpu.stat is there without the cpu controller, which would cost at every switch."""
        usage = _read(f"{self.path}/cpu.stat").split()
        return int(usage[usage.index("usage_usec") + 1]) / 1e6

    @property
    def oom_kills(self) -> int:
        events = dict(line.split() for line in _read(f"{self.path}/memory.events").splitlines())
        return int(events["oom_kill"])


def _read(path: str) -> str:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 4096).decode()
    finally:
        os.close(descriptor)


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
