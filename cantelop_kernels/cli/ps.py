"""`cantelop ps`: the sessions, as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

from cantelop_kernels.cli.terminal import age, harmless, table
from cantelop_kernels.client import ensure_daemon
from cantelop_kernels.peers import user_name
from cantelop_kernels.schema import Info, SessionView

HEADERS = [
    "ID",
    "APP",
    "USER",
    "IMAGE",
    "STATE",
    "STEP",
    "AGE",
    "ENDED",
    "MEMORY",
    "VCPUS",
    "START",
    "EMULATED",
]

_REASON_WIDTH = 40


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
    client = await ensure_daemon()
    views = await client.sessions()
    if args.json:
        print(json.dumps([view.to_json() for view in views], indent=2))
        return 0
    print(render(views, time.time()))
    info = await client.info()
    for line in pool_lines(info):
        print(line)
    return 0


def pool_lines(info: Info) -> list[str]:
    """What is warm, and what keeps it from being so; nothing where no App wants any."""
    lines = []
    for one in info.pool:
        kind = f"{one.image}, {one.vcpus} vCPU, {one.memory_mib} MiB"
        text = f"warm: {one.ready} of {one.target} ({kind}; for {', '.join(one.apps)})"
        if one.failures:
            text += f": {one.failures} boots failed in a row, next try in {one.retry_seconds:.0f} s"
            text += f": {harmless(one.last_error, colours=False)}"
        lines.append(text)
    for app, why in info.unresolved.items():
        lines.append(f"warm: none for {app}: {harmless(why, colours=False)}")
    if info.waiting:
        lines.append(f"waiting for room on this host: {info.waiting}")
    return ["", *lines] if lines else []


def render(views: Sequence[SessionView], now: float) -> str:
    """The table; `now` is seconds since the epoch, as `created` is."""
    return table(HEADERS, [_row(view, now) for view in views])


def _row(view: SessionView, now: float) -> list[str]:
    return [
        view.id,
        view.app,
        user_name(view.user),
        view.image,
        _state(view),
        view.step if view.state == "starting" else "-",
        age(now - view.created),
        "-" if view.ended is None else f"{age(now - view.ended)} ago",
        f"{view.memory_mib} MiB",
        str(view.vcpus),
        "warm" if view.warm else "cold",
        "yes" if view.emulated else "no",
    ]


def _state(view: SessionView) -> str:
    """With how the kernel ended, or what ended it."""
    if view.exit is None:
        return view.state
    how = harmless(view.exit.reason, colours=False)
    if view.exit.oom:
        how = "out of memory"
    elif view.exit.signal:
        how = f"signal {view.exit.signal}"
    elif view.exit.exit_code is not None:
        how = str(view.exit.exit_code)
    return f"{view.state} ({shortened(how)})"


def shortened(text: str) -> str:
    """On one line, and short enough for a column."""
    line = " ".join(text.split())
    return line if len(line) <= _REASON_WIDTH else line[: _REASON_WIDTH - 1] + "…"
