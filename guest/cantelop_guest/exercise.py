"""Puts a throw-away kernel through what clients do, so that the code it takes is hot.

One process forked from the launcher before anything has run there, which shares the launcher's code
at the launcher's addresses: a kernel, and a thread that is its client. (Two processes would have to
copy what they share twice, and an emulated CPU forgets its translations whenever they take turns:
half a second.) All that it writes lies in one folder, which the launcher removes. The launcher ends
it, and it ends with the launcher.
"""

from __future__ import annotations

import os
import signal
import sys

from . import launcher

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CHANNELS = ("shell", "iopub", "stdin", "control", "hb")
TYPES = {"shell": "DEALER", "iopub": "SUB", "stdin": "DEALER", "control": "DEALER", "hb": "REQ"}
SCHEME = "hmac-sha256"

CELLS = (
    "1",
    "print('a'); 6 * 7",
    "x = [1, 2]\ndef f(n):\n    return n + x[0]\nf(41)",
    "import asyncio\nawait asyncio.sleep(0)",
    "from IPython.display import HTML, display\ndisplay(HTML('<b>a</b>'))",
    "import sys\nprint('b', file=sys.stderr)",
)
"""Each with its own way through the kernel; they end well."""

FAILING = ("def g():\n    return 1 / 0\ng()", "1 +")


class NoAnswer(Exception):
    """The kernel did not say what it should have."""


def exercise(folder: str, parent: int) -> None:
    """Never returns: the process ends when all is done. Home and temporary files lie in `folder`;
    `parent` is the launcher."""
    import json
    import threading

    from tornado.ioloop import IOLoop

    from . import warm

    key = os.urandom(16).hex()
    _live_in(folder)
    info: dict[str, Any] = {f"{name}_port": port for port, name in enumerate(CHANNELS, start=1)}
    info |= {"key": key, "signature_scheme": SCHEME, "transport": "ipc"}
    info["ip"] = f"{folder}/k"
    path = f"{folder}/connection.json"
    with open(path, "w") as file:
        json.dump(info, file)
    app = launcher.initialize(["-f", path])
    own = {"argv": ["-f", path], "env": {}, "cwd": folder, "key": key, "signature_scheme": SCHEME}
    warm.bind_late(app, own, dict(os.environ), {})
    launcher_gone = os.pidfd_open(parent)
    IOLoop.current().add_handler(launcher_gone, lambda *_: os._exit(0), IOLoop.READ)
    threading.Thread(target=_be_client, args=(folder, key), daemon=True).start()
    app.start()


def _be_client(folder: str, key: str) -> None:
    from . import warm

    try:
        use_everything(folder, key)
    except Exception:  # noqa: BLE001 - the last frame of this process; the log is its reader
        warm.report()
    finally:
        os._exit(0)


