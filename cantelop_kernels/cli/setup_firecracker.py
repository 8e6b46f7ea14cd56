"""`cantelop setup-firecracker`: install the VMM for production from a release."""

from __future__ import annotations

import argparse
from typing import Any

from cantelop_kernels.cli.steps import Steps
from cantelop_kernels.config import state_path
from cantelop_kernels.vmm.firecracker_install import install
from cantelop_kernels.vmm.firecracker_release import RECOMMENDED, flaws, told


def add_parser(subparsers: Any) -> None:
    """Called by `__main__`."""
    parser = subparsers.add_parser(
        "setup-firecracker",
        help="install Firecracker and its jailer from a release",
        description="Install Firecracker and its jailer (as root) from a release: a .tgz as its "
        "project publishes it, a .zip or a wheel that has both programs. Nothing is unpacked "
        "before its SHA-256 was compared, and versions with known flaws are refused. "
        f"Recommended: {RECOMMENDED} or later. A daemon that runs has to be restarted.",
    )
    parser.add_argument("source", metavar="FILE|URL", help="the archive, or where to fetch it")
    parser.add_argument(
        "--sha256", required=True, metavar="HEX", help="of the archive, as its publisher names it"
    )
    parser.add_argument(
        "--allow-vulnerable",
        action="store_true",
        help="in spite of known flaws; the daemon needs allow_vulnerable_firecracker too",
    )
    parser.set_defaults(func=command)


async def command(args: argparse.Namespace) -> int:
    with Steps() as steps:
        release = await install(
            state_path(),
            args.source,
            args.sha256,
            allow_vulnerable=args.allow_vulnerable,
            begin=steps.begin,
        )
    print(f"Firecracker {release.version} {release.firecracker.parent}")
    if found := flaws(release.version):
        print(f"known flaws: {told(found)}")
    return 0
