"""How a kernel ended: its guest's report, made plausible and put into words for people.

Layer 5. Used by `session`, and by `lease` for what a guest says of the cell that runs.
"""

from __future__ import annotations

import re
import signal
from typing import Any

from cantelop_kernels.schema import Exit

_MIB = 1 << 20
_MESSAGE_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


def describe(exited: dict[str, Any], memory: int) -> Exit:
    """The guest's report as an `Exit`, with its reason in words for people.

    A guest may report what it likes: `memory`, in bytes, is what it was given, and nothing in it
    can have used more; a status has a byte, and there are 64 signals.
    """
    exited = plausible(exited, memory)
    limit, peak = exited["memory_limit"], exited["memory_peak"]
    if exited["oom"]:
        reason = (
            f"out of memory: the kernel was killed at its limit of {limit / _MIB:.0f} MiB "
            f"(peak {peak / _MIB:.0f} MiB); use less, or ask for more with memory_mib"
        )
    elif exited["signal"] is not None:
        reason = f"the kernel was killed by {_signal_name(exited['signal'])}"
    elif exited["exit_code"] == 0:
        reason = "the kernel exited"
    else:
        reason = f"the kernel exited with status {exited['exit_code']}"
    return Exit(
        reason=reason,
        exit_code=exited["exit_code"],
        signal=exited["signal"],
        oom=exited["oom"],
        memory_limit=limit,
        memory_peak=peak,
        cell=cell_id(exited["cell"]),
    )


def cell_id(said: str) -> str:
    """What a guest calls the cell that runs, where that can be a message's id; else nothing."""
    return said if _MESSAGE_ID.fullmatch(said) else ""


def plausible(exited: dict[str, Any], memory: int) -> dict[str, Any]:
    """The same report with every number within what can be; a kernel that ended neither way is
    taken to have failed."""
    code, signum = exited["exit_code"], exited["signal"]
    signum = signum if signum is not None and 1 <= signum < signal.NSIG else None
    limit = _between(0, exited["memory_limit"], memory)
    return exited | {
        "signal": signum,
        "exit_code": None if signum else _between(0, 1 if code is None else code, 255),
        "memory_limit": limit,
        "memory_peak": _between(0, exited["memory_peak"], memory),
    }


def _between(least: int, value: int, most: int) -> int:
    return max(least, min(value, most))


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"
