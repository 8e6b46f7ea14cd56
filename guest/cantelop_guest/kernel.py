"""The kernel process, from before it is asked for until it has ended."""

from __future__ import annotations

import json
import os
import signal
import time

from cantelop_kernels import wire

from . import launcher, spawn
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

_AT_KERNEL_START = ("HOME", "IPYTHON", "JUPYTER", "XDG_", "VIRTUAL_ENV", "CONDA_")
"""Variables that a kernel reads when it starts: one that has been warmed up has done so."""

_OUR_OWN_CHOICE = ["--HistoryManager.hist_file=:memory:"]
"""Extra arguments that ask for what every kernel here does anyway; nbclient sends them."""


class Kernel:
    """`on_warm` and `on_ready` come at most once: it waits, exercised, to be bound; all five of its
    sockets take connections."""

    def __init__(
        self,
        loop: Loop,
        machine: MachineLike,
        stdio: int,
        prestarted: spawn.Prestarted,
        *,
        on_warm: Callable[[], None],
        on_ready: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._machine = machine
        self._stdio = stdio
        self._on_warm = on_warm
        self._on_ready = on_ready
        self._launcher: int | None = None
        self._watch: SocketWatch | None = None
        self._active_at = 0.0
        self._ready = False
        self.busy: bool | None = False
        """Whether a cell runs; None where nobody knows."""
        self.cell = ""
        """Message id of the cell that runs, or ran when the process ended; empty where none did."""
        self.started = False
        self.warming = False
        """From the request on: the process is no longer one that has only been loaded."""
        self.status: int | None = None
        self.endpoints = {
            channel: f"{machine.kernel_dir}/k-{index}"
            for index, channel in enumerate(wire.CHANNELS, start=1)
        }
        self._take(prestarted)

    @property
    def state(self) -> str:
        if self.status is not None:
            return "exited"
        return "running" if self.started else "waiting"

    @property
    def idle_seconds(self) -> float:
        """Since the last cell ended, or since `bind`; 0 before it, and while a cell runs."""
        return 0.0 if self.busy or not self.started else time.monotonic() - self._active_at

    def warm_up(self) -> None:
        """Have the process become a kernel and exercise it, ahead of `bind`; then `on_warm`."""
        if self.started or self.warming:
            raise ValueError("a kernel was started here already")
        self.warming = True
        key = os.urandom(32).hex()
        self._write_connection_file(key, "hmac-sha256", "")
        self._instruct(
            do="warm_up",
            connection_file=self._connection_file,
            scratch=f"{self._machine.kernel_dir}/exercise",
        )

    def bind(self, message: dict[str, Any]) -> None:
        """Give the process everything it was waiting for, or start the one that was asked for."""
        self.started = True
        self._active_at = time.monotonic()
        env = {**self._machine.kernel_env(), **{str(k): str(v) for k, v in message["env"].items()}}
        env.pop("JPY_PARENT_PID", None)  # our pid 1 as a "parent" would make ipykernel exit
        cwd = self._folder(message["cwd"])
        afresh = not self._serves(message)
        if afresh:
            self._end_prestarted()
        key, scheme = message["key"], message["signature_scheme"]
        self._write_connection_file(key, scheme, message["kernel_name"])
        if message["argv"] is not None:
            self._start_custom([self._own_paths(str(arg)) for arg in message["argv"]], env, cwd)
            return
        if afresh:
            self._start_afresh(env)
        argv = ["-f", self._connection_file, *map(str, message["extra"])]
        self._instruct(do="bind", argv=argv, env=env, cwd=cwd, key=key, signature_scheme=scheme)

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
        self.busy = None
        self._stop_listening()

    @property
    def _connection_file(self) -> str:
        return f"{self._machine.kernel_dir}/connection.json"

    def _own_paths(self, argument: str) -> str:
        return argument.replace(CONNECTION_FILE, self._connection_file)

    def _folder(self, wanted: str | None) -> str:
        candidates = (wanted, "/workspace", self._machine.home, "/")
        return next(path for path in candidates if path and os.path.isdir(path))

    def _serves(self, message: dict[str, Any]) -> bool:
        """Whether the process that waits can become the kernel that is asked for."""
        too_late = _AT_INTERPRETER_START + (_AT_KERNEL_START if self.warming else ())
        if message["argv"] is not None or any(name.startswith(too_late) for name in message["env"]):
            return False
        return not self.warming or message["extra"] in ([], _OUR_OWN_CHOICE)

    def _write_connection_file(self, key: str, scheme: str, kernel_name: str) -> None:
        info: dict[str, Any] = {
            f"{name}_port": port for port, name in enumerate(wire.CHANNELS, start=1)
        }
        info |= {"key": key, "signature_scheme": scheme, "kernel_name": kernel_name}
        info |= {"transport": "ipc", "ip": f"{self._machine.kernel_dir}/k"}
        descriptor = os.open(self._connection_file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
        os.write(descriptor, json.dumps(info).encode())
        os.close(descriptor)
        self._machine.give_to_kernel(self._connection_file)

    def _take(self, prestarted: spawn.Prestarted) -> None:
        self.pid = prestarted.pid
        self._launcher = prestarted.instructions
        self._loop.add_reader(self._launcher, self._told)

    def _instruct(self, **instruction: Any) -> None:
        """Nothing happens where it has died before it was asked for; reaped() says so."""
        if self._launcher is not None:
            try:
                os.write(self._launcher, json.dumps(instruction).encode())
            except OSError:
                pass  # likewise, only just now

    def _told(self) -> None:
        """What the launcher says, one byte at a time; a user's code can say the same, or close."""
        if self._launcher is None:
            return
        try:
            said = os.read(self._launcher, launcher.MAX_WORD)
        except OSError:
            said = b""
        word = said[:1]
        if word == launcher.WARM and self.warming and not self.started:
            self._on_warm()
        elif word == launcher.READY and self.started and not self._ready:
            self._ready = True
            self._on_ready()
        elif word in (launcher.BUSY, launcher.IDLE):
            self.busy = word == launcher.BUSY
            self.cell = said[1:].decode(errors="replace")
            self._active_at = time.monotonic()
        elif not word:
            self.busy = None
            self._stop_listening()

    def _start_custom(self, argv: list[str], env: dict[str, str], cwd: str) -> None:
        """Any program that speaks the protocol; its sockets are watched for from outside."""
        self.busy = None
        self._watch = SocketWatch(self._loop, list(self.endpoints.values()), self._on_ready)
        self.pid = spawn.spawn(self._machine, self._stdio, lambda: spawn.execute(argv, env, cwd))

    def _start_afresh(self, env: dict[str, str]) -> None:
        """The same kernel in a new interpreter, which reads these variables when it starts."""
        self._take(
            spawn.prestart(self._machine, self._stdio, lambda: self._machine.execute_launcher(env))
        )

    def _end_prestarted(self) -> None:
        """With all it has started itself, and without a trace of it."""
        self._stop_listening()
        old, self.pid = self.pid, 0
        if self.status is None:
            spawn.end(old)
        self.status = None
        spawn.empty(self._machine.kernel_dir)

    def _stop_listening(self) -> None:
        if self._launcher is not None:
            self._loop.remove_reader(self._launcher)
            os.close(self._launcher)
            self._launcher = None
        if self._watch is not None:
            self._watch.close()
            self._watch = None
