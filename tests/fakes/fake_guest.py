"""The guest's agent as an ordinary host process, behind a real hybrid-vsock Unix socket.

The agent, its relays and the kernel are the product's own; only the machine (mounts, clock,
cgroup, power) and the transport are replaced, so the whole host stack can be tried at native
speed. Run it through `fake_vmm_process.py`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from cantelop_guest import spawn
from cantelop_guest.agent import Agent
from cantelop_guest.loop import Loop
from cantelop_guest.transport import SocketListener

if TYPE_CHECKING:
    from collections.abc import Callable

GUEST_PACKAGES = Path(spawn.__file__).parents[1]
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
MEMORY = 512 * 1024 * 1024


class FakeMachine:
    """A machine that is only a process. `uid` (root only) is whom the kernel runs as."""

    def __init__(self, folder: Path, uid: int | None = None) -> None:
        self.kernel_dir = str(folder / "kernel")
        self.home = str(folder / "home")
        self.temporary = str(folder / "tmp")
        self._uid = uid
        self._started = time.monotonic()
        for path in (self.kernel_dir, self.home, self.temporary):
            Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
            self.give_to_kernel(path)

    def enter_kernel_process(self) -> None:
        if self._uid is not None:
            os.setgroups([])
            os.setresgid(self._uid, self._uid, self._uid)
            os.setresuid(self._uid, self._uid, self._uid)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def execute_launcher(self, env: dict[str, str]) -> NoReturn:
        spawn.execute_launcher(sys.executable, str(GUEST_PACKAGES), env)

    def kernel_env(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
        own = {"HOME": self.home, "TMPDIR": self.temporary}
        return {"PATH": path, "USER": "sandbox", "LANG": "C.UTF-8", **own}

    def give_to_kernel(self, path: str) -> None:
        if self._uid is not None:
            os.chown(path, self._uid, self._uid)

    def identity(self) -> dict[str, Any]:
        boot_id = Path("/proc/sys/kernel/random/uuid").read_text().strip()  # a fresh one each time
        return {"boot_id": boot_id, "release": "fake", "memory": MEMORY, "vcpus": 1}

    def personalise(self, hostname: str, time_ns: int, entropy: bytes) -> None:
        pass

    def memory(self) -> dict[str, int]:
        return {"memory_limit": MEMORY, "memory_current": 1, "memory_peak": 1}

    def memory_used(self) -> int:
        return 2

    def cpu_seconds(self) -> float:
        return 0.5

    def oom_kills(self) -> int:
        return 0

    def uptime(self) -> float:
        return time.monotonic() - self._started

    def power_off(self, reason: str) -> NoReturn:
        print(f"cantelop: power off: {reason}", file=sys.stderr, flush=True)
        os._exit(0)  # the kernel's process dies with us


class HybridTransport:
    """The guest's side of hybrid vsock, as vhost-device-vsock and Firecracker speak it."""

    def __init__(self, loop: Loop, uds: Path) -> None:
        self._loop = loop
        self._uds = uds
        self._ports: dict[int, Callable[[socket.socket], None]] = {}
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(uds))
        SocketListener(loop, server, self._greet)

    def dial_host(self, port: int) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(f"{self._uds}_{port}")
        sock.setblocking(False)
        return sock

    def listen(self, port: int, accepted: Callable[[socket.socket], None]) -> _Port:
        self._ports[port] = accepted
        return _Port(self._ports, port)

    def _greet(self, sock: socket.socket) -> None:
        line = bytearray()
        self._loop.add_reader(sock.fileno(), self._read_request, sock, line)

    def _read_request(self, sock: socket.socket, line: bytearray) -> None:
        """One byte at a time: what follows the line is not ours to read."""
        data = sock.recv(1)
        line += data
        if data and data != b"\n":
            return
        self._loop.remove_reader(sock.fileno())
        words = line.split()
        port = int(words[1]) if len(words) == 2 and words[0] == b"CONNECT" else 0
        if port not in self._ports:
            sock.close()
            return
        sock.send(b"OK %d\n" % (1 << 30))
        self._ports[port](sock)


class _Port:
    def __init__(self, ports: dict[int, Callable[[socket.socket], None]], port: int) -> None:
        self._ports = ports
        self._port = port

    def close(self) -> None:
        self._ports.pop(self._port, None)


def run(uds: Path, folder: Path, uid: int | None = None) -> NoReturn:
    """Until the host closes the control channel or asks for the power-off."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans come to us, as to pid 1
    machine = FakeMachine(folder, uid)
    log_pipe = os.pipe()
    prestarted = spawn.prestart(
        machine, log_pipe[1], lambda: machine.execute_launcher(machine.kernel_env())
    )
    loop = Loop()
    Agent(loop, machine, HybridTransport(loop, uds), prestarted, log_pipe).run()
    raise AssertionError("the agent's loop ended")
