"""The product's daemon with the fake VMM: guests are plain host processes, at native speed.

`python -m tests.bench.fake_daemon --socket S --config C --ready-fd N`, with $CANTELOP_STATE: a
process of its own, so that daemon and client do not share a loop. Everything above the VMM is real.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

from cantelop_kernels import config
from cantelop_kernels.daemon import Options, serve
from cantelop_kernels.vmm import Vmm
from tests.fakes.fake_vmm import FakeVmm
from tests.fakes.host_stack import publish_fake_image

PROGRAM = (sys.executable, "-m", "tests.bench.fake_daemon")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--ready-fd", type=int, required=True)
    args = parser.parse_args()
    loaded, state = config.load(args.config), config.state_path()
    if not (state / "images").exists():
        publish_fake_image(state)

    def ready() -> None:
        os.write(args.ready_fd, b"ready\n")
        os.close(args.ready_fd)

    await serve(loaded, Options(args.socket, state), ready, _make)


async def _make(_: Path) -> Vmm:
    return FakeVmm()


if __name__ == "__main__":
    asyncio.run(main())
