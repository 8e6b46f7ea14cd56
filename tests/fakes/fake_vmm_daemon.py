"""The product's daemon with the fake VMM, as a process of its own that can be killed.

`python -m tests.fakes.fake_vmm_daemon --socket S --config C --ready-fd N [--die-at WHERE]`, with
$CANTELOP_STATE. `--die-at` names a step of a launch, or one of `MOMENTS`: when it comes, the daemon
kills itself by SIGKILL.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cantelop_kernels import config, jail, record, sandbox, session
from cantelop_kernels.daemon import Options, serve
from cantelop_kernels.vmm import Vmm
from tests.fakes.fake_vmm import FakeVmm
from tests.fakes.host_stack import publish_fake_image

PROGRAM = (sys.executable, "-m", "tests.fakes.fake_vmm_daemon")
STEPS = ("slot", "image", "cgroup", "folder", "disk", "attendant", "virtual machine", "guest boot")
MOMENTS = {
    "before the record": (record, "save", True),
    "after the record": (record, "save", False),
    "before the bind": (session.Session, "_tell", True),
    "before the destruction": (record, "remove", True),
    "before the folder goes": (jail, "remove", True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--ready-fd", type=int, required=True)
    parser.add_argument("--die-at", choices=[*STEPS, *MOMENTS])
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    if args.die_at in STEPS:
        _die_at_step(args.die_at)
    elif args.die_at:
        owner, name, before = MOMENTS[args.die_at]
        setattr(owner, name, _dying(getattr(owner, name), before))
    asyncio.run(_serve(args))


async def _serve(args: argparse.Namespace) -> None:
    state = config.state_path()
    if not (state / "images").exists():
        state.mkdir(exist_ok=True)
        publish_fake_image(state)

    def ready() -> None:
        os.write(args.ready_fd, b"ready\n")
        os.close(args.ready_fd)

    await serve(config.load(args.config), Options(args.socket, state), ready, _make)


async def _make(_: Path) -> Vmm:
    return FakeVmm()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_at_step(wanted: str) -> None:
    enter = sandbox._Steps.__call__

    def entered(self: Any, name: str) -> Any:
        if name == wanted:
            _die()
        return enter(self, name)

    sandbox._Steps.__call__ = entered  # type: ignore[method-assign]


def _dying(function: Callable[..., Any], before: bool) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        if before:
            _die()
        result = function(*args)
        _die()
        return result

    return call


if __name__ == "__main__":
    main()
