"""`cantelop image`: build, list and remove the images that sandboxes boot from.

Needs no daemon: the store is a folder, and who uses an image holds a lock on it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from cantelop_kernels.cli.terminal import harmless, table
from cantelop_kernels.config import state_path
from cantelop_kernels.errors import PermissionRefused
from cantelop_kernels.image import Image, ImageStore

HEADERS = ["NAME", "DIGEST", "SIZE", "KERNEL", "PYTHON", "IN USE"]


def add_parser(subparsers: Any) -> None:
    """Called by `__main__`."""
    parser = subparsers.add_parser("image", help="build, list and remove images")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="build|ls|rm")
    building = verbs.add_parser("build", help="build an image from its recipe, where need be")
    building.add_argument("name", nargs="?", default="python3", metavar="NAME")
    building.add_argument(
        "--refresh", action="store_true", help="fetch Debian's packages anew, even if all is built"
    )
    building.add_argument("--json", action="store_true", help="print the manifest as JSON")
    building.set_defaults(func=build)
    listing = verbs.add_parser("ls", help="list the images")
    listing.add_argument("--json", action="store_true", help="print JSON instead of a table")
    listing.set_defaults(func=ls)
    removal = verbs.add_parser("rm", help="remove images that no sandbox uses")
    removal.add_argument("names", nargs="+", metavar="NAME|DIGEST")
    removal.set_defaults(func=rm)


async def build(args: argparse.Namespace) -> int:
    """Build with a progress on stderr, and fetch the one tool that this host may not have."""
    from cantelop_kernels.image_build import build as build_image
    from cantelop_kernels.tools import ensure_vhost_device_vsock

    state = state_path()
    with Steps(Console(stderr=True)) as steps:
        image = await build_image(state, args.name, progress=steps, refresh=args.refresh)
        steps.started("vhost-device-vsock")
        await ensure_vhost_device_vsock(state, steps.line)
        steps.finished("vhost-device-vsock", cached=False)
    print(json.dumps(image.manifest, indent=2) if args.json else summary(image))
    return 0


async def ls(args: argparse.Namespace) -> int:
    store = ImageStore(state_path())
    images = store.ls()
    views = [view(image, store.in_use(image)) for image in images]
    if args.json:
        print(json.dumps(views, indent=2))
    else:
        print(table(HEADERS, rows(views)))
    return 0


async def rm(args: argparse.Namespace) -> int:
    """Each in turn; the first that cannot be removed ends it."""
    store = ImageStore(state_path())
    for name in args.names:
        try:
            await asyncio.to_thread(store.rm, name)
        except PermissionError as error:
            raise PermissionRefused(
                f"cannot remove image {name!r}: {error.strerror}", hint="images are root's"
            ) from error
    return 0


def summary(image: Image) -> str:
    """One line: what there is now."""
    return f"image {image.name} {image.digest[:12]} {image.size >> 20} MiB {image.path}"


def view(image: Image, in_use: bool) -> dict[str, Any]:
    """One image for programs; `rows` makes a table of several."""
    return {
        "name": image.name,
        "digest": image.digest,
        "size": image.size,
        "kernel": image.manifest["kernel"]["release"],
        "python": image.manifest["python"],
        "in_use": in_use,
        "path": str(image.path),
    }


def rows(views: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The table's lines; an image that lost its name to a newer one shows as `-`."""
    return [
        [
            view["name"] or "-",
            view["digest"][:12],
            f"{view['size'] >> 20} MiB",
            view["kernel"],
            view["python"],
            "yes" if view["in_use"] else "no",
        ]
        for view in views
    ]


class Steps:
    """A build's progress: a line per step that is done, and below it what happens just now.

    Away from a terminal only the finished steps are printed. A context manager: the line below is
    gone when it ends.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, transient=True, refresh_per_second=8)
        self._step, self._since = "", 0.0

    def __enter__(self) -> Steps:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def started(self, step: str) -> None:
        self._step, self._since = step, time.monotonic()
        self._show("")

    def finished(self, step: str, *, cached: bool) -> None:
        took = time.monotonic() - self._since
        how = "cached" if cached else f"{took:.1f} s"
        self._console.print(Text.assemble(("✓ ", "green"), step, (f"  {how}", "dim")))

    def line(self, text: str) -> None:
        """What a program that a step runs has to say: only the last of it is shown."""
        self._show(harmless(text, colours=False).strip())

    def _show(self, detail: str) -> None:
        text = Text.assemble(self._step, (f"  {detail}", "dim"), no_wrap=True, overflow="ellipsis")
        self._live.update(Spinner("dots", text))