def _live_in(folder: str) -> None:
    """Libraries that have taken down where their caches are have to be told, too."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)  # a greeting
    os.close(null)
    os.environ.update({"HOME": folder, "TMPDIR": folder, "XDG_CACHE_HOME": folder})
    jedi = sys.modules.get("jedi.settings")
    if jedi is not None:
        jedi.cache_directory = folder  # type: ignore[attr-defined]
    os.chdir(folder)


def use_everything(folder: str, key: str) -> None:
    """Connect as clients do."""
    client = Client(folder, key)
    client.become_ready()
    for code in CELLS:
        client.execute(code)
    for code in FAILING:
        client.execute(code, status="error")
    client.use_tools()
    client.use_stdin()
    client.interrupt()


class Client:
    """As much of a Jupyter client as the exercise needs. The launcher limits its time."""

    def __init__(self, folder: str, key: str) -> None:
        import zmq
        from jupyter_client.session import Session

        self._session = Session(key=key.encode(), signature_scheme=SCHEME)
        self._context = zmq.Context()
        self._sockets: dict[str, Any] = {}
        for port, name in enumerate(CHANNELS, start=1):
            sock = self._context.socket(getattr(zmq, TYPES[name]))
            sock.setsockopt(zmq.RECONNECT_IVL, 5)
            if TYPES[name] == "DEALER":
                sock.setsockopt(zmq.IDENTITY, self._session.bsession)
            if name == "iopub":
                sock.setsockopt(zmq.SUBSCRIBE, b"")
            sock.connect(f"ipc://{folder}/k-{port}")
            self._sockets[name] = sock

    def become_ready(self) -> None:
        """What clients do before their first cell, and that one.

        Once the kernel has welcomed its first subscriber, nothing of iopub is missed.
        """
        self._await("iopub", "iopub_welcome", None)
        self._sockets["hb"].send(b"ping")
        self._sockets["hb"].recv()
        for channel, kind, content in _GREETINGS:
            self.ask(channel, kind, content)

    def execute(self, code: str, status: str = "ok") -> None:
        reply = self.ask("shell", "execute", _execute(code))
        if reply["content"]["status"] != status:
            raise NoAnswer(f"{code!r}: {reply['content']}")

    def use_tools(self) -> None:
        self.ask("shell", "complete", {"code": "x.app", "cursor_pos": 5})
        self.ask("shell", "complete", {"code": "import o", "cursor_pos": 8})
        self.ask("shell", "inspect", {"code": "f", "cursor_pos": 1, "detail_level": 0})
        self.ask("shell", "is_complete", {"code": "for i in x:"})
        debug = {"type": "request", "seq": 1, "command": "debugInfo", "arguments": {}}
        self.ask("control", "debug", debug)

    def use_stdin(self) -> None:
        asked = self._send("shell", "execute_request", _execute("input('c')", allow_stdin=True))
        prompt = self._await("stdin", "input_request", asked)
        answer = self._session.msg("input_reply", {"value": "d"}, parent=prompt)
        self._session.send(self._sockets["stdin"], answer)
        self._finish("shell", "execute_reply", asked)

    def interrupt(self) -> None:
        """The cell says by a pipe that it runs: an interrupt that comes while it still displays or
        prints something may be swallowed there, or takes half a second to be told."""
        import threading

        main = threading.main_thread().ident
        assert main is not None
        on, tell = os.pipe()
        cell = f"import os; os.write({tell}, b'.')\nwhile True: pass"
        asked = self._send("shell", "execute_request", _execute(cell))
        os.read(on, 1)
        signal.pthread_kill(main, signal.SIGINT)
        self._finish("shell", "execute_reply", asked)

    def ask(self, channel: str, kind: str, content: dict[str, Any]) -> dict[str, Any]:
        """Send a request, and wait for its answer and for the kernel to be idle again."""
        asked = self._send(channel, f"{kind}_request", content)
        return self._finish(channel, f"{kind}_reply", asked)

    def _send(self, channel: str, kind: str, content: dict[str, Any]) -> str:
        message = self._session.msg(kind, content)
        self._session.send(self._sockets[channel], message)
        asked: str = message["header"]["msg_id"]
        return asked

    def _finish(self, channel: str, kind: str, asked: str) -> dict[str, Any]:
        reply = self._await(channel, kind, asked)
        while self._await("iopub", "status", asked)["content"]["execution_state"] != "idle":
            pass
        return reply

    def _await(self, channel: str, kind: str, asked: str | None) -> dict[str, Any]:
        """The next message of this kind that belongs to the request `asked`."""
        while True:
            _, message = self._session.recv(self._sockets[channel], mode=0)
            if message is None or message["msg_type"] != kind:
                continue
            if message["parent_header"].get("msg_id") == asked:
                return message


def _execute(code: str, *, allow_stdin: bool = False) -> dict[str, Any]:
    return {
        "code": code,
        "silent": False,
        "store_history": True,
        "user_expressions": {},
        "allow_stdin": allow_stdin,
        "stop_on_error": True,
    }


_HISTORY = {"hist_access_type": "tail", "output": False, "raw": True, "n": 10}
_GREETINGS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("control", "kernel_info", {}),
    ("shell", "kernel_info", {}),
    ("shell", "comm_info", {"target_name": "jupyter.widget"}),
    ("shell", "history", _HISTORY),
    ("shell", "execute", _execute("1")),
)
