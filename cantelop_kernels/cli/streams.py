"""Our own stdin, stdout and stderr, which whoever starts a command may have closed, or filled.

Used by `__main__`. What goes to stdout is what a command is for: where it is lost, that is an
error. stderr is where errors are told: where it is closed there is nobody to tell.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from cantelop_kernels.errors import CantelopError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class OutputLost(CantelopError):
    """stdout does not take what is written to it."""

    code = "output_lost"


class _Stdout(io.FileIO):
    """A reader that went away stays a BrokenPipeError, which is no news to anybody."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except (BrokenPipeError, BlockingIOError):
            raise
        except OSError as error:
            raise OutputLost(
                f"cannot write to stdout: {error.strerror}",
                hint="is the disk full, or stdout closed? the output is not whole",
            ) from error


def prepare() -> None:
    """Called once, before anything is opened: a file must not get the number of a closed stream.

    Leaves streams alone that are not the interpreter's own (a test's).
    """
    for number, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, flags)  # gets that number; a write to 1 then fails, by EBADF
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - lives as long as the process
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - likewise
    if sys.stdout is sys.__stdout__:
        old = sys.stdout
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_Stdout(1, "w", closefd=False)),
            encoding=old.encoding if old else None,
            errors=old.errors if old else None,
            line_buffering=bool(old and old.isatty()),
        )


def give_up_stdout() -> None:
    """Nothing more can be written: let the interpreter's last flush go nowhere."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
