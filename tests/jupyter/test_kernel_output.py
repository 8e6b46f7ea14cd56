"""Much output: nothing is lost, and nothing is out of order.

A kernel of its own, since ipykernel needs some 200 MB for one message of 50 MB.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient

from tests.fakes.blocking import PATIENCE, run, wait_for

pytestmark = pytest.mark.vm


@pytest.mark.parametrize(
    "code", ["print('x' * 50_000_000)", "for _ in range(50): print('x' * 1_000_000)"]
)
def test_50_megabytes_in_one_cell(client: BlockingKernelClient, code: str) -> None:
    assert run(client, code).count("x") == 50_000_000


def test_10000_flushed_prints_arrive_in_order(client: BlockingKernelClient) -> None:
    """Although the client reads nothing for so long that every buffer on the way fills up."""
    request = client.execute("for n in range(10_000): print(n, flush=True)")
    threading.Event().wait(20)
    lines: list[str] = []

    def take(message: dict[str, Any]) -> bool:
        if message["parent_header"].get("msg_id") != request:
            return False
        # while it waits for us, ipykernel says on stderr that its flush() takes long
        if message["msg_type"] == "stream" and message["content"]["name"] == "stdout":
            lines.extend(message["content"]["text"].split())
        return bool(message["content"].get("execution_state") == "idle")

    wait_for(client, take)
    client.get_shell_msg(timeout=PATIENCE)
    assert lines == [str(n) for n in range(10_000)]
