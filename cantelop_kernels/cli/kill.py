"""`cantelop kill`: ends sessions."""

from __future__ import annotations

import argparse
from typing import Any

from cantelop_kernels.client import ensure_daemon
from cantelop_kernels.errors import NotFound


def add_parser(commands: Any) -> None:
    """Called by `__main__`."""
    parser = commands.add_parser(
        "kill",
        help="end sessions",
        description="End sessions: their kernels are killed and their sandboxes destroyed.",
    )
    parser.add_argument("ids", metavar="ID", nargs="+", help="as `cantelop ps` shows it")
    parser.set_defaults(func=command)


async def command(args: argparse.Namespace) -> int:
    """Ends all that live, and raises NotFound where some do not, or have never been."""
    client = await ensure_daemon()
    missed = []
    for session_id in args.ids:
        try:
            view = await client.get(session_id)
        except NotFound:
            missed.append(f"no session {session_id}")
            continue
        if view.state == "exited":
            how = f": {view.exit.reason}" if view.exit is not None else ""
            missed.append(f"session {session_id} has ended already{how}")
            continue
        await client.end(session_id)
        print(session_id)
    if missed:
        raise NotFound("; ".join(missed), hint="see which there are: cantelop ps")
    return 0
