"""A VMM in the real one's shape whose "machine" is the guest agent as a plain host process.

Injected by tests through `daemon.serve(make_vmm=...)`; the product cannot select it. Everything
above `vmm/` is real: attendant, hybrid vsock, channels, sessions, API.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from cantelop_kernels import vsock
from cantelop_kernels.jail import RUN, Jail
from cantelop_kernels.process import Process
from cantelop_kernels.slot import Slot
from cantelop_kernels.vmm import Machine, VmSpec

ENTRY = Path(__file__).with_name("fake_vmm_process.py")


class FakeVmm:
    """`machines` are the processes that run now: tests kill them to play a dying VMM."""

    name = "fake"
    emulated = False

    def __init__(self) -> None:
        self.machines: list[Process] = []

    def run_at(self, slot: Slot) -> str:
        return RUN

    @asynccontextmanager
    async def run(
        self, spec: VmSpec, jail: Jail, *, console: int, log: int
    ) -> AsyncIterator[Machine]:
        folder = jail.run / "guest"
        folder.mkdir()
        argv = [sys.executable, str(ENTRY)]
        argv += ["--uds", str(jail.run / vsock.SOCKET), "--dir", str(folder)]
        machine = Process.spawn(
            argv,
            env={"PATH": "/usr/bin:/bin", "HOME": str(folder)},
            cwd=jail.run,
            stdout=console,
            stderr=log,
            umask=0,
        )
        self.machines.append(machine)
        try:
            yield Machine(machine)
        finally:
            self.machines.remove(machine)
            await machine.stop(0.0)
            machine.close()
