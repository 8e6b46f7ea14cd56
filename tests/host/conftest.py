"""Fixtures: a daemon with a fake VMM in this process, and the check that it leaves nothing."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cantelop_kernels import client, config, daemon
from cantelop_kernels.vmm import Vmm
from tests.fakes.fake_vmm import FakeVmm
from tests.fakes.host_stack import UID_BASE, Running, Stack, processes, publish_fake_image

QUICK = {"grace_seconds": 0.0, "drain_seconds": 0.0, "queue_seconds": 0.5}
"""Nobody is waited for, unless a test says so."""


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that other users may pass through, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp(prefix="cantelop-t-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def running(place: Path, monkeypatch: pytest.MonkeyPatch) -> Running:
    """`async with running(vmm, setting=value) as stack`; checks that nothing is left after it."""
    monkeypatch.setenv("CANTELOP_CONFIG", str(place / "none.toml"))

    @asynccontextmanager
    async def run(vmm: Vmm | None = None, **settings: Any) -> AsyncIterator[Stack]:
        state, socket = place / "state", place / "c.sock"
        if not (state / "images").exists():
            state.mkdir(exist_ok=True)
            publish_fake_image(state)
        chosen = vmm or FakeVmm()

        async def make(_: Path) -> Vmm:
            return chosen

        loaded = config.load(**(QUICK | {"uid_base": UID_BASE} | settings))
        async with daemon.running(loaded, daemon.Options(socket, state), make) as sessions:
            yield Stack(client.Client(socket), sessions, state, socket, chosen)
        assert os.listdir(state / "sandboxes") == []
        assert not socket.exists() and not socket.with_suffix(".ipc").exists()
        assert processes() == []

    return run


@pytest.fixture
async def stack(running: Running) -> AsyncIterator[Stack]:
    async with running() as made:
        yield made
