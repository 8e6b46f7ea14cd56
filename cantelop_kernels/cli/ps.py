"""`cantelop ps`: the sessions, as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import pwd
import time
from collections.abc import Sequence
from typing import Any

from cantelop_kernels.cli.terminal import age, table
from cantelop_kernels.client import ensure_daemon
from cantelop_kernels.schema import SessionView

HEADERS = ["ID", "APP", "USER", "IMAGE", "STATE", "STEP", "AGE", "MEMORY", "VCPUS", "EMULATED"]


def add_parser(commands: Any) -> None:
    """Called by `__main__`."""
    parser = commands.add_parser(
        "ps",
        help="list the sessions",
        description="List your sessions (root: everybody's), those that ended a while ago too.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(func=command)


async def command(args: argparse.Namespace) -> int:
    views = await (await ensure_daemon()).sessions()
    if args.json:
        print(json.dumps([view.to_json() for view in views], indent=2))
    else:
        print(render(views, time.time()))
    return 0


def render(views: Sequence[SessionView], now: float) -> str:
    """The table; `now` is seconds since the epoch, as `created` is."""
    return table(HEADERS, [_row(view, now) for view in views])


def _row(view: SessionView, now: float) -> list[str]:
    return [
        view.id,
        view.app,
        _user(view.user),
        view.image,
        _state(view),
        view.step if view.state == "starting" else "-",
        age(now - view.created),
        f"{view.memory_mib} MiB",
        str(view.vcpus),
        "yes" if view.emulated else "no",
    ]


def _state(view: SessionView) -> str:
    if view.exit is None:
        return view.state
    how = "out of memory" if view.exit.oom else str(view.exit.exit_code)
    if view.exit.signal and not view.exit.oom:
        how = f"signal {view.exit.signal}"
    return f"{view.state} ({how})" if how != "None" else view.state


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
