"""`cantelop doctor`: can this machine run sandboxes, and what would fix what it lacks?"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from cantelop_kernels import config, preflight
from cantelop_kernels.preflight import Check


def add_parser(commands: Any) -> None:
    """Called by `__main__`."""
    parser = commands.add_parser(
        "doctor",
        help="check whether this machine can run sandboxes, and say how to fix what it lacks",
        description="Check whether this machine can run sandboxes. Changes nothing. The exit code "
        "is 0 where no check failed.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument(
        "--allow-emulation",
        action="store_true",
        help="do not fail for want of hardware virtualization",
    )
    parser.set_defaults(func=command)


async def command(args: argparse.Namespace) -> int:
    found = await preflight.checks(
        config.state_path(), config.socket_path(), allow_emulation=args.allow_emulation
    )
    if args.json:
        print(json.dumps([asdict(check) for check in found], indent=2))
    else:
        print(render(found))
    return 1 if any(check.status == "fail" for check in found) else 0


def render(found: Sequence[Check]) -> str:
    """One line per check, the fix below it, and a summary."""
    width = max(len(check.name) for check in found)
    lines = []
    for check in found:
        lines.append(f"{check.status:<4}  {check.name:<{width}}  {check.found}")
        if check.fix and check.status != "ok":
            lines.append(f"{'':<{width + 8}}fix: {check.fix}")
    counts = {status: sum(c.status == status for c in found) for status in ("fail", "warn")}
    lines.append("")
    if counts["fail"]:
        lines.append(f"{counts['fail']} of {len(found)} checks failed: sandboxes cannot run here")
    else:
        lines.append(f"sandboxes can run here ({counts['warn']} warnings)")
    return "\n".join(lines)
