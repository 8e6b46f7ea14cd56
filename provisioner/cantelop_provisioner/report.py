"""What people are told when a kernel does not start, or ends by itself. Pure functions."""

from __future__ import annotations

from typing import ClassVar

from cantelop_kernels.errors import CantelopError, LaunchError
from cantelop_kernels.schema import Exit

CONSOLE_LINES = 12
"""Lines of the guest's console in an error message; `cantelop logs` has more."""

KILLED = -9
GONE = 1
"""Exit code of a kernel of which nothing is known any more."""

LOST = "the kernel died: the daemon is gone, and its sandbox with it"
STOPPED = "the kernel died: the daemon was stopped, and has ended its sandboxes"


class KernelNotStarted(LaunchError):
    """A launch that failed, with the guest's last words in its text.

    jupyter_server and nbclient show str() of an exception and nothing else of it.
    """

    code: ClassVar[str] = "kernel_not_started"

    def __str__(self) -> str:
        console = str(self.details.get("console") or "").strip()
        if not console:
            return super().__str__()
        tail = "\n".join(console.splitlines()[-CONSOLE_LINES:])
        return f"{super().__str__()}\nThe guest's console, last lines:\n{tail}"


def launch_failure(error: CantelopError) -> CantelopError:
    """The error to raise from a launch: the same one, or with the console where there is one."""
    if not isinstance(error, LaunchError):
        return error
    return KernelNotStarted(error.message, hint=error.hint, **error.details)


def exit_code(ended: Exit | None) -> int:
    """As subprocess has it: minus the signal where one ended the kernel."""
    if ended is None:
        return GONE
    if ended.signal:
        return -ended.signal
    return GONE if ended.exit_code is None else ended.exit_code


def death(ended: Exit | None) -> str:
    """One sentence on why a kernel that nobody asked to end is dead."""
    if ended is None:
        return "the kernel died: its sandbox is gone"
    text = f"the kernel died: {ended.reason}"
    if not ended.oom or "peak" in ended.reason:  # the daemon's own words say it all
        return text
    facts = f"limit {mebibytes(ended.memory_limit)}, peak {mebibytes(ended.memory_peak)}"
    reason = "" if "out of memory" in ended.reason.lower() else "out of memory, "
    return f"{text} ({reason}{facts})"


def mebibytes(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB"
