"""A kernel that was started and exercised before anybody asked for it, and is bound late.

Phases, in the launcher's process:

1. `heat`: libraries load, and fill their caches with, what a first traceback and a first
   completion need.
2. `exercised`: a kernel in a process of its own, forked from this one, is put through what clients
   do (`exercise`), and ends. That makes the code hot that every process here shares; this process
   itself has run none of it, so nothing has to be taken back.
3. `become_kernel`: this process becomes one with a throw-away key, and its event loop waits.
4. `bind_late`: what a kernel reads when it starts is replaced by what was asked for.
"""

from __future__ import annotations

import os
import sys

from . import launcher

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from socket import socket
    from typing import Any

MODULES = (
    "IPython.core.logger",
    "IPython.core.magics.execution",
    "IPython.core.magics.namespace",
    "IPython.core.guarded_eval",
    "IPython.core.latex_symbols",
    "IPython.external.pickleshare",
    "pygments.filters",
    "pygments.formatters.html",
    "pygments.lexers.python",
    "pygments.styles.default",
    "jedi",
)
"""What IPython imports when it first answers; still nothing that a user would call his choice."""

DEADLINE = 30.0
"""Seconds for the exercise; a kernel that was not exercised to the end is as good, but slower."""


def warmed_up(agent: socket, folder: str) -> bool:
    """True once all is done, False where a further instruction has cut it short.

    Only in `folder` is anything written, and it is gone afterwards.
    """
    import shutil

    os.mkdir(folder, 0o700)
    try:
        heat(folder)
        return not readable(agent, 0) and exercised(agent, folder)
    except Exception:  # noqa: BLE001 - a kernel that is not exercised is as good, but slower
        report()
        return not readable(agent, 0)
    finally:
        shutil.rmtree(folder)


def report() -> None:
    """The exception at hand, to the log: a kernel has made descriptor 2 a way to its clients."""
    import traceback

    log = getattr(sys.stderr, "_original_stdstream_copy", 2)
    os.write(log, traceback.format_exc().encode())


def heat(folder: str) -> None:
    """Once each, what takes longest: a traceback (100 ms, at native speed), a completion (70)."""
    import importlib
    import linecache

    from IPython.core.ultratb import AutoFormattedTB

    for name in MODULES:
        importlib.import_module(name)
    remember_files()
    jedi = importlib.import_module("jedi")
    lines, cache = dict(linecache.cache), jedi.settings.cache_directory
    jedi.settings.cache_directory = folder
    try:
        jedi.Interpreter("x.app", [{"x": []}]).complete()
        exec(compile("def f():\n    1 / 0\nf()", "<heat>", "exec"), {})
    except ZeroDivisionError:
        AutoFormattedTB(mode="Context", theme_name="linux").structured_traceback(*sys.exc_info())
    finally:
        jedi.settings.cache_directory = cache
        linecache.cache.clear()
        linecache.cache.update(lines)


def remember_files() -> None:
    """Tell `inspect` which module comes from which file, as its `getmodule` would at the first
    traceback. That asks for the real path of each file, 8,000 calls of lstat(2); we ask for that of
    each folder."""
    import functools
    import importlib.machinery
    import inspect

    suffixes = (*importlib.machinery.SOURCE_SUFFIXES, *importlib.machinery.EXTENSION_SUFFIXES)
    real = functools.cache(os.path.realpath)
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if not (isinstance(path, str) and path.endswith(suffixes) and os.path.isabs(path)):
            continue
        if not os.path.islink(path):
            folder, base = os.path.split(path)
            inspect._filesbymodname[name] = path  # type: ignore[attr-defined]
            for known in (path, os.path.join(real(folder), base)):
                inspect.modulesbyfile[known] = module.__name__


def exercised(agent: socket, folder: str) -> bool:
    """As `warmed_up`."""
    import signal

    from . import exercise

    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = fork(agent, lambda: exercise.exercise(folder, parent))
    end = os.pidfd_open(pid)
    came = readable(agent, DEADLINE, end)
    os.kill(pid, signal.SIGKILL)  # nobody has waited for it yet, so it is still ours
    os.waitpid(pid, 0)
    os.close(end)
    return not came


def readable(agent: socket, seconds: float, *others: int) -> bool:
    """Whether there is an instruction. Waits for one, or for one of `others`, or for the time."""
    import select

    poll = select.poll()
    for fd in (agent.fileno(), *others):
        poll.register(fd, select.POLLIN)
    return agent.fileno() in {fd for fd, _ in poll.poll(seconds * 1000)}


def fork(agent: socket, body: Callable[[], None]) -> int:
    """The pid of a process that runs `body` and ends; what we do at our exit it does not do."""
    pid = os.fork()
    if pid:
        return pid
    try:
        agent.close()
        body()
    except BaseException:  # noqa: BLE001 - the last frame of this process; the log is its reader
        report()
    finally:
        os._exit(0)


def become_kernel(agent: socket, connection_file: str) -> Any:
    """A kernel that nobody has the key to; its event loop waits for the instruction to bind."""
    import gc

    from tornado.ioloop import IOLoop

    before = dict(os.environ)
    app = launcher.initialize(["-f", connection_file])
    added = {name: value for name, value in os.environ.items() if before.get(name) != value}
    launcher.tell_activity(agent, app.kernel)
    loop = IOLoop.current()

    def instructed(_agent: socket, _events: int) -> None:
        loop.remove_handler(agent)
        try:
            bind_late(app, launcher.receive(agent), before, added)
            launcher.announce(agent, app)
        except Exception:  # noqa: BLE001 - a kernel that cannot be what was asked for ends, and says why
            report()
            raise SystemExit(1) from None

    loop.add_handler(agent, instructed, IOLoop.READ)
    loop.add_callback(agent.send, launcher.WARM)
    gc.collect()
    gc.freeze()
    return app


def bind_late(
    app: Any, instruction: dict[str, Any], before: dict[str, str], added: dict[str, str]
) -> None:
    """Make a running kernel that nothing was asked of yet the one that `instruction` wants.

    `before` is the environment that it started with, `added` what it has put there itself.
    """
    import random

    if instruction["env"].get("MPLBACKEND"):
        added.pop("MPLBACKEND", None)
    os.environ.clear()
    os.environ.update(before)
    launcher.bind(instruction)
    os.environ.update(added)
    random.seed()
    take_key(app.session, instruction["key"], instruction["signature_scheme"])
    take_identity(app.kernel)
    take_folder(app.shell)
    app.argv = list(instruction["argv"])
    name = os.environ.get("JPY_SESSION_NAME")
    if name:
        app.shell.user_ns["__session__"] = app.shell.user_ns_hidden["__session__"] = name


def take_key(session: Any, key: str, scheme: str) -> None:
    """From here on messages that are signed with the key before are refused."""
    from jupyter_client.session import new_id

    session.signature_scheme = scheme
    session.key = key.encode()
    session.session = new_id()


def take_identity(kernel: Any) -> None:
    """A name of its own, as it would have chosen at its start."""
    import uuid

    kernel.ident = str(uuid.uuid4())
    kernel.shell.displayhook.topic = kernel._topic("execute_result")


def take_folder(shell: Any) -> None:
    """Where and when it has started, for `%dhist`, `%cd -` and `%history`."""
    import datetime
    import pathlib

    shell.starting_dir = os.getcwd()
    history = shell.history_manager
    history.dir_hist[:] = [pathlib.Path.cwd()]
    with history.db:
        began = datetime.datetime.now().isoformat(" ")
        history.db.execute("UPDATE sessions SET start = ?", (began,))
