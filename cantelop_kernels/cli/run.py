"""`cantelop run`: a notebook in a fresh microVM, by nbclient with our provisioner."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import ValidationError

from cantelop_kernels.cli import kernel, notebook, terminal
from cantelop_kernels.cli.display import MALFORMED, Display, malformed
from cantelop_kernels.cli.progress import Progress, runs
from cantelop_kernels.cli.streams import OutputLost
from cantelop_kernels.errors import BadRequest, CantelopError, NotebookError

_OUTPUT_DEADLINE = 300
"""Seconds for output that is still on its way when a cell has ended; it is never dropped."""


def add_parser(commands: Any) -> None:
    """Called by `__main__`."""
    parser = commands.add_parser(
        "run",
        help="run a notebook in a fresh microVM",
        description="Run a notebook in a fresh microVM and save it with its outputs, also where a "
        "cell fails (exit code 1) or the run is stopped half-way.",
    )
    parser.add_argument("notebook", metavar="NOTEBOOK", type=Path)
    out = parser.add_mutually_exclusive_group()
    out.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        help="where the executed notebook goes (default: NOTEBOOK's name with .out.ipynb; - is "
        "stdout)",
    )
    out.add_argument("--inplace", action="store_true", help="write it over NOTEBOOK")
    parser.add_argument(
        "-p",
        "--parameter",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "VALUE"),
        help="set a variable after the cell tagged `parameters`, as papermill does; VALUE is a "
        "number, true, false, null, a JSON list or object, or else text",
    )
    parser.add_argument(
        "--timeout", type=kernel.positive_seconds, metavar="S", help="the most a cell may take"
    )
    parser.add_argument("--show", action="store_true", help="show the output of the cells as well")
    kernel.add_arguments(parser)
    parser.set_defaults(func=command)


async def command(
    args: argparse.Namespace,
    make: Callable[[argparse.Namespace], AsyncKernelManager] = kernel.manager,
) -> int:
    """`make` is replaced by tests."""
    if args.show and args.output == "-":
        raise BadRequest("--show and -o - both write to stdout", hint="leave one of them out")
    nb = _prepare(args)
    output = notebook.Output.of(args.output, args.notebook, inplace=args.inplace)
    progress = Progress(sum(map(runs, nb.cells)), spinner=not args.show)
    km = make(args)
    display = Display(sys.stdout, sys.stderr) if args.show else None
    run = Run(nb, km, args.timeout, progress, display)
    args.supervisor.farewell = "the notebook was ended, and its sandbox destroyed"
    progress.start()
    try:
        async with kernel.started(km) as kc:
            progress.ready()
            async with kernel.telling(km):
                failure = await run.cells(kc)
    finally:
        progress.close()
        if run.begun:
            output.write(nb)
    if failure is not None:
        raise failure
    return 0


def _prepare(args: argparse.Namespace) -> Any:
    nb = notebook.load(args.notebook)
    if not args.image:
        notebook.require_python(nb, args.notebook)
    parameters = notebook.parse_parameters(args.parameter)
    if parameters and not notebook.inject(nb, parameters):
        terminal.note("no cell is tagged `parameters`; they were put on top of the notebook")
    return nb


class _Client(NotebookClient):  # type: ignore[misc]
    """nbclient's, which also shows the outputs it collects."""

    display: Display | None = None
    lost: Exception | None = None
    """Why what was to be shown could not be: nbclient would look at it when the cell has ended."""

    def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
        try:
            if self.display is not None:
                self.display.message(msg)
        except (BrokenPipeError, OutputLost) as error:
            self.lost = error
            self.task_poll_for_reply.cancel()
            raise
        try:
            return super().process_message(msg, cell, cell_index)
        except (*MALFORMED, ValidationError) as error:
            raise malformed() from error


class Run:
    """The cells of one notebook, one after the other; what they put out goes into `nb`."""

    def __init__(
        self,
        nb: Any,
        km: AsyncKernelManager,
        timeout: float | None,
        progress: Progress,
        display: Display | None,
    ) -> None:
        self._nb, self._km, self._timeout, self._progress = nb, km, timeout, progress
        self._client = _Client(
            nb,
            km=km,
            timeout_func=lambda _cell: timeout,
            iopub_timeout=_OUTPUT_DEADLINE,
            raise_on_iopub_timeout=True,
        )
        self._client.display = display
        self.begun = False
        """Whether there is anything to save."""

    async def cells(self, kc: AsyncKernelClient) -> NotebookError | None:
        """Run them all; returns the failure of the cell that ended it, if one did.

        Raises the error of a kernel that died, or of a cell that took too long.
        """
        self.begun = True
        kc.allow_stdin = False
        client = self._client
        client.kc = kc
        client.reset_execution_trackers()
        for index, cell in enumerate(self._nb.cells):
            failure = await self._cell(cell, index)
            if failure is not None:
                return failure
        client.set_widgets_metadata()
        return None

    async def _cell(self, cell: Any, index: int) -> NotebookError | None:
        if not runs(cell):
            return None
        self._progress.begin(cell.source)
        count = self._progress.number
        try:
            await self._client.async_execute_cell(cell, index, execution_count=count)
        except CellExecutionError as error:
            self._progress.end(ok=False)
            return self._failed(cell, error)
        except (CellTimeoutError, DeadKernelError) as error:
            _raise_if_cancelled()
            if self._client.lost is not None:
                raise self._client.lost from None
            self._progress.end(ok=False)
            ended = await self._ended(error)
            cell.outputs.append(last_words(ended))
            raise ended from error
        self._progress.end()
        return None

    def _failed(self, cell: Any, error: CellExecutionError) -> NotebookError:
        if self._client.display is None:
            outputs = [output for output in cell.outputs if output.output_type == "error"]
            for output in outputs:
                terminal.traceback(output.traceback, sys.stderr)
        return NotebookError(
            f"{self._where()} failed: {error.ename}: {error.evalue}",
            hint="its traceback is above, and in the notebook that was written",
        )

    async def _ended(self, error: Exception) -> CantelopError:
        if isinstance(error, CellTimeoutError):
            return NotebookError(
                f"{self._where()} did not end within {self._timeout} s",
                hint="give the cells more time with --timeout S",
            )
        return await kernel.death(self._km, f"in {self._where()}")

    def _where(self) -> str:
        return f"cell {self._progress.number} of {self._progress.total}"


def last_words(error: CantelopError) -> Any:
    """What the notebook shows below the cell in which it ended: the kernel could say it no more."""
    return nbformat.v4.new_output(
        "error",
        ename=type(error).__name__,
        evalue=error.message,
        traceback=[f"{type(error).__name__}: {error.message}", error.hint],
    )


def _raise_if_cancelled() -> None:
    """nbclient takes a cancellation of this task for the death of its kernel."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
