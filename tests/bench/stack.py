"""Targets of a run in this repository: local, microVM, and the guest as a plain host process.

The fake VMM shows what emulation hides: what the host stack itself costs.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from cantelop_kernels import config
from cantelop_kernels.bench import service, targets
from tests.fakes import fake_vmm_daemon


@asynccontextmanager
async def local() -> AsyncIterator[targets.Target]:
    with tempfile.TemporaryDirectory(prefix="cantelop-bench-") as folder:
        yield targets.Local(Path(folder))


@asynccontextmanager
async def microvm(settings: config.Config, count: int) -> AsyncIterator[targets.Target]:
    async with service.serving(settings, config.state_path(), count) as daemon:
        yield targets.Sandboxed("microvm", "microVM", daemon)


@asynccontextmanager
async def fake_vmm(settings: config.Config, count: int) -> AsyncIterator[targets.Target]:
    with tempfile.TemporaryDirectory(prefix="cantelop-bench-") as name:
        state = Path(name)
        state.chmod(0o755)
        async with service.serving(
            settings, state, count, nth=2, program=fake_vmm_daemon.PROGRAM
        ) as daemon:
            yield targets.Sandboxed("fake", "fake VMM", daemon, real=False)
