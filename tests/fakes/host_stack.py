"""The whole host stack in the test's own process: real attendants, sockets, uids and API.

Fixtures over it lie in `host/conftest.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.asynchronous.client import AsyncKernelClient

from cantelop_kernels import client, schema
from cantelop_kernels.image import ImageStore
from cantelop_kernels.image_model import PARTS, SCHEMA, sha256
from cantelop_kernels.sessions import Sessions
from cantelop_kernels.slot import uid_range

UID_BASE = int(os.environ.get("CANTELOP_TEST_UID_BASE", "915000"))
"""Two runs of these tests at once need two of them."""
KEY = "0123456789abcdef"


@dataclass
class Stack:
    """A running daemon, and how to talk to it."""

    client: client.Client
    sessions: Sessions
    state: Path
    socket: Path
    vmm: Any

    async def create(self, **fields: Any) -> schema.SessionView:
        return await self.client.create(schema.SessionRequest(key=KEY, **fields))

    def folders(self) -> list[str]:
        """What of sandboxes and endpoints lies on the disk."""
        ipc = self.socket.with_suffix(".ipc")
        return [*os.listdir(self.state / "sandboxes"), *(os.listdir(ipc) if ipc.exists() else [])]


Running = Callable[..., AbstractAsyncContextManager["Stack"]]


def processes() -> list[psutil.Process]:
    """Every process that runs as a uid of these tests' sandboxes (a zombie does not)."""
    return [p for p in psutil.process_iter() if _uid(p) in uid_range(UID_BASE) and _runs(p)]


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def status_of(pid: int) -> dict[str, str]:
    """The fields of /proc/PID/status (proc(5))."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _uid(process: psutil.Process) -> int:
    try:
        return process.uids().real
    except psutil.Error:
        return -1


def publish_fake_image(state: Path, name: str = "python3") -> None:
    """An image with the right form and nothing in it; the fake VMM does not look."""
    parts = state / "parts"
    parts.mkdir()
    files = {}
    for part in PARTS:
        (parts / part).write_bytes(part.encode())
        files[part] = {"size": len(part), "sha256": sha256(parts / part)}
    store = ImageStore(state)
    store.prepare()
    store.publish(name, parts, {"schema": SCHEMA, "files": files})


@asynccontextmanager
async def connected(
    view: schema.SessionView, seconds: float = 30
) -> AsyncIterator[AsyncKernelClient]:
    """A real, unmodified Jupyter client on a session's endpoints, which has to answer in time."""
    kernel = AsyncKernelClient()
    info: Any = {f"{name}_port": number for number, name in enumerate(_PORTS, 1)}
    info |= {"transport": "ipc", "ip": view.endpoints.ip, "key": KEY.encode()}
    kernel.load_connection_info(info)
    kernel.start_channels()
    try:
        await kernel.wait_for_ready(timeout=seconds)
        yield kernel
    finally:
        kernel.stop_channels()


_PORTS = ("shell", "iopub", "stdin", "control", "hb")


async def output(kernel: AsyncKernelClient, code: str, seconds: float = 30) -> str:
    """What `code` prints."""
    said: list[str] = []

    def hook(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream":
            said.append(message["content"]["text"])

    reply = await kernel.execute_interactive(code, output_hook=hook, timeout=seconds)
    assert reply["content"]["status"] == "ok", json.dumps(reply["content"], default=str)
    return "".join(said)


async def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """For what has no event: the state of the machine outside this process."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)
