"""The agent: answers the host on the control channel, and looks after the kernel's process."""

from __future__ import annotations

import os
import signal
import time

from cantelop_kernels import wire

from .control import Control
from .kernel import Kernel
from .logs import LogStream
from .relays import RelayHub
from .transport import dial_patiently

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .loop import Loop
    from .machine import MachineLike
    from .spawn import Prestarted
    from .transport import Transport

LAST_BYTES = 1.0
"""Seconds that a relay may outlive the kernel, where a forked child still holds its socket."""

GOODBYE = 0.05
"""Seconds between the answer to `poweroff` and the power-off."""


class Agent:
    """Made when the kernel's process waits; `run` returns never but through the power-off.

    `log_pipe` is (read, write): the agent reads, every kernel process gets the other end.
    """

    def __init__(
        self,
        loop: Loop,
        machine: MachineLike,
        transport: Transport,
        prestarted: Prestarted,
        log_pipe: tuple[int, int],
    ) -> None:
        self._loop = loop
        self._machine = machine
        control = dial_patiently(transport, wire.CONTROL_PORT)
        self._control = Control(loop, control, self._on_message, machine.power_off)
        self._kernel = Kernel(
            loop, machine, log_pipe[1], prestarted, on_warm=self._on_warm, on_ready=self._on_ready
        )
        self._log = LogStream(loop, log_pipe[0], transport.dial_host(wire.LOG_PORT))
        self._relays = RelayHub(loop, transport, self._kernel.endpoints)
        self._exit_told = False
        self._requests: dict[str, Callable[[dict[str, Any]], None]] = {
            "warm_up": self._warm_up,
            "bind": self._bind,
            "signal": self._signal,
            "status_request": self._status,
            "poweroff": self._poweroff,
        }

    def run(self) -> None:
        _watch_children(self._loop, self._reap)
        self._control.send({"type": "hello", "version": wire.VERSION, **self._machine.identity()})
        self._reap()  # whoever ended before we watched
        self._loop.run()

    def _on_message(self, message: dict[str, Any]) -> None:
        try:
            self._requests[message["type"]](message)
        except (OSError, ValueError, OverflowError) as error:
            reason = f"{type(error).__name__}: {error}"[:500]
            self._control.send({"type": "failed", "id": message["id"], "reason": reason})

    def _warm_up(self, message: dict[str, Any]) -> None:
        self._kernel.warm_up()
        self._machine.personalise("localhost", time.time_ns(), b"")  # as a rehearsal
        self._control.send({"type": "done", "id": message["id"]})
        self._report_early_exit()

    def _on_warm(self) -> None:
        self._control.send({"type": "warm", "memory_used": self._machine.memory_used()})

    def _bind(self, message: dict[str, Any]) -> None:
        if self._exit_told:
            raise ValueError("the kernel has ended")
        if self._kernel.started:
            raise ValueError("a kernel was started here already")
        entropy = bytes.fromhex(message["entropy"])
        self._machine.personalise(message["hostname"], message["time_ns"], entropy)
        self._kernel.bind(message)
        self._control.send({"type": "done", "id": message["id"]})
        self._report_early_exit()

    def _report_early_exit(self) -> None:
        """Of a process that could not even wait for what it was to do."""
        if self._kernel.status is not None:
            self._report_exit(self._kernel.status)

    def _on_ready(self) -> None:
        self._relays.open()
        self._control.send({"type": "ready", "pid": self._kernel.pid})

    def _signal(self, message: dict[str, Any]) -> None:
        self._kernel.signal(message["signum"])
        self._control.send({"type": "done", "id": message["id"]})

    def _status(self, message: dict[str, Any]) -> None:
        self._control.send(
            {
                "type": "status",
                "id": message["id"],
                "state": self._kernel.state,
                "uptime": self._machine.uptime(),
                "memory_used": self._machine.memory_used(),
                "cpu_seconds": self._machine.cpu_seconds(),
                "busy": self._kernel.busy,
                "cell": self._kernel.cell,
                "idle_seconds": self._kernel.idle_seconds,
                **self._machine.memory(),
            }
        )

    def _poweroff(self, message: dict[str, Any]) -> None:
        self._control.send({"type": "done", "id": message["id"]})
        self._loop.call_later(GOODBYE, self._machine.power_off, "asked to")

    def _reap(self) -> None:
        """Collect every child that has ended: the kernel, and the orphans of all its offspring."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._kernel.pid:
                self._kernel.reaped(status)
                if self._kernel.started or self._kernel.warming:
                    self._report_exit(status)

    def _report_exit(self, status: int) -> None:
        """Last of all: the host closes the channels when it hears of this."""
        if self._exit_told:
            return
        self._exit_told = True
        self._log.drain()
        memory = self._machine.memory()
        by_signal = os.WIFSIGNALED(status)
        exited = {
            "type": "exited",
            "exit_code": None if by_signal else os.WEXITSTATUS(status),
            "signal": os.WTERMSIG(status) if by_signal else None,
            "oom": self._machine.oom_kills() > 0,
            "memory_limit": memory["memory_limit"],
            "memory_peak": memory["memory_peak"],
            "cell": self._kernel.cell,
        }
        self._relays.finish(LAST_BYTES, lambda: self._control.send(exited))


def _watch_children(loop: Loop, reap: Callable[[], None]) -> None:
    """Have the loop call `reap` after every SIGCHLD."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)

    def ended() -> None:
        os.read(read, 4096)
        reap()

    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, _noop)
    loop.add_reader(read, ended)


def _noop(*_: object) -> None:
    """A handler must exist, or the signal would be ignored and wake nobody."""
