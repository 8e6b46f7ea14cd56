"""Turns a process into the image's own Jupyter kernel: an ordinary, unmodified IPKernelApp.

Runs as the kernel's user, in a process that the agent made before anybody asked for a kernel.

1. `load`: import what a kernel needs to start and to answer its first requests;
2. `receive`: wait for the agent's instruction. Where that is to warm up, `warm` goes on from here;
3. `bind`: become the kernel that was asked for;
4. `initialize`, then `announce` that every socket listens; then the application's own loop.

User code sees what `python -m ipykernel_launcher -f FILE` would show it.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from socket import socket
    from typing import Any

INSTRUCTION_FD = 3
"""A SOCK_SEQPACKET socket to the agent: instructions (JSON) in, the bytes below out."""

WARM, READY, BUSY, IDLE = b"W", b"R", b"B", b"I"
"""It waits to be bound, exercised; it is bound, and all its sockets listen; a cell runs, whose
message id follows; none runs."""

MAX_WORD = 200
"""Bytes of such a word with what follows it."""

MAX_INSTRUCTION = 256 * 1024

PRELOAD = (
    "ipykernel.kernelapp",
    "ipykernel.ipkernel",
    "ipykernel.debugger",
    "IPython.core.completerlib",
    "IPython.core.debugger",
    "IPython.core.oinspect",
    "IPython.extensions.storemagic",
    "sqlite3",
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
    app = become_kernel(connect_agent())
    hide_modules()
    app.start()


def become_kernel(agent: socket) -> Any:
    """A kernel that is bound, or one that will be once its event loop runs."""
    instruction = receive(agent)
    if instruction["do"] == "warm_up":
        from . import warm

        if warm.warmed_up(agent, instruction["scratch"]):
            return warm.become_kernel(agent, instruction["connection_file"])
        instruction = receive(agent)  # the bind came first: a cold start, as ever
    bind(instruction)
    app = initialize(instruction["argv"])
    tell_activity(agent, app.kernel)
    announce(agent, app)
    return app


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


def connect_agent() -> socket:
    """The agent's socket, which no program that is started from here inherits."""
    import socket

    os.set_inheritable(INSTRUCTION_FD, False)
    return socket.socket(fileno=INSTRUCTION_FD)


def receive(agent: socket) -> dict[str, Any]:
    """Wait for an instruction. A closed socket means there will be no kernel."""
    import json

    packet = agent.recv(MAX_INSTRUCTION)
    if not packet:
        raise SystemExit(0)
    instruction: dict[str, Any] = json.loads(packet)
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
    shut_down_promptly(app.kernel)
    return app


def shut_down_promptly(kernel: Any) -> None:
    """Let the last flush of a shutdown wait half a second, where ipykernel's waits ten.

    The thread that would have to answer it may be gone by then: ipykernel 7.4 stops it while the
    control thread still flushes, and then joins that one.
    """
    do_shutdown = kernel.do_shutdown

    def shut_down(restart: bool) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "flush_timeout"):
                stream.flush_timeout = 0.5
        return do_shutdown(restart)

    kernel.do_shutdown = shut_down


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


def tell_activity(agent: socket, kernel: Any) -> None:
    """Have the agent told which cell runs, whenever that changes, and when the last one has ended.

    Where the kernel publishes its status, since no code of a user's is on the stack there. Cells
    run side by side only in threads of their own (subshells), at most one in each.
    """
    import threading

    publish = kernel._publish_status
    process, ours = os.getpid(), _file_of(agent)
    lock = threading.Lock()
    running: dict[threading.Thread, str] = {}
    told = IDLE

    def publish_status(status: str, channel: str, parent: Any = None) -> None:
        publish(status, channel, parent)
        header = (parent or kernel.get_parent(channel)).get("header", {})
        executes = header.get("msg_type") == "execute_request"
        if channel == "shell" and executes and os.getpid() == process:
            with lock:
                follow(status, str(header.get("msg_id", "")))

    def follow(status: str, cell: str) -> None:
        nonlocal told
        running.pop(threading.current_thread(), None)
        if status == "busy":
            running[threading.current_thread()] = cell
        cells = [cell for thread, cell in running.items() if thread.is_alive()]
        now = (BUSY + cells[-1].encode(errors="replace"))[:MAX_WORD] if cells else IDLE
        if now != told and _file_of(agent) == ours:
            told = now
            agent.send(now)

    kernel._publish_status = publish_status


def _file_of(agent: socket) -> int | None:
    """A user's code may close any descriptor, and its number then be that of another file."""
    try:
        return os.fstat(agent.fileno()).st_ino
    except OSError:
        return None


def announce(agent: socket, app: Any) -> None:
    """Tell the agent that all five sockets listen.

    Four are bound by `initialize` itself; the heartbeat binds in its own thread and has no event
    for it, so its file is looked for (it is there at once, or the thread is dead).
    """
    import time

    heartbeat = f"{app.ip}-{app.hb_port}"
    while not os.path.exists(heartbeat) and app.heartbeat.is_alive():
        time.sleep(0.002)
    agent.send(READY)


def hide_modules() -> None:
    """Take ourselves out of `sys.modules`: the user's code shares this interpreter."""
    for name in list(sys.modules):
        if name.partition(".")[0] in ("cantelop_guest", "cantelop_kernels"):
            del sys.modules[name]
