"""Warm sandboxes as real microVMs: quick to be had, each its own, one as good as a cold one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cantelop_kernels import client, schema
from tests.fakes.host_stack import KEY, connected, output
from tests.vm.test_residue import environment, ours, serve, wait_for_none

pytestmark = pytest.mark.vm

IDENTITY = """
import json, os, random, socket, uuid, numpy, pathlib
read = lambda path: pathlib.Path(path).read_text().strip()
print(json.dumps({
    "urandom": os.urandom(8).hex(), "random": random.random(),
    "numpy": float(numpy.random.random()), "generator": float(numpy.random.default_rng().random()),
    "uuid4": str(uuid.uuid4()), "hash": hash("a"), "hostname": socket.gethostname(),
    "machine-id": read("/etc/machine-id"), "boot_id": read("/proc/sys/kernel/random/boot_id"),
    "session": get_ipython().kernel.session.session,
}))
"""
STATE_OF = """
import json
print(json.dumps([In[:-1], Out, sorted(k for k in globals()
    if not k.startswith("_")), get_ipython().history_manager.session_number]))
"""


@pytest.fixture
async def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[client.Client]:
    """One that keeps two sandboxes warm."""
    env = environment(tmp_path)
    config = Path(env["CANTELOP_CONFIG"])
    config.write_text(config.read_text() + "grace_seconds = 0.0\n[apps.default]\nwarm = 2\n")
    process = serve(env)
    try:
        yield client.Client(Path(env["CANTELOP_SOCKET"]))
    finally:
        process.terminate()
        assert await asyncio.to_thread(process.wait, 60) == 0
        wait_for_none()
        assert ours() == []


async def warm(daemon: client.Client, number: int) -> schema.PoolView:
    async with asyncio.timeout(120):
        while True:
            views = await daemon.pool()
            if views and views[0].ready == number:
                return views[0]
            await asyncio.sleep(0.2)


async def create(daemon: client.Client) -> schema.SessionView:
    return await daemon.create(schema.SessionRequest(key=KEY, allow_emulation=True))


async def test_two_warm_sandboxes_share_nothing(daemon: client.Client) -> None:
    """THREATS 32; and nothing of the exercise is to be seen in either."""
    view = await warm(daemon, 2)
    print(f"guest memory in use when warm: {[n >> 20 for n in view.memory_used]} MiB")
    found: list[dict[str, Any]] = []
    for session in (await create(daemon), await create(daemon)):
        assert session.warm
        async with connected(session) as kernel:
            before, out, names, number = json.loads(await output(kernel, STATE_OF))
            assert (before, out, number) == ([""], {}, 1)  # the first cell of all
            assert names == ["In", "Out", "exit", "get_ipython", "json", "open", "quit"]
            found.append(json.loads(await output(kernel, IDENTITY)))
            assert found[-1]["hostname"] == session.id
        await daemon.end(session.id)
    assert {name for name in found[0] if found[0][name] == found[1][name]} == set()


async def test_used_sandboxes_are_destroyed_and_the_pool_fills_again(daemon: client.Client) -> None:
    """THREATS 31. Within a second of the end nothing of it is left."""
    await warm(daemon, 2)
    session = await create(daemon)
    async with connected(session) as kernel:
        await output(kernel, "open('/tmp/mark', 'w').write('used')")
    (usage,) = await daemon.stats()
    assert usage.guest_memory_used is not None and usage.guest_memory_used < 512 << 20
    await daemon.end(session.id)
    for _ in range(2):
        session = await create(daemon)
        async with connected(session) as kernel:
            looks = "import os; print(os.path.exists('/tmp/mark'))"
            assert await output(kernel, looks) == "False\n"
        await daemon.end(session.id)
    await warm(daemon, 2)
