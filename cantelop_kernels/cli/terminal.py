"""Text for a terminal: what came out of a sandbox is made harmless, tables are lined up.

A guest may write any bytes. Shown as they are, they could set the clipboard or the title, answer
for the user or hide lines, so only what formats text passes: colours, newline, tab, carriage
return and backspace.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import IO

_SGR = r"\x1b\[[0-9;:]*m"
_ESCAPES = re.compile(
    rf"(?P<sgr>{_SGR})"
    r"|\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: cursor, erase, modes
    r"|\x1b[\]PX^_][^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"  # OSC, DCS and their like
    r"|\x1b[ -/]*[0-~]?"  # any other escape, whole or cut off
    r"|[\x00-\x07\x0b\x0c\x0e-\x1f\x7f-\x9f]"  # control characters, C1 included
)


def harmless(text: str, *, colours: bool) -> str:
    """`text` without anything that steers a terminal; colours stay where they are asked for.

    Each call stands alone: of a sequence that is cut in two, both halves lose their power.
    """
    return _ESCAPES.sub(lambda match: (match["sgr"] or "") if colours else "", text)


def write(stream: IO[str], text: str) -> None:
    """Guest's text to one of our streams: filtered for a terminal, as it is for a file or pipe."""
    if stream.isatty():
        text = harmless(text, colours=True)
    stream.write(text)
    stream.flush()


def traceback(lines: Sequence[str], stream: IO[str]) -> None:
    """A kernel's coloured traceback; without colours where nobody sees them."""
    stream.write(harmless("\n".join(lines), colours=stream.isatty()) + "\n")
    stream.flush()


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns lined up with two blanks between them; the last one is not padded."""
    cells = [headers, *rows]
    widths = [max(len(row[at]) for row in cells) for at in range(len(headers))]
    lines = (
        "  ".join(text.ljust(width) for text, width in zip(r, widths, strict=True)) for r in cells
    )
    return "\n".join(line.rstrip() for line in lines)


def age(seconds: float) -> str:
    """Short: 5s, 3m, 2h, 4d."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{max(0, int(seconds))}s"


def note(text: str) -> None:
    """A line for the person at the terminal, away from the program's output."""
    sys.stderr.write(f"cantelop: {text}\n")
    sys.stderr.flush()
