"""`cantelop logs`: what a session's guest and VMM said last."""

from __future__ import annotations

import argparse
from typing import Any

from cantelop_kernels.cli.terminal import harmless
from cantelop_kernels.client import ensure_daemon
from cantelop_kernels.schema import Logs

_PARTS = {
    "console": "the guest's console",
    "kernel": "the kernel's own stdout and stderr",
    "vmm": "the virtual machine monitor",
}


def add_parser(commands: Any) -> None:
    """Called by `__main__`."""
    parser = commands.add_parser(
        "logs",
        help="show the last lines of a session's console, kernel and VMM",
        description="Show the last lines of a session's logs; all of them unless one is named.",
    )
    parser.add_argument("id", metavar="ID", help="as `cantelop ps` shows it")
    for name, what in _PARTS.items():
        parser.add_argument(
            f"--{name}", dest="parts", action="append_const", const=name, help=f"only {what}"
        )
    parser.set_defaults(func=command)


async def command(args: argparse.Namespace) -> int:
    logs = await (await ensure_daemon()).logs(args.id)
    print(render(logs, args.parts or []))
    return 0


def render(logs: Logs, parts: list[str]) -> str:
    """One named part bare, several under headings; never an escape sequence."""
    texts = {name: harmless(getattr(logs, name), colours=False).strip("\n") for name in _PARTS}
    if len(parts) == 1:
        return texts[parts[0]]
    wanted = parts or list(_PARTS)
    return "\n".join(f"==> {name} ({_PARTS[name]})\n{texts[name]}" for name in wanted)
