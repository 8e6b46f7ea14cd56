"""What became of a kernel that died, shown below the cell in which it did.

A kernel that was killed cannot say so, and clients show no more than that it is gone. So this
process, whose kernel it was, takes the place of its iopub for a moment: clients connect to it again
by themselves, and get one error message that belongs to the cell.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import zmq
from jupyter_client.session import Session

NAME = "KernelDied"
"""Of the error that is shown."""

_IOPUB = 2
_WAIT_MS = 1000
"""For the first client to be there again: ZMQ tries every 100 ms."""

_MORE_MS = 100
"""For others after it."""

_LINGER_MS = 500


@dataclass(frozen=True, slots=True)
class LastWords:
    """`ip` is the endpoints', without the number; `key` and `scheme` sign the messages."""

    ip: str
    key: bytes
    scheme: str

    async def say(self, cell: str, text: str) -> None:
        """To all clients that come within a second; nothing happens where the place is gone.

        Called once the session has ended, before its endpoints serve another one.
        """
        await asyncio.to_thread(self._say, cell, text)

    def _say(self, cell: str, text: str) -> None:
        with zmq.Context() as context, context.socket(zmq.XPUB) as iopub:
            iopub.linger = _LINGER_MS
            try:
                iopub.bind(f"ipc://{self.ip}-{_IOPUB}")
            except zmq.ZMQError:
                return
            if not iopub.poll(_WAIT_MS):
                return
            while iopub.poll(_MORE_MS):
                iopub.recv()
            session = Session(key=self.key, signature_scheme=self.scheme)
            content = {"ename": NAME, "evalue": text, "traceback": [f"{NAME}: {text}"]}
            parent: dict[str, Any] = {"msg_id": cell, "msg_type": "execute_request"}
            session.send(iopub, "error", content, parent=parent, ident=b"error")
