"""What the figures were taken on. No name, address or path of the machine is among it.

Layer 6. Called by `cli.bench` and `tests/bench`; the facts go into the JSON and under the table.
"""

from __future__ import annotations

import os
import platform
import re
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from cantelop_kernels import __version__, host
from cantelop_kernels.errors import CantelopError
from cantelop_kernels.process import run
from cantelop_kernels.vmm.qemu import find_binary

_PACKAGES = ("ipykernel", "jupyter_client", "pyzmq", "tornado")
_CPUINFO = Path("/proc/cpuinfo")
_MODEL = re.compile(r"^model name\s*:\s*(.+)$", re.MULTILINE)


async def facts() -> dict[str, Any]:
    """JSON-serialisable. `virtualization` is "KVM" or "emulation"."""
    return {
        "taken": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(_CPUINFO.read_text(encoding="utf-8", errors="replace")),
        "cores": os.cpu_count() or 0,
        "memory_bytes": psutil.virtual_memory().total,
        "linux": platform.release(),
        "virtualization": "KVM" if host.hardware_kvm() else "emulation",
        "versions": await _versions(),
    }


def cpu_model(cpuinfo: str) -> str:
    """The first processor's name, or the machine's architecture where none is said."""
    found = _MODEL.search(cpuinfo)
    return found[1].strip() if found else platform.machine()


async def _versions() -> dict[str, str]:
    found = {"cantelop": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    try:
        said = (await run([str(find_binary()), "--version"], deadline=20)).stdout
    except CantelopError:
        return found
    match = re.search(r"version (\S+)", said)
    return found | ({"qemu": match[1]} if match else {})
