"""What tests of Jupyter clients share: the shapes of the fixtures, and running a piece of code."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager

WriteSpec = Callable[..., str]
Start = Callable[..., Awaitable[tuple[AsyncKernelManager, AsyncKernelClient]]]


async def run(client: AsyncKernelClient, code: str, timeout: float = 20) -> str:
    """What the code printed, and its error if it raised one."""
    said: list[str] = []

    def keep(message: dict[str, Any]) -> None:
        content = message["content"]
        if message["msg_type"] == "stream":
            said.append(content["text"])
        elif message["msg_type"] == "error":
            said.append(f"{content['ename']}: {content['evalue']}")

    await client.execute_interactive(code, output_hook=keep, timeout=timeout)
    return "".join(said).strip()
