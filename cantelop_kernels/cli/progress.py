"""The progress of a notebook on stderr: one line per cell, and a spinner for a terminal."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from cantelop_kernels.cli.terminal import harmless

_SOURCE_WIDTH = 56


def first_line(source: str) -> str:
    """The first line of a cell that says something, cut to fit."""
    lines = [harmless(line, colours=False).strip() for line in source.splitlines()]
    line = next((text for text in lines if text), "")
    return line if len(line) <= _SOURCE_WIDTH else line[: _SOURCE_WIDTH - 1] + "…"


def runs(cell: Any) -> bool:
    """Whether a cell is one that a kernel gets to see."""
    return bool(cell.cell_type == "code" and cell.source.strip())


class Progress:
    """`start`, then per cell `begin` and `end`, then `close` (idempotent; in any case)."""

    def __init__(self, total: int, *, spinner: bool) -> None:
        self.total = total
        self.number = 0
        """Of the cell that runs, or ran last, counted among those that run: as in `In [n]`."""
        self._source = ""
        self._since = time.monotonic()
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar: Bar | None = None
        self._spinner = spinner and self._console.is_terminal

    def start(self) -> None:
        self._spin("starting a microVM")

    def ready(self) -> None:
        """The kernel has answered."""
        self._stop()
        self._line("microVM ready", self._seconds(), "green")

    def begin(self, source: str) -> None:
        self.number += 1
        self._source = first_line(source)
        if self._spinner:
            self._spin(self._label())
        elif sys.stdout.isatty():
            self._console.print(Text(self._label(), style="dim"))
        self._since = time.monotonic()

    def end(self, *, ok: bool = True) -> None:
        self._stop()
        self._line(self._label(), self._seconds(), "green" if ok else "bold red")

    def close(self) -> None:
        self._stop()

    def _label(self) -> str:
        width = len(str(self.total))
        return f"[{self.number:>{width}}/{self.total}] {self._source}"

    def _seconds(self) -> str:
        return f"{time.monotonic() - self._since:.1f} s"

    def _line(self, label: str, took: str, style: str) -> None:
        pad = _SOURCE_WIDTH + 2 * len(str(self.total)) + 4
        text = Text(f"{label:<{pad}} ")
        self._console.print(text + Text(f"{took:>8}", style=style))

    def _spin(self, label: str) -> None:
        self._since = time.monotonic()
        self._stop()
        if self._spinner:
            text = TextColumn("{task.description}", markup=False)
            columns = (SpinnerColumn(), text, TimeElapsedColumn())
            self._bar = Bar(*columns, console=self._console, transient=True)
            self._bar.add_task(label, total=None)
            self._bar.start()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
