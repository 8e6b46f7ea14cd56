"""`cantelop exec`: one piece of code in a fresh microVM, its output as it comes."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager

from cantelop_kernels.cli import kernel, terminal
from cantelop_kernels.cli.ask import ask
from cantelop_kernels.cli.display import Display
from cantelop_kernels.errors import BadRequest, DeadlineExceeded

_AFTER_INTERRUPT = 5.0
"""Seconds for code that ran out of time to say, by its traceback, where it was."""

INTERRUPTED = 130


def add_parser(commands: Any) -> None:
    """Called by `__main__`."""
    parser = commands.add_parser(
        "exec",
        help="run a piece of code in a fresh microVM",
        description="Run a piece of code in a fresh microVM and show its output as it comes. "
        "Ctrl-C interrupts the code, a second Ctrl-C ends it. The exit code is 1 where the code "
        "raised an exception. input() is answered from the terminal.",
    )
    parser.add_argument("code", metavar="CODE|-", help="Python code; - reads it from stdin")
    parser.add_argument(
        "--timeout", type=kernel.positive_seconds, metavar="S", help="end the code after S seconds"
    )
    parser.add_argument("--save", type=Path, metavar="DIR", help="write images to this folder")
    kernel.add_arguments(parser)
    parser.set_defaults(func=command)


async def command(
    args: argparse.Namespace,
    make: Callable[[argparse.Namespace], AsyncKernelManager] = kernel.manager,
) -> int:
    """`make` is replaced by tests."""
    code = _code(args.code)
    display = Display(sys.stdout, sys.stderr, args.save)
    interactive = args.code != "-" and sys.stdin is not None and sys.stdin.isatty()
    km = make(args)
    args.supervisor.farewell = "the code was ended, and its sandbox destroyed"
    async with kernel.started(km) as kc:
        cell = Cell(km, kc, display, stdin=sys.stdin.fileno() if interactive else None)
        async with kernel.telling(km):
            args.supervisor.next_interrupt(cell.on_ctrl_c)
            ok = await cell.run(code, args.timeout)
    if ok:
        return 0
    return INTERRUPTED if cell.interrupted else 1


def _code(text: str) -> str:
    if text != "-":
        return text
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise BadRequest("the code on stdin is not UTF-8 text", hint="save it as UTF-8") from error


class Cell:
    """One execution: its output, its questions, its interrupt and the death of its kernel."""

    def __init__(
        self,
        km: AsyncKernelManager,
        kc: AsyncKernelClient,
        display: Display,
        *,
        stdin: int | None,
    ) -> None:
        self._km, self._kc, self._display, self._stdin = km, kc, display, stdin
        self._interrupting: asyncio.Task[None] | None = None

    @property
    def interrupted(self) -> bool:
        return self._interrupting is not None

    def on_ctrl_c(self) -> None:
        terminal.note("interrupting the code; Ctrl-C again ends it")
        self.interrupt()

    def interrupt(self) -> None:
        """Have the kernel interrupt the code; safe to call from a signal handler of the loop."""
        self._interrupting = asyncio.ensure_future(self._km.interrupt_kernel())

    async def run(self, code: str, timeout: float | None) -> bool:
        """Whether the code ended well. Raises DeadlineExceeded and the errors of a death."""
        allow = self._stdin is not None
        msg_id = self._kc.execute(code, store_history=False, allow_stdin=allow)
        ending = asyncio.ensure_future(self._until_end(msg_id))
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.shield(ending)
        except TimeoutError:
            self.interrupt()
            await asyncio.wait([ending], timeout=_AFTER_INTERRUPT)
            raise DeadlineExceeded(
                f"the code did not end within {timeout:g} s", hint="give it more with --timeout S"
            ) from None
        finally:
            ending.cancel()
            await asyncio.wait([ending])

    async def _until_end(self, msg_id: str) -> bool:
        ended = asyncio.ensure_future(self._ended(msg_id))
        dead = asyncio.ensure_future(kernel.until_dead(self._km))
        asking = asyncio.ensure_future(self._answer_questions())
        tasks: list[asyncio.Future[Any]] = [ended, dead, asking]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return ended.result() == "ok"
            if asking.done():
                asking.result()
            raise await kernel.death(self._km, "while it ran the code")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _ended(self, msg_id: str) -> str:
        """The reply may overtake output, so the output is read to its end first."""
        await self._output(msg_id)
        return await self._reply(msg_id)

    async def _reply(self, msg_id: str) -> str:
        while True:
            message = await self._kc.get_shell_msg()
            if message["parent_header"].get("msg_id") == msg_id:
                return str(message["content"]["status"])

    async def _output(self, msg_id: str) -> None:
        while True:
            message = await self._kc.get_iopub_msg()
            if message["parent_header"].get("msg_id") != msg_id:
                continue
            if message["content"].get("execution_state") == "idle":
                return
            self._display.message(message)

    async def _answer_questions(self) -> None:
        """input() and getpass(); ends only by being cancelled, or where the terminal fails."""
        if self._stdin is None:
            await asyncio.get_running_loop().create_future()
            return
        while True:
            content = (await self._kc.get_stdin_msg())["content"]
            prompt, secret = str(content["prompt"]), bool(content["password"])
            self._kc.input(await ask(self._stdin, sys.stdout, prompt, secret=secret))
