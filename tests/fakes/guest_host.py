"""The host's side of one guest, as small as it can be: for tests of the guest alone.

Synchronous. `GuestHost` takes the guest's control and log connections and relays Unix sockets
that a Jupyter client can use to the guest's channel ports, as the attendant does.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from jupyter_client.blocking.client import BlockingKernelClient

from cantelop_kernels import wire

if TYPE_CHECKING:
    from collections.abc import Mapping

CHUNK = 1 << 16


class GuestHost:
    """Bound before the guest starts; `close` ends every connection."""

    def __init__(self, folder: Path, *, slow: Mapping[str, float] | None = None) -> None:
        self.folder = folder
        self.uds = folder / "v.sock"
        self.key = os.urandom(16).hex()
        self.scheme = "hmac-sha256"
        self.log = bytearray()
        self.messages: deque[dict[str, Any]] = deque()
        self.pause = dict(slow or {})
        self._open: list[socket.socket] = []
        self._ids = 0
        self._control_listener = self._listen(f"{self.uds}_{wire.CONTROL_PORT}")
        self._log_listener = self._listen(f"{self.uds}_{wire.LOG_PORT}")
        self._decoder = wire.Decoder(wire.FROM_GUEST)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def accept(self, timeout: float = 60) -> dict[str, Any]:
        """Wait for the guest; its hello."""
        self._control_listener.settimeout(timeout)
        self.control, _ = self._control_listener.accept()
        self._open.append(self.control)
        self._log_listener.settimeout(timeout)
        log, _ = self._log_listener.accept()
        self._open.append(log)
        threading.Thread(target=self._read_log, args=(log,), daemon=True).start()
        return self.expect("hello", timeout)

    def expect(self, kind: str, timeout: float = 60) -> dict[str, Any]:
        """The next message of this type; others stay in `messages`. EOFError on a closed guest."""
        deadline = time.monotonic() + timeout
        while True:
            for message in self.messages:
                if message["type"] == kind:
                    self.messages.remove(message)
                    return message
            self.control.settimeout(max(0.01, deadline - time.monotonic()))
            data = self.control.recv(CHUNK)
            if not data:
                raise EOFError(f"the guest is gone; had {list(self.messages)}")
            self.messages.extend(self._decoder.feed(data))

    def request(self, kind: str, **fields: Any) -> int:
        """Send one request; its id."""
        self._ids += 1
        message = {"type": kind, "id": self._ids, **fields}
        self.control.sendall(wire.encode(wire.check(message, wire.TO_GUEST)))
        return self._ids

    def bind(self, **changed: Any) -> int:
        """Ask for the kernel; any field may be changed."""
        fields: dict[str, Any] = {
            "argv": None,
            "extra": [],
            "env": {},
            "cwd": None,
            "key": self.key,
            "signature_scheme": self.scheme,
            "kernel_name": "test",
            "hostname": "guest",
            "time_ns": time.time_ns(),
            "entropy": os.urandom(32).hex(),
        }
        return self.request("bind", **(fields | changed))

    def client(self) -> BlockingKernelClient:
        """A started client, through relays of our own. Not waited for."""
        info: dict[str, Any] = {
            "transport": "ipc",
            "ip": str(self.folder / "c"),
            "key": self.key,
            "signature_scheme": self.scheme,
        }
        for port, channel in enumerate(wire.CHANNELS, start=1):
            info[f"{channel}_port"] = port
            path = self.folder / f"c-{port}"
            if not path.exists():
                self._serve(channel, self._listen(str(path)))
        client = BlockingKernelClient()
        client.load_connection_info(info)  # type: ignore[arg-type]
        client.start_channels()
        return client

    def dial(self, port: int) -> socket.socket:
        """A connection to a guest's port; OSError where it is refused."""
        sock = socket.socket(socket.AF_UNIX)
        self._open.append(sock)
        sock.connect(str(self.uds))
        sock.sendall(b"CONNECT %d\n" % port)
        answer = bytearray()
        while not answer.endswith(b"\n"):
            byte = sock.recv(1)
            if not byte:
                raise ConnectionRefusedError(port)
            answer += byte
        return sock

    def _listen(self, path: str) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(path)
        sock.listen(64)
        self._open.append(sock)
        return sock

    def _read_log(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := sock.recv(CHUNK):
                self.log += data

    def _serve(self, channel: str, listener: socket.socket) -> None:
        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    near, _ = listener.accept()
                    self._open.append(near)
                    far = self.dial(wire.CHANNEL_PORTS[channel])
                    for pair in ((near, far, None), (far, near, channel)):
                        threading.Thread(target=self._pump, args=pair, daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, channel: str | None) -> None:
        """`channel` is named in the direction from the guest, which tests may slow down."""
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK):
                sink.sendall(data)
                if channel in self.pause:
                    time.sleep(self.pause[channel])
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
