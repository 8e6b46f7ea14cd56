"""A Jupyter server that was killed comes back and takes its kernels over, by jupyter_client's own
means: what `get_provisioner_info` gave is loaded by `load_provisioner_info` in another process."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning.factory import KernelProvisionerFactory

from tests.fakes.host_stack import Running, eventually

SHARE = Path(__file__).parents[2] / "share" / "jupyter"

SERVER = """
import asyncio, json, sys
from jupyter_client.manager import AsyncKernelManager
async def main():
    km = AsyncKernelManager(kernel_name="cantelop-python3")
    await km.start_kernel()
    kc = km.client()
    kc.start_channels()
    await kc.wait_for_ready(timeout=60)
    await kc.execute_interactive("kept = 42", timeout=30)
    print(json.dumps(await km.provisioner.get_provisioner_info()), flush=True)
    await asyncio.to_thread(sys.stdin.read)
asyncio.run(main())
"""


async def killed_server(env: dict[str, str]) -> dict[str, Any]:
    """What a Jupyter server had persisted of its kernel before it was killed."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SERVER),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | env,
    )
    assert child.stdout is not None
    info: dict[str, Any] = json.loads(await child.stdout.readline())
    child.kill()
    await child.communicate()
    return info


async def loaded(info: dict[str, Any]) -> AsyncKernelManager:
    manager = AsyncKernelManager(kernel_name="cantelop-python3")
    assert manager.kernel_spec is not None
    provisioner = KernelProvisionerFactory.instance().create_provisioner_instance(
        str(uuid.uuid4()), manager.kernel_spec, parent=manager
    )
    await provisioner.load_provisioner_info(info)
    manager.provisioner = provisioner
    manager._launch_args, manager._attempted_start = {}, True  # another process has started it
    manager.load_connection_info(provisioner.connection_info)
    return manager


@pytest.fixture
def env(place: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    made = {
        "CANTELOP_SOCKET": str(place / "c.sock"),
        "JUPYTER_PATH": str(SHARE),
        "JUPYTER_RUNTIME_DIR": str(place / "runtime"),
    }
    for name, value in made.items():
        monkeypatch.setenv(name, value)
    return made


async def test_a_kernel_is_taken_over(running: Running, env: dict[str, str]) -> None:
    async with running(grace_seconds=3.0) as stack:
        manager = await loaded(await killed_server(env))
        await asyncio.sleep(4)
        assert await manager.is_alive()
        client = manager.client()
        client.start_channels()
        try:
            await client.wait_for_ready(timeout=30)
            reply = await client.execute_interactive("assert kept == 42", timeout=30)
            assert reply["content"]["status"] == "ok"
            await manager.restart_kernel(now=True)  # behind the same endpoints
            await client.wait_for_ready(timeout=30)
            reply = await client.execute_interactive("kept", timeout=30)
            assert reply["content"]["ename"] == "NameError"
        finally:
            client.stop_channels()
            await manager.shutdown_kernel(now=True)
        assert stack.folders() == []


async def test_a_kernel_that_nobody_came_for_is_found_dead(
    running: Running, env: dict[str, str]
) -> None:
    async with running(grace_seconds=0.2) as stack:
        info = await killed_server(env)
        await eventually(lambda: stack.folders() == [], 10)
        manager = await loaded(info)
        assert not await manager.is_alive()
        await manager.cleanup_resources()
