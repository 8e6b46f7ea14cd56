"""What a sandbox asks of a virtual machine monitor, whichever it is.

Layer 3. Above this package nobody knows which VMM runs: the drives, the hybrid vsock and the
console look the same.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cantelop_kernels.jail import Jail
from cantelop_kernels.process import Process


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


class Vmm(Protocol):
    """A way to run a `VmSpec`. Tests put a fake of this shape in its place."""

    @property
    def name(self) -> str: ...

    @property
    def emulated(self) -> bool:
        """Runs without hardware virtualization, and so is no security boundary."""
        ...

    def run(
        self, spec: VmSpec, jail: Jail, *, console: int, log: int
    ) -> AbstractAsyncContextManager[Process]:
        """Start it; leaving the context kills it and its helpers and waits until they are gone.

        The guest's serial console is written to the descriptor `console`, what VMM and helpers say
        themselves to `log`; the caller keeps both. The guest's vsock is `jail.run / vsock.SOCKET`.
        Yields the process whose end is the machine's end.
        """
        ...
