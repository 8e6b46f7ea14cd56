"""`cantelop stats`: what the running sessions use, once or again and again."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from cantelop_kernels.cli.kernel import positive_seconds
from cantelop_kernels.cli.terminal import age, table
from cantelop_kernels.client import Client, ensure_daemon
from cantelop_kernels.peers import user_name
from cantelop_kernels.schema import SessionView, Usage

HEADERS = [
    *("ID", "APP", "USER", "AGE", "KERNEL", "CPU", "CPU TIME", "THROTTLED", "MEMORY", "GUEST"),
    *("DISK", "OUT", "IN", "NETWORK"),
]


def add_parser(commands: Any) -> None:
    """Called by `__main__`."""
    parser = commands.add_parser(
        "stats",
        help="show what the running sessions use",
        description="Show what your running sessions use (root: everybody's): CPU of one core, "
        "how long the CPU quota held it back, memory on the host, memory used inside the guest, "
        "disk, bytes out to and in from the "
        "client, and the guest's network.",
    )
    parser.add_argument("ids", metavar="ID", nargs="*", help="only these")
    parser.add_argument("--watch", "-w", action="store_true", help="go on until Ctrl-C")
    parser.add_argument(
        "--interval", type=positive_seconds, default=2.0, metavar="S", help="default: %(default)s"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(func=command)


async def command(args: argparse.Namespace) -> int:
    """With --watch and --json: one JSON array a line."""
    client = await ensure_daemon()
    for session_id in args.ids:
        await client.usage(session_id)  # a wrong id is an error
    await _show(client, args)
    return 0


async def _show(client: Client, args: argparse.Namespace) -> None:
    if not args.watch or args.json or not sys.stdout.isatty():
        while True:
            views, usages = await _read(client, args.ids)
            text = render(views, usages)
            if args.json:
                text = json.dumps([one.to_json() for one in usages])
            print(text, flush=True)
            if not args.watch:
                return
            await asyncio.sleep(args.interval)
    with Live(console=Console(), screen=False, auto_refresh=False) as live:
        while True:
            live.update(Text(render(*await _read(client, args.ids))), refresh=True)
            await asyncio.sleep(args.interval)


async def _read(client: Client, ids: Sequence[str]) -> tuple[dict[str, SessionView], list[Usage]]:
    usages = [one for one in await client.stats() if not ids or one.id in ids]
    return {view.id: view for view in await client.sessions()}, usages


def render(views: dict[str, SessionView], usages: Sequence[Usage]) -> str:
    """The table; a session without a view has just ended."""
    now = time.time()
    rows = [_row(views[one.id], one, now) for one in usages if one.id in views]
    return table(HEADERS, rows)


def _row(view: SessionView, usage: Usage, now: float) -> list[str]:
    return [
        view.id,
        view.app,
        user_name(view.user),
        age(now - view.created),
        _activity(usage),
        f"{usage.cpu_percent:.0f}%",
        f"{usage.cpu_seconds:.1f}s",
        f"{usage.throttled_seconds:.1f}s",
        size(usage.memory),
        "-" if usage.guest_memory_used is None else size(usage.guest_memory_used),
        f"{size(usage.disk)}/{size(usage.disk_limit)}",
        size(usage.to_client),
        size(usage.to_kernel),
        f"{size(usage.network_in)}/{size(usage.network_out)}",
    ]


def _activity(usage: Usage) -> str:
    if usage.busy is None or usage.idle_seconds is None:
        return "-"
    return "busy" if usage.busy else f"idle {age(usage.idle_seconds)}"


def size(number: int) -> str:
    """Bytes for people: 0, 12K, 3.4M, 1.2G."""
    if number < 1024:
        return str(number)
    value = float(number)
    for unit in "KMGT":
        value /= 1024
        if value < 1024:
            return f"{value:.1f}{unit}" if value < 10 else f"{value:.0f}{unit}"
    return f"{value:.0f}P"
