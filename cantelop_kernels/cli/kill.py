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
    """Ends all that exist, and raises NotFound where some do not."""
    client = await ensure_daemon()
    unknown = []
    for session_id in args.ids:
        try:
            await client.get(session_id)
        except NotFound:
            unknown.append(session_id)
            continue
        await client.end(session_id)
        print(session_id)
    if unknown:
        raise NotFound(f"no session {', '.join(unknown)}", hint="see which there are: cantelop ps")
    return 0
