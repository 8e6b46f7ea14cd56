"""A machine ends with the first of its processes, and says which one that was."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cantelop_kernels.process import Process
from cantelop_kernels.vmm import Machine


@asynccontextmanager
async def spawned(*argv: str) -> AsyncIterator[Process]:
    process = Process.spawn(argv, env={"PATH": "/usr/bin:/bin"})
    try:
        yield process
    finally:
        await process.stop(0.0)
        process.close()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("exit 0", "the virtual machine ended: the guest powered off, rebooted or panicked"),
        ("exit 3", "the virtual machine ended (status 3)"),
        ("kill -9 $$", "the virtual machine ended (signal 9)"),
    ],
)
async def test_the_machine_itself(code: str, words: str) -> None:
    async with spawned("sleep", "60") as helper, spawned("sh", "-c", code) as machine:
        assert await Machine(machine, {"the helper": helper}).ended() == words


async def test_a_helper() -> None:
    async with spawned("sh", "-c", "kill -9 $$") as helper, spawned("sleep", "60") as machine:
        assert (
            await Machine(machine, {"the helper": helper}).ended() == "the helper ended (signal 9)"
        )
