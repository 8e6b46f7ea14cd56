"""Figures of a run that never was, with one row of every kind."""

from __future__ import annotations

from typing import Any

from cantelop_kernels.bench.figures import BASE, About, Results, Row

MACHINE: dict[str, Any] = {
    "taken": "2026-01-02T03:04:05+00:00",
    "cpu": "A <Fast> & Good CPU",
    "cores": 2,
    "memory_bytes": 8 << 30,
    "linux": "6.12",
    "virtualization": "emulation",
    "versions": {"cantelop": "0.1.0", "python": "3.13"},
}


def results() -> Results:
    """Two targets; a figure that is lower, one that is higher, one that applies to one only."""
    targets = [About(BASE, "local"), About("microvm", "microVM", "qemu", True, 4)]
    rows = [
        Row("start_execute", "start", "s"),
        Row("start_execute_p99", "start, p99", "s"),
        Row("iopub", "iopub, 50 MB", "MB/s", "higher"),
        Row("memory", "memory in the guest", "MiB"),
        Row("lost", "lost", ""),
        Row("empty", "never measured", "s"),
    ]
    made = Results(MACHINE, {"starts": 3}, targets, rows)
    made.add("start_execute", BASE, [0.4, 0.6])
    made.add("start_execute", BASE, [0.5])
    made.add("start_execute", "microvm", [8.0, 9.0, 30.0])
    made.summarise("start_execute")
    for name, local, sandboxed in (("iopub", 100.0, 25.0), ("lost", 0, 0)):
        made.put(name, BASE, local)
        made.put(name, "microvm", sandboxed)
    made.put("memory", "microvm", 79.5)
    return made
