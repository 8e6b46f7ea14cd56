"""Jupyter and the daemon for tests that are not asynchronous."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient

from cantelop_kernels.client import Client
from cantelop_kernels.schema import SessionView

Message = dict[str, Any]
PATIENCE = 30.0
"""Seconds until an answer is overdue: emulation, and a machine that does other things too."""


def sessions(socket: Path) -> list[SessionView]:
    return asyncio.run(Client(socket).sessions())


def run(client: BlockingKernelClient, code: str, **options: Any) -> str:
    """What the code printed, what it returned, and its error if it raised one."""
    return "".join(text_of(message) for message in messages(client, code, **options)).strip()


def messages(client: BlockingKernelClient, code: str, **options: Any) -> list[Message]:
    """Everything that iopub said about the code."""
    kept: list[Message] = []
    options.setdefault("timeout", PATIENCE)
    client.execute_interactive(code, output_hook=kept.append, **options)
    return kept


def text_of(message: Message) -> str:
    content = message["content"]
    kind = message["msg_type"]
    if kind == "stream":
        return str(content["text"])
    if kind == "error":
        return f"{content['ename']}: {content['evalue']}"
    if kind == "execute_result":
        return str(content["data"]["text/plain"])
    return ""


def wait_for(
    client: BlockingKernelClient, wanted: Callable[[Message], bool], seconds: float = PATIENCE
) -> Message:
    """The first message on iopub that is wanted; queue.Empty when none comes in time."""
    while True:
        message = client.get_iopub_msg(timeout=seconds)
        if wanted(message):
            return message


def on_control(client: BlockingKernelClient, kind: str, content: dict[str, Any]) -> Any:
    """Ask on the control channel, and return the content of the answer."""
    request = client.session.msg(kind, content)
    client.control_channel.send(request)
    while True:
        reply = client.get_control_msg(timeout=PATIENCE)
        if reply["parent_header"]["msg_id"] == request["header"]["msg_id"]:
            return reply["content"]
