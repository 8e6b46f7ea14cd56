"""Turns a process into the image's own Jupyter kernel: an ordinary, unmodified IPKernelApp.

Runs as the kernel's user, in a process that the agent made before anybody asked for a kernel.
Phases, each usable alone so that more can be done ahead of the claim one day:

1. `load`: import what a kernel needs to start and to answer its first requests;
2. `receive`: wait for the instruction (environment, folder, arguments);
3. `bind`: become the kernel that was asked for;
4. `initialize`, then `announce` that every socket listens; then the application's own loop.

User code sees what `python -m ipykernel_launcher -f FILE` would show it.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

INSTRUCTION_FD = 3
"""A socket to the agent: one JSON line in, one byte out, then closed."""

PRELOAD = (
    "ipykernel.kernelapp",
    "ipykernel.ipkernel",
    "ipykernel.debugger",
    "IPython.core.completerlib",
    "IPython.core.debugger",
    "IPython.extensions.storemagic",
    "tornado.platform.asyncio",
    # the first traceback: an interrupt is to be answered within a second
    "stack_data",
    "pygments.formatters.terminal256",
    "pygments.styles",
)
"""Imported before the claim: what IPKernelApp imports when it starts, and what its first answers
need. Nothing that a user would call his own choice (numpy, pandas, ...)."""

STALL_SECONDS = 60
"""How long one reader of iopub that stays connected and reads nothing may hold up the kernel."""


def main(agent_path: str) -> None:
    """The whole life of the kernel process; returns when the kernel is to exit."""
    load(agent_path)
    instruction = receive(INSTRUCTION_FD)
    bind(instruction)
    app = initialize(instruction["argv"])
    announce(INSTRUCTION_FD, app)
    hide_modules()
    app.start()


def load(agent_path: str) -> None:
    """Import with the collector off: it finds nothing to free and walks everything each time."""
    import gc
    import importlib

    sys.path[:] = [entry for entry in sys.path if entry not in ("", agent_path)]
    gc.disable()
    for name in PRELOAD:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()


def adopt_user_site() -> None:
    """Do again what `site` did for the user that the interpreter started as, for this one.

    `pip install` without rights on the system's packages puts them there.
    """
    import site

    site.USER_BASE = site.USER_SITE = None
    site.ENABLE_USER_SITE = site.check_enableusersite()
    before = list(sys.path)
    site.addusersitepackages(set(before))
    added = [entry for entry in sys.path if entry not in before]
    first = next((i for i, entry in enumerate(before) if entry.endswith("-packages")), len(before))
    sys.path[:] = [*before[:first], *added, *before[first:]]


def receive(fd: int) -> dict[str, Any]:
    """Wait for the agent's line. A closed socket means there will be no kernel."""
    import json

    line = bytearray()
    while not line.endswith(b"\n"):
        data = os.read(fd, 65536)
        if not data:
            raise SystemExit(0)
        line += data
    instruction: dict[str, Any] = json.loads(line)
    return instruction


def bind(instruction: dict[str, Any]) -> None:
    """Take on environment, folder and arguments, as if the process had been started with them."""
    import time

    os.environ.update(instruction["env"])
    time.tzset()
    os.chdir(instruction["cwd"])
    process = sys.modules.get("multiprocessing.process")
    if process is not None:  # it remembers the folder in which it was imported
        process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
    package = os.path.dirname(os.path.dirname(sys.modules["ipykernel"].__file__ or ""))
    sys.argv[:] = [os.path.join(package, "ipykernel_launcher.py"), *instruction["argv"]]
    sys.orig_argv[:] = [sys.executable, "-m", "ipykernel_launcher", *instruction["argv"]]


def initialize(argv: list[str]) -> Any:
    """IPKernelApp, with one change: iopub holds the kernel up where it would lose messages.

    Its history stays in memory unless the arguments say otherwise: a file would end with this
    machine, and every cell would wait for its disk (8 of 60 ms under emulation).
    """
    from ipykernel.kernelapp import IPKernelApp
    from traitlets.config import Config

    app = IPKernelApp.instance()
    app.update_config(Config({"HistoryManager": {"hist_file": ":memory:"}}))
    init_iopub = app.init_iopub

    def init_lossless_iopub(context: Any) -> None:
        init_iopub(context)
        make_lossless(app.iopub_thread)

    app.init_iopub = init_lossless_iopub
    app.initialize(argv)
    del app.init_iopub
    return app


def make_lossless(iopub_thread: Any) -> None:
    """Let a slow reader slow the kernel down, where ZMQ would drop what is over 1000 messages.

    The publishing thread then waits inside send(), and print() waits for that thread; an interrupt
    still gets through, since the wait is not the main thread's. A reader that goes away no longer
    counts. One that stays connected without reading would stop the kernel for ever: after
    `STALL_SECONDS` the kernel goes on, and that reader loses messages until it reads again.
    """
    import zmq

    sock = iopub_thread.socket
    send_multipart = sock.send_multipart
    stalled = False

    def send(parts: Any, flags: int = 0, **kwargs: Any) -> Any:
        nonlocal stalled
        try:
            sent = send_multipart(parts, flags | (zmq.DONTWAIT if stalled else 0), **kwargs)
            stalled = False
        except zmq.Again:
            stalled = True
            sock.setsockopt(zmq.XPUB_NODROP, 0)
            sent = send_multipart(parts, flags, **kwargs)
            sock.setsockopt(zmq.XPUB_NODROP, 1)
        return sent

    def apply() -> None:
        sock.setsockopt(zmq.XPUB_NODROP, 1)
        sock.setsockopt(zmq.SNDTIMEO, STALL_SECONDS * 1000)
        sock.send_multipart = send

    iopub_thread.schedule(apply)


def announce(fd: int, app: Any) -> None:
    """Tell the agent that all five sockets listen.

    Four are bound by `initialize` itself; the heartbeat binds in its own thread and has no event
    for it, so its file is looked for (it is there at once, or the thread is dead).
    """
    import time

    heartbeat = f"{app.ip}-{app.hb_port}"
    while not os.path.exists(heartbeat) and app.heartbeat.is_alive():
        time.sleep(0.002)
    os.write(fd, b"R")
    os.close(fd)


def hide_modules() -> None:
    """Take ourselves out of `sys.modules`: the user's code shares this interpreter."""
    for name in list(sys.modules):
        if name.partition(".")[0] in ("cantelop_guest", "cantelop_kernels"):
            del sys.modules[name]
