"""`cantelop`: parses the command line, runs one sub-command, and turns its end into an exit code.

Layer 6. Only the module of the sub-command that was asked for is imported, so `--help` is quick.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import logging
import sys
from collections.abc import Sequence

from cantelop_kernels import __version__
from cantelop_kernels.cli import report, streams
from cantelop_kernels.cli.supervisor import Supervisor

COMMANDS = {
    "doctor": "check whether this machine can run sandboxes, and say how to fix what it lacks",
    "setup-firecracker": "install Firecracker and its jailer from a release",
    "image": "build, list and remove the images that sandboxes boot from",
    "kernelspec": "install, list and remove the Jupyter kernelspecs",
    "serve": "run the daemon",
    "run": "run a notebook in a fresh microVM",
    "exec": "run a piece of code in a fresh microVM",
    "ps": "list the sessions",
    "stats": "show what the running sessions use",
    "logs": "show the last lines of a session's console, kernel and VMM",
    "kill": "end sessions",
    "bench": "measure kernels in microVMs next to a plain local one",
}
"""Each is a module of `cantelop_kernels.cli`, with an underscore for a hyphen."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `cantelop` script. Never raises, except SystemExit for bad usage."""
    streams.prepare()
    args = list(sys.argv[1:] if argv is None else argv)
    debug = report.debug_wanted() or "--debug" in args
    try:
        code = asyncio.run(_run(_parsed(args)))
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt, asyncio.CancelledError) as error:  # noqa: BLE001 - the last resort, see report
        code = report.exit_code(error, debug=debug)
        if isinstance(error, BrokenPipeError | streams.OutputLost):
            streams.give_up_stdout()
    return code


def _parsed(args: Sequence[str]) -> argparse.Namespace:
    try:
        return build_parser(args).parse_args(args)
    except SystemExit:
        sys.stdout.flush()  # of help too, it matters whether it was told
        raise


def build_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """A parser that knows all sub-commands by name, and in full the one that `argv` names."""
    parser = argparse.ArgumentParser(
        prog="cantelop",
        description="Jupyter kernels that run as untrusted code, each in a microVM of its own.",
        epilog="$CANTELOP_SOCKET names the daemon's socket, $CANTELOP_STATE the state folder.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"cantelop {__version__}")
    debug_help = "show the traceback of an error (or set CANTELOP_DEBUG=1)"
    parser.add_argument("--debug", action="store_true", help=debug_help)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    wanted = next((arg for arg in argv if not arg.startswith("-")), None)
    for name, text in COMMANDS.items():
        if name == wanted:
            module = importlib.import_module(f"cantelop_kernels.cli.{name.replace('-', '_')}")
            module.add_parser(commands)
            hidden = argparse.SUPPRESS
            commands.choices[name].add_argument(
                "--debug", action="store_true", default=hidden, help=hidden
            )
        else:
            commands.add_parser(name, help=text)
    return parser


async def _run(args: argparse.Namespace) -> int:
    # tornado logs that a request failed after it was given up, which is what Ctrl-C does
    logging.getLogger("tornado").addHandler(logging.NullHandler())
    supervisor = args.supervisor = Supervisor()
    return await supervisor.run(args.func(args))


if __name__ == "__main__":
    sys.exit(main())
