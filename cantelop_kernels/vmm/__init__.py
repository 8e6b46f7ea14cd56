"""What a sandbox asks of a virtual machine monitor, whichever it is.

Layer 3. Above this package nobody knows which VMM runs: the drives, the hybrid vsock and the
console look the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from cantelop_kernels.jail import Jail
from cantelop_kernels.process import UNKNOWN, Process
from cantelop_kernels.slot import Slot


@dataclass(frozen=True, slots=True)
class Drive:
    """A raw disk image. In the guest: /dev/vda, /dev/vdb, … in the order given."""

    path: Path
    read_only: bool


@dataclass(frozen=True, slots=True)
class VmSpec:
    """One virtual machine, complete."""

    vcpus: int
    memory_mib: int
    kernel: Path
    """Uncompressed ELF kernel."""
    initramfs: Path
    drives: tuple[Drive, ...]


@dataclass(frozen=True, slots=True)
class Machine:
    """A virtual machine that runs, and what it cannot run without."""

    process: Process
    helpers: Mapping[str, Process] = field(default_factory=dict)
    """By the name that people are told, such as "the vsock helper"."""
    statuses: Mapping[int, str] = field(default_factory=dict)
    """What the machine's exit statuses mean, where its VMM has some of its own."""

    async def ended(self) -> str:
        """Return when the machine or a helper has ended, and say so in words."""
        tasks = {
            asyncio.ensure_future(one.wait()): name
            for name, one in {"the virtual machine": self.process, **self.helpers}.items()
        }
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            task, name = next((task, name) for task, name in tasks.items() if task.done())
            of_its_own = self.statuses if task is next(iter(tasks)) else {}
            return _how(name, task.result(), of_its_own)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


def _how(name: str, returncode: int, statuses: Mapping[int, str]) -> str:
    if returncode == 0:  # a reset ends a machine as a power-off does
        return f"{name} ended: the guest powered off, rebooted or panicked"
    if returncode == UNKNOWN:
        return f"{name} ended"
    how = f"signal {-returncode}" if returncode < 0 else f"status {returncode}"
    how += f": {statuses[returncode]}" if returncode in statuses else ""
    return f"{name} ended ({how})"


class Vmm(Protocol):
    """A way to run a `VmSpec`. Tests put a fake of this shape in its place."""

    @property
    def name(self) -> str: ...

    @property
    def emulated(self) -> bool:
        """Runs without hardware virtualization, and so is no security boundary."""
        ...

    def run_at(self, slot: Slot) -> str:
        """Where in the jail's folder `Jail.run` has to lie, so that the VMM reaches it."""
        ...

    def run(
        self, spec: VmSpec, jail: Jail, *, console: int, log: int
    ) -> AbstractAsyncContextManager[Machine]:
        """Start it; leaving the context kills it and its helpers and waits until they are gone.

        The guest's serial console is written to the descriptor `console`, what VMM and helpers say
        themselves to `log`; the caller keeps both. The guest's vsock is `jail.run / vsock.SOCKET`.
        """
        ...
