"""`cantelop bench` with a third target: kernels behind the fake VMM, at native speed.

Run as `python -m tests.bench` on an otherwise idle machine. Nothing here asserts: figures of a busy
machine are no failure of the code.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import AsyncExitStack

from cantelop_kernels import config
from cantelop_kernels.bench import machine, report, suite
from cantelop_kernels.bench.figures import Results
from cantelop_kernels.cli import bench
from cantelop_kernels.cli.report import debug_wanted, exit_code
from cantelop_kernels.cli.steps import Steps
from cantelop_kernels.cli.supervisor import Supervisor
from tests.bench import stack


async def command(args: argparse.Namespace) -> int:
    settings = bench.load(allow_emulation=True)
    bench.check(settings, config.state_path())
    report.prepare(args.output)
    with Steps() as steps:
        results = await _measure(settings, bench.sizes(args), steps, native=args.native)
    bench.show(results, args.output, as_json=False)
    return 0


async def _measure(
    settings: config.Config, sizes: suite.Sizes, steps: Steps, *, native: bool
) -> Results:
    async with AsyncExitStack() as held:
        steps.begin("a daemon of its own for each kind")
        targets = [await held.enter_async_context(stack.local())]
        if not native:
            made = stack.microvm(settings, sizes.sandboxes)
            targets.append(await held.enter_async_context(made))
        fake = stack.fake_vmm(settings, sizes.sandboxes)
        targets.append(await held.enter_async_context(fake))
        return await suite.measure(targets, sizes, await machine.facts(), steps.begin)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    bench.add_arguments(parser)
    parser.add_argument(
        "--native", action="store_true", help="no microVM: the host stack alone, in minutes"
    )
    args = parser.parse_args()
    try:
        return asyncio.run(Supervisor().run(command(args)))
    except (Exception, KeyboardInterrupt, asyncio.CancelledError) as error:  # noqa: BLE001
        return exit_code(error, debug=debug_wanted())


if __name__ == "__main__":
    sys.exit(main())
