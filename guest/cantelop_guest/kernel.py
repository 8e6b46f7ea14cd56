"""The kernel process, from before it is asked for until it has ended."""

from __future__ import annotations

import json
import os
import signal

from cantelop_kernels import wire

from . import spawn
from .watch import SocketWatch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .loop import Loop
    from .machine import MachineLike

CONNECTION_FILE = "/run/cantelop/kernel/connection.json"
"""What the host writes into an argv for the connection file."""

_AT_INTERPRETER_START = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "GLIBC_", "PYDEVD_", "DEBUGPY_")
"""Variables that a process which has loaded ipykernel cannot take on any more."""


class Kernel:
    """`on_ready` comes at most once, when all five sockets take connections."""

    def __init__(
        self,
        loop: Loop,
        machine: MachineLike,
        stdio: int,
        prestarted: spawn.Prestarted,
        on_ready: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._machine = machine
        self._stdio = stdio
        self._on_ready = on_ready
        self._instructions: int | None = prestarted.instructions
        self._watch: SocketWatch | None = None
        self.pid = prestarted.pid
        self.started = False
        self.status: int | None = None
        self.endpoints = {
            channel: f"{machine.kernel_dir}/k-{index}"
            for index, channel in enumerate(wire.CHANNELS, start=1)
        }

    @property
    def state(self) -> str:
        if self.status is not None:
            return "exited"
        return "running" if self.started else "waiting"

    def start(self, message: dict[str, Any]) -> None:
        """Give the process everything it was waiting for, or start the one that was asked for."""
        self.started = True
        self._write_connection_file(message)
        env = {**self._machine.kernel_env(), **{str(k): str(v) for k, v in message["env"].items()}}
        env.pop("JPY_PARENT_PID", None)  # our pid 1 as a "parent" would make ipykernel exit
        cwd = self._folder(message["cwd"])
        if message["argv"] is not None:
            self._start_custom([self._own_paths(str(arg)) for arg in message["argv"]], env, cwd)
            return
        if any(name.startswith(_AT_INTERPRETER_START) for name in message["env"]):
            self._replace_prestarted(env)
        self._instruct([*("-f", self._connection_file), *map(str, message["extra"])], env, cwd)

    def signal(self, signum: int) -> None:
        """To the whole process group. Raises OSError where there is none any more."""
        if self.status is not None:
            raise ProcessLookupError("the kernel has ended")
        if not self.started and signum == signal.SIGINT:
            return  # there is no cell to interrupt
        os.killpg(self.pid, signum)

    def reaped(self, status: int) -> None:
        """The agent has collected our process; called once."""
        self.status = status
        self._stop_waiting()

    @property
    def _connection_file(self) -> str:
        return f"{self._machine.kernel_dir}/connection.json"

    def _own_paths(self, argument: str) -> str:
        return argument.replace(CONNECTION_FILE, self._connection_file)

    def _folder(self, wanted: str | None) -> str:
        candidates = (wanted, "/workspace", self._machine.home, "/")
        return next(path for path in candidates if path and os.path.isdir(path))

    def _write_connection_file(self, message: dict[str, Any]) -> None:
        info: dict[str, Any] = {
            f"{name}_port": port for port, name in enumerate(wire.CHANNELS, start=1)
        }
        info |= {name: message[name] for name in ("key", "signature_scheme", "kernel_name")}
        info |= {"transport": "ipc", "ip": f"{self._machine.kernel_dir}/k"}
        descriptor = os.open(self._connection_file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
        os.write(descriptor, json.dumps(info).encode())
        os.close(descriptor)
        self._machine.give_to_kernel(self._connection_file)

    def _instruct(self, argv: list[str], env: dict[str, str], cwd: str) -> None:
        if self._instructions is None:  # it died before it was asked for; reaped() said so
            return
        line = json.dumps({"argv": argv, "env": env, "cwd": cwd}).encode() + b"\n"
        try:
            _write_all(self._instructions, line)
        except OSError:
            return  # likewise, only just now
        self._loop.add_reader(self._instructions, self._answered)

    def _answered(self) -> None:
        if self._instructions is None:
            return
        ready = os.read(self._instructions, 1) == b"R"
        self._stop_waiting()
        if ready:
            self._on_ready()

    def _start_custom(self, argv: list[str], env: dict[str, str], cwd: str) -> None:
        """Any program that speaks the protocol; its sockets are watched for from outside."""
        self._end_prestarted()
        self._watch = SocketWatch(self._loop, list(self.endpoints.values()), self._on_ready)
        self.pid = spawn.spawn(self._machine, self._stdio, lambda: spawn.execute(argv, env, cwd))

    def _replace_prestarted(self, env: dict[str, str]) -> None:
        """The same kernel in a new interpreter, which reads these variables when it starts."""
        self._end_prestarted()
        fresh = spawn.prestart(
            self._machine, self._stdio, lambda: self._machine.execute_launcher(env)
        )
        self.pid, self._instructions = fresh.pid, fresh.instructions

    def _end_prestarted(self) -> None:
        self._stop_waiting()
        self.status = None
        old, self.pid = self.pid, 0  # the agent reaps it as nobody's child
        try:
            os.kill(old, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def _stop_waiting(self) -> None:
        if self._instructions is not None:
            self._loop.remove_reader(self._instructions)
            os.close(self._instructions)
            self._instructions = None
        if self._watch is not None:
            self._watch.close()
            self._watch = None


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
