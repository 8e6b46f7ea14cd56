"""`cantelop serve`: the daemon in the foreground."""

from __future__ import annotations

import argparse
import json
import logging
import os
from pathlib import Path
from typing import Any

from cantelop_kernels import config
from cantelop_kernels.daemon import Options, serve
from cantelop_kernels.errors import CantelopError


def add_parser(subparsers: Any) -> None:
    """Called by `__main__`."""
    parser = subparsers.add_parser("serve", help="run the daemon (as root)")
    parser.add_argument("--socket", type=Path, help="where it listens ($CANTELOP_SOCKET)")
    parser.add_argument("--config", type=Path, help="settings file ($CANTELOP_CONFIG)")
    parser.add_argument(
        "--allow-emulation",
        action="store_true",
        help="run without hardware virtualization; this is no security boundary",
    )
    parser.add_argument(
        "--exit-when-idle",
        type=float,
        metavar="SECONDS",
        help="end after so long without a session",
    )
    parser.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--verbose", "-v", action="store_true", help="log every request")
    parser.set_defaults(func=command)


async def command(args: argparse.Namespace) -> int:
    """Serve until told to stop. `--ready-fd` gets "ready", or the error as JSON, and is closed."""
    logging.basicConfig(
        level=logging.DEBUG if args.verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
    )
    overrides = {"allow_emulation": True} if args.allow_emulation else {}
    options = Options(
        socket=args.socket or config.socket_path(),
        state=config.state_path(),
        idle_seconds=args.exit_when_idle,
    )
    try:
        await serve(config.load(args.config, **overrides), options, lambda: _say(args, b"ready\n"))
    except CantelopError as error:
        _say(args, json.dumps(error.to_json()).encode())
        raise
    return 0


def _say(args: argparse.Namespace, what: bytes) -> None:
    if args.ready_fd is not None:
        os.write(args.ready_fd, what)
        os.close(args.ready_fd)
        args.ready_fd = None
