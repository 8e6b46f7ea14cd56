"""PID 1 of the guest: puts the pieces together, the kernel's process first.

Started by `init.sh` as `python3 -c "...; main()"` once the root is mounted. The kernel's process
is forked from this one rather than executed: the interpreter and the modules that both need are
then loaded once, which saves a third of a second under emulation.
"""

from __future__ import annotations

import os
import sys

from . import launcher, spawn
from .agent import Agent
from .loop import Loop
from .machine import AGENT_PATH, Machine, power_off
from .transport import VsockTransport


def main() -> None:
    """Never returns; whatever goes wrong is said on the console and ends the machine at once."""
    try:
        run(Machine())
    except BaseException as error:  # noqa: BLE001 - nobody above PID 1 could handle it
        import traceback

        traceback.print_exc()
        os.write(2, f"cantelop: FATAL: agent: {type(error).__name__}: {error}\n".encode())
    power_off("the agent failed")


def run(machine: Machine) -> None:
    machine.prepare()
    log_pipe = os.pipe()
    prestarted = spawn.prestart(machine, log_pipe[1], lambda: _become_launcher(machine))
    machine.network()
    loop = Loop()
    Agent(loop, machine, VsockTransport(loop), prestarted, log_pipe).run()


def _become_launcher(machine: Machine) -> None:
    """In the kernel's process: shed what is ours, and the traces of having started as root."""
    os.environ.clear()
    os.environ.update(machine.kernel_env())
    sys.argv[:] = [""]
    launcher.adopt_user_site()
    launcher.main(AGENT_PATH)
