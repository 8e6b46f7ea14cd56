"""`python -m tests.lab`: the lab by hand.

image            build the lab's image, where need be (`make lab-image`)
run ARGUMENTS    pytest in the lab with these arguments, such as `tests/lab/inside -k boots`
shell            a shell in the lab, with the project and its tests in /lab/checkout
lock             renew the lab's pinned Python packages after a change of pyproject.toml
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from cantelop_kernels.cli.report import debug_wanted, exit_code
from cantelop_kernels.cli.steps import Steps
from tests.lab import image, lock, machine
from tests.lab.outside import OUT, pytest_script, state

SHELL = "exec bash -l\n"


class _Steps:
    """An image build's progress, by the lines of `Steps`."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def started(self, step: str) -> None:
        self._steps.begin(step)

    def finished(self, step: str, *, cached: bool) -> None: ...
    def line(self, text: str) -> None: ...


async def build() -> None:
    with Steps() as steps:
        await image.build(state(), _Steps(steps))


def attached(command: str) -> int:
    """Run a command in the lab on this terminal; its exit code. The console goes to a file."""
    with machine.prepared(state(), OUT, command, _waiting) as setup:
        on = machine.started(setup, terminal=machine.STDIO, reports=False, inherit=True)
        with on as process:
            process.wait()
    status = OUT / "status"
    if status.exists():
        return int(status.read_text())
    print(f"the lab ended early; its console: {OUT / 'console.log'}", file=sys.stderr)
    return 1


def _waiting() -> None:
    print("waiting for another run of the lab", file=sys.stderr)


def run(name: str, arguments: list[str]) -> int:
    match name:
        case "image":
            asyncio.run(build())
        case "lock":
            asyncio.run(lock.renew())
        case "run":
            return attached(pytest_script(*(arguments or ["tests/lab/inside"])))
        case "shell":
            return attached(SHELL)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=["image", "run", "shell", "lock"])
    args, rest = parser.parse_known_args()
    if rest and args.command != "run":
        parser.error(f"{args.command} takes no arguments")
    try:
        return run(args.command, rest)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the one error policy
        return exit_code(error, debug=debug_wanted())


if __name__ == "__main__":
    sys.exit(main())
