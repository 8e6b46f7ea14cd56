"""The one error policy: what a user sees of an exception, and the exit code it becomes.

An error of ours is a line that says what, and a line that says how to fix it. Anything else is a
fault of this program: one line as well, and the traceback where it was asked for.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from typing import IO

from cantelop_kernels.cli.terminal import harmless
from cantelop_kernels.errors import CantelopError

INTERNAL = 70
"""EX_SOFTWARE of sysexits.h: this program is at fault."""

CONSOLE_LINES = 12


class Stopped(Exception):
    """The user or the system asked this program to end; everything was undone."""

    def __init__(self, signum: int, farewell: str = "") -> None:
        """`farewell` is what became of the work, where there is anything to say."""
        super().__init__(signal.Signals(signum).name)
        self.exit_code = 128 + signum
        self.farewell = farewell


def exit_code(error: BaseException, *, debug: bool, stream: IO[str] | None = None) -> int:
    """Say what went wrong on `stream` (default stderr) and return the code to exit with."""
    out = stream or sys.stderr
    match error:
        case Stopped():
            code = error.exit_code
            if error.farewell:
                out.write(f"cantelop: interrupted ({error}): {error.farewell}\n")
        case KeyboardInterrupt():
            code = 128 + signal.SIGINT
        case BrokenPipeError():
            code = 128 + signal.SIGPIPE
        case CantelopError():
            code = error.exit_code
            out.write(describe(error))
        case _:
            code = INTERNAL
            out.write(_internal(error, debug))
    if debug and code != INTERNAL:
        out.write("".join(traceback.format_exception(error)))
    return code


def describe(error: CantelopError) -> str:
    """What, how to fix it, and for a failed launch where and what the guest said last."""
    lines = [f"cantelop: {_line(error.message)}"]
    if error.hint:
        lines.append(f"  hint: {_line(error.hint)}")
    if step := error.details.get("step"):
        lines.append(f"  step: {_line(str(step))}")
    console = harmless(str(error.details.get("console") or ""), colours=False)
    tail = [line.rstrip() for line in console.splitlines() if line.strip()][-CONSOLE_LINES:]
    if tail:
        lines.append("  the guest's console ended with:")
        lines += [f"    {line}" for line in tail]
    return "\n".join(lines) + "\n"


def _line(text: str) -> str:
    return " ".join(harmless(text, colours=False).split())


def _internal(error: BaseException, debug: bool) -> str:
    if debug:
        return "".join(traceback.format_exception(error))
    what = _line(f"{type(error).__name__}: {error}")
    return f"cantelop: unexpected error: {what}\n  hint: see where with: cantelop --debug ...\n"


def debug_wanted() -> bool:
    """`$CANTELOP_DEBUG` set to anything but 0."""
    return os.environ.get("CANTELOP_DEBUG", "0") not in ("", "0")
