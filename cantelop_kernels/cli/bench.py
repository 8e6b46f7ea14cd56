"""`cantelop bench`: what a kernel in a microVM costs here, next to a plain local one."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from cantelop_kernels import config, host
from cantelop_kernels.bench import machine, report, service, suite, targets
from cantelop_kernels.bench.figures import Results
from cantelop_kernels.cli import kernel, terminal
from cantelop_kernels.cli.steps import Steps
from cantelop_kernels.errors import ConfigError, EmulationRefused, PermissionRefused
from cantelop_kernels.image import ImageStore
from cantelop_kernels.session import EMULATED


def add_parser(commands: Any) -> None:
    """Called by `__main__`."""
    parser = commands.add_parser(
        "bench",
        help="measure kernels in microVMs next to a plain local one",
        description="Measure kernels in microVMs next to plain local ones, in one run, with a "
        "daemon of its own: starts, round trips, output, restarts, memory and CPU. Prints a table "
        "and writes bench.json and bench.svg. Takes some minutes; leave the machine alone "
        "meanwhile.",
    )
    add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the JSON instead of the table")
    parser.add_argument(
        "--allow-emulation",
        action="store_true",
        help="measure even without hardware virtualization (no security boundary)",
    )
    parser.set_defaults(func=command)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those that say how much is measured; `tests/bench` has them too."""
    parser.add_argument("--quick", action="store_true", help="small sizes: only to see it work")
    parser.add_argument(
        "--starts",
        type=kernel.count,
        metavar="N",
        help=f"starts of each kind (default: {suite.FULL.starts}, quick: {suite.QUICK.starts})",
    )
    parser.add_argument(
        "--sandboxes",
        type=kernel.count,
        metavar="N",
        help="how many are warm, idle, and started at once "
        f"(default: {suite.FULL.sandboxes}, quick: {suite.QUICK.sandboxes})",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        type=Path,
        default=Path("out"),
        help="folder for bench.json and bench.svg (default: %(default)s)",
    )


def sizes(args: argparse.Namespace) -> suite.Sizes:
    """What `add_arguments` has read."""
    chosen = suite.QUICK if args.quick else suite.FULL
    given = {name: getattr(args, name) for name in ("starts", "sandboxes")}
    return replace(chosen, **{name: value for name, value in given.items() if value is not None})


async def command(args: argparse.Namespace) -> int:
    settings = load(allow_emulation=args.allow_emulation)
    check(settings, config.state_path())
    report.prepare(args.output)
    if not host.hardware_kvm():
        terminal.note(EMULATED)
    with Steps() as steps:
        results = await _measure(settings, sizes(args), steps)
    show(results, args.output, as_json=args.json)
    return 0


def show(results: Results, folder: Path, *, as_json: bool) -> None:
    """Keep the results in `folder`, and print them."""
    report.write(results, folder)
    if as_json:
        sys.stdout.write(report.as_json(results))
    else:
        Console().print(report.table(results))
    terminal.note(f"wrote {' and '.join(map(str, report.files(folder)))}")


def load(*, allow_emulation: bool) -> config.Config:
    """The operator's settings, which may allow emulation themselves."""
    overrides: dict[str, Any] = {"allow_emulation": True} if allow_emulation else {}
    return config.load(**overrides)


def check(settings: config.Config, state: Path) -> None:
    """Whether it can run here at all: root, a way to run machines, an image, a local kernel."""
    if os.geteuid() != 0:
        raise PermissionRefused(
            "the bench must run as root: it starts a daemon of its own", hint="sudo cantelop bench"
        )
    if not (settings.allow_emulation or host.hardware_kvm()):
        raise EmulationRefused(
            "this machine has no hardware virtualization, and emulation is not allowed here",
            hint="measure on a host with KVM, or the emulation: cantelop bench --allow-emulation",
        )
    if importlib.util.find_spec("ipykernel") is None:
        raise ConfigError(
            "there is no local ipykernel to compare with", hint="pip install ipykernel"
        )
    ImageStore(state).resolve(settings.app(service.APP).image)


async def _measure(settings: config.Config, chosen: suite.Sizes, steps: Steps) -> Results:
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="cantelop-bench-"))
        steps.begin("a daemon of its own")
        daemon = await stack.enter_async_context(
            service.serving(settings, config.state_path(), chosen.sandboxes)
        )
        compared: list[targets.Target] = [
            targets.Local(Path(folder)),
            targets.Sandboxed("microvm", "microVM", daemon),
        ]
        return await suite.measure(compared, chosen, await machine.facts(), steps.begin)
