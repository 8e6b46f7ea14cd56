"""Progress of something long on stderr: what runs now, and a line for each step that is done."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

_WIDTH = 60


class Steps:
    """A context; each `begin` ends the step before it."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        text = TextColumn("{task.description}", markup=False)
        columns = (SpinnerColumn(), text, TimeElapsedColumn())
        self._bar = Progress(*columns, console=self._console, transient=True)
        self._bar.disable = not self._console.is_terminal
        self._task = self._bar.add_task("", total=None)
        self._name = ""
        self._since = 0.0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self._end(ok=kind is None)
        self._bar.stop()

    def begin(self, name: str) -> None:
        """The next step, in a few words."""
        self._end(ok=True)
        self._name, self._since = name, time.monotonic()
        self._bar.reset(self._task, description=name)

    def _end(self, *, ok: bool) -> None:
        if self._name:
            took = f"{time.monotonic() - self._since:8.1f} s"
            line = Text(f"{self._name:<{_WIDTH}} ")
            self._console.print(line + Text(took, style="green" if ok else "bold red"))
        self._name = ""
