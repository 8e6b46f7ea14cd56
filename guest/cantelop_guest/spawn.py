"""Makes the kernel's process: own session, own cgroup, own user, no descriptor of the agent's."""

from __future__ import annotations

import os
import signal
import sys

from .launcher import INSTRUCTION_FD

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, NoReturn

    from .machine import MachineLike

MAX_FD = 4096


class Prestarted:
    """A process that waits for its instruction: its pid, and our end of the socket to it."""

    def __init__(self, pid: int, instructions: int) -> None:
        self.pid = pid
        self.instructions = instructions


def prestart(machine: MachineLike, stdio: int, body: Callable[[], Any]) -> Prestarted:
    """Start the process in which `body` waits on `INSTRUCTION_FD`."""
    import _socket

    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)  # close-on-exec
    pid = spawn(machine, stdio, body, instructions=theirs.fileno())
    theirs.close()
    return Prestarted(pid, ours.detach())


def spawn(
    machine: MachineLike, stdio: int, body: Callable[[], Any], *, instructions: int | None = None
) -> int:
    """The pid of a new process that runs `body` and then exits. `stdio` becomes its 1 and 2."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        _reset_signals()
        machine.enter_kernel_process()
        _replace_descriptors(stdio, instructions)
        body()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - the last frame of this process; the log is its reader
        import traceback

        traceback.print_exc()
    _exit(status)


def end(pid: int) -> None:
    """Kill a process that `spawn` has made, with its group, and collect what of it is our child."""
    for kill in (os.killpg, os.kill):  # there is no group yet where it has only just been made
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    os.waitpid(pid, 0)
    try:
        while True:
            os.waitpid(-pid, 0)
    except ChildProcessError:
        pass


def empty(folder: str) -> None:
    """Remove all that is in `folder`, in which nobody else is at work."""
    for path, folders, files in os.walk(folder, topdown=False):
        for name in files:
            os.unlink(os.path.join(path, name))
        for name in folders:
            os.rmdir(os.path.join(path, name))


def _exit(status: int) -> NoReturn:
    """What the interpreter would do at the end of a script, which this is the end of."""
    import atexit

    try:
        threading = sys.modules.get("threading")
        if threading is not None:
            threading._shutdown()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(status)


def _reset_signals() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ipykernel's own choice between cells
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _replace_descriptors(stdio: int, instructions: int | None) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(stdio, 1)
    os.dup2(stdio, 2)
    if instructions is None:
        os.closerange(3, MAX_FD)
        return
    if instructions != INSTRUCTION_FD:
        os.dup2(instructions, INSTRUCTION_FD)
    else:
        os.set_inheritable(INSTRUCTION_FD, True)
    os.closerange(INSTRUCTION_FD + 1, MAX_FD)


def execute(argv: list[str], env: Mapping[str, str], cwd: str) -> NoReturn:
    """Replace this process. argv[0] is looked up in the PATH of `env`."""
    os.chdir(cwd)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if argv[0] == "python" and not _on_path("python", env):
        argv = ["python3", *argv[1:]]
    os.execvpe(argv[0], argv, dict(env))


def _on_path(name: str, env: Mapping[str, str]) -> bool:
    folders = env.get("PATH", os.defpath).split(":")
    return any(os.access(os.path.join(folder, name), os.X_OK) for folder in folders)


def execute_launcher(python: str, agent_path: str, env: Mapping[str, str]) -> NoReturn:
    """Replace this process by a fresh interpreter that runs the launcher."""
    code = (
        f"import sys; sys.path.insert(0, {agent_path!r}); "
        f"from cantelop_guest.launcher import main; main({agent_path!r})"
    )
    os.execve(python, [python, "-c", code], dict(env))
