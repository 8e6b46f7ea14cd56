"""A guest as a plain process with a host in front of it: for tests of the guest alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.fakes.guest_host import GuestHost

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jupyter_client.blocking.client import BlockingKernelClient

FAKE = Path(__file__).with_name("fake_vmm_process.py")


class Guest:
    """A fake VMM process and the host's side of it."""

    def __init__(self, folder: Path) -> None:
        self.host = GuestHost(folder)
        self.folder = folder
        command = [sys.executable, str(FAKE), "--uds", str(self.host.uds), "--dir", f"{folder}/g"]
        self.process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE)
        self.hello = self.host.accept()
        self._clients: list[BlockingKernelClient] = []

    def warm_up(self) -> None:
        """Have a kernel started and exercised; returns when it waits to be bound."""
        self.host.request("warm_up")
        self.host.expect("done")
        self.host.expect("warm")

    def start(self, **fields: Any) -> BlockingKernelClient:
        """Bind the kernel; a client that is ready to use."""
        self.host.bind(**fields)
        self.host.expect("done")
        self.host.expect("ready")
        client = self.client()
        client.wait_for_ready(timeout=30)
        return client

    def client(self) -> BlockingKernelClient:
        client = self.host.client()
        self._clients.append(client)
        return client

    def close(self) -> None:
        for client in self._clients:
            client.stop_channels()
        self.host.close()
        self.process.kill()
        self.process.communicate()


@contextmanager
def in_guest() -> Iterator[Guest]:
    """Everything is gone when the context is left."""
    folder = Path(tempfile.mkdtemp(prefix="ct-"))  # short: Unix paths end at 107 bytes
    guest = Guest(folder)
    try:
        yield guest
    finally:
        guest.close()
        _remove(folder)


def _remove(folder: Path) -> None:
    """What the guest has started ends with it, but a moment later, and may write until then."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return shutil.rmtree(folder)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def run(client: BlockingKernelClient, code: str, timeout: float = 30) -> tuple[str, dict[str, Any]]:
    """What the cell printed, and the reply's content."""
    printed: list[str] = []

    def output(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream":
            printed.append(message["content"]["text"])

    reply = client.execute_interactive(code, timeout=timeout, output_hook=output)
    return "".join(printed), reply["content"]
