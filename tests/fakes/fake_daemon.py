"""A daemon in the real one's shape, whose sandboxes are local ipykernels over ipc.

It serves the API of `cantelop_kernels.client` on a Unix socket, from a thread with a loop of its
own: a synchronous KernelManager blocks the loop it is called from. Tests break it on purpose
through `faults`, and look at `sessions`, `released` and `requests` afterwards.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tornado.web
from tornado.httpserver import HTTPServer
from tornado.netutil import bind_unix_socket

from cantelop_kernels import errors, wire
from cantelop_kernels.process import wait_pidfd
from cantelop_kernels.schema import Endpoints, Exit, Info, Logs, SessionRequest, SessionView

GUEST_CONNECTION_FILE = "/run/cantelop/kernel/connection.json"


@dataclass
class Faults:
    """What goes wrong from now on."""

    launch: errors.CantelopError | None = None
    launches: int = 1 << 30
    """How many launches fail before they work again."""
    answer: errors.CantelopError | None = None
    """Every question about a session is answered with this."""
    drop: bool = False
    """Connections break without an answer, but launches and ends work."""
    hang: bool = False
    """Questions about sessions are never answered."""
    launch_seconds: float = 0.0
    notices: list[str] = field(default_factory=list)


@dataclass
class FakeSession:
    view: SessionView
    request: SessionRequest
    process: subprocess.Popen[bytes]
    forgotten: bool = False
    exit: Exit | None = None

    def look(self) -> SessionView:
        code = self.process.poll()
        if code is None and self.exit is None:
            return self.view
        ended = self.exit or _exit(code if code is not None else -9)
        self.view = replace(self.view, state="exited", exit=ended)
        return self.view

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.look()


def _exit(code: int) -> Exit:
    if code < 0:
        return Exit(reason=f"killed by signal {-code}", signal=-code)
    return Exit(reason=f"ended with status {code}", exit_code=code)


class FakeDaemon:
    """Start with `running`. Everything it keeps may be looked at from any thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "d.sock"
        self.faults = Faults()
        self.sessions: dict[str, FakeSession] = {}
        self.requests: list[SessionRequest] = []
        self.released: list[str] = []
        self.ended: list[str] = []
        self.questions = 0
        self.started = threading.Event()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def last(self) -> FakeSession:
        return list(self.sessions.values())[-1]

    def alive(self) -> list[str]:
        return [key for key, one in self.sessions.items() if one.process.poll() is None]

    def create(self, request: SessionRequest) -> SessionView:
        self.requests.append(request)
        if self.faults.launch is not None and self.faults.launches > 0:
            self.faults.launches -= 1
            raise self.faults.launch
        if request.endpoints in self.released:
            raise errors.NotFound("no such endpoints")
        ip = request.endpoints or str(self.folder / secrets.token_hex(4))
        view = self._view(ip)
        process = self._spawn(request, ip)
        self.sessions[view.id] = FakeSession(view, request, process)
        return view

    def _view(self, ip: str) -> SessionView:
        return SessionView(
            id=secrets.token_hex(6),
            app="default",
            user=os.getuid(),
            image="python3",
            digest="sha256:0",
            vcpus=1,
            memory_mib=512,
            state="running",
            step="",
            created=time.time(),
            boot_seconds=0.1,
            endpoints=Endpoints(token=ip, ip=ip),
            vmm="fake",
            emulated=True,
            notices=list(self.faults.notices),
        )

    def _spawn(self, request: SessionRequest, ip: str) -> subprocess.Popen[bytes]:
        file = self.folder / f"{secrets.token_hex(4)}.json"
        info: dict[str, Any] = {f"{name}_port": 1 + n for n, name in enumerate(wire.CHANNELS)}
        info |= {"transport": "ipc", "ip": ip, "key": request.key, "kernel_name": "python3"}
        file.write_text(json.dumps(info | {"signature_scheme": request.signature_scheme}))
        argv = request.argv or ["python3", "-m", "ipykernel_launcher", "-f", GUEST_CONNECTION_FILE]
        argv = [str(file) if part == GUEST_CONNECTION_FILE else part for part in argv]
        argv = [sys.executable if part == "python3" else part for part in argv]
        env = {"PATH": os.environ["PATH"], "HOME": str(self.folder)} | request.env
        return subprocess.Popen([*argv, *request.extra], env=env, start_new_session=True)

    def find(self, key: str) -> FakeSession:
        self.questions += 1
        if self.faults.answer is not None:
            raise self.faults.answer
        if key not in self.sessions or self.sessions[key].forgotten:
            raise errors.NotFound(f"no session {key}")
        return self.sessions[key]

    def release(self, token: str) -> None:
        self.released.append(token)
        for one in self.sessions.values():
            if one.view.endpoints.token == token and one.process.poll() is None:
                one.end()

    def info(self) -> Info:
        return Info(
            version="0",
            pid=os.getpid(),
            state=str(self.folder),
            vmm="fake",
            emulated=True,
            allow_emulation=True,
            sessions=len(self.alive()),
            apps=["default"],
        )

    @contextmanager
    def running(self) -> Iterator[FakeDaemon]:
        thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        thread.start()
        assert self.started.wait(10)
        try:
            yield self
        finally:
            self.faults = Faults()
            assert self._loop is not None and self._stop is not None
            self._loop.call_soon_threadsafe(self._stop.set)
            thread.join(10)
            for one in self.sessions.values():
                one.end()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        routes = [
            (r"/v1/info", _Info),
            (r"/v1/sessions", _Sessions),
            (r"/v1/sessions/(\w+)", _Session),
            (r"/v1/sessions/(\w+)/wait", _Wait),
            (r"/v1/sessions/(\w+)/signal", _Signal),
            (r"/v1/sessions/(\w+)/logs", _Logs),
            (r"/v1/endpoints/(.+)", _Endpoints),
        ]
        made = [(path, handler, {"daemon": self}) for path, handler in routes]
        application = tornado.web.Application(made, log_function=lambda handler: None)
        server = HTTPServer(application)
        server.add_socket(bind_unix_socket(str(self.path), mode=0o600))
        self.started.set()
        await self._stop.wait()
        server.stop()
        await server.close_all_connections()


class _Base(tornado.web.RequestHandler):
    daemon: FakeDaemon
    gone: asyncio.Event

    def initialize(self, daemon: FakeDaemon) -> None:
        self.daemon = daemon
        self.gone = asyncio.Event()

    def on_connection_close(self) -> None:
        self.gone.set()

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        error = kwargs["exc_info"][1]
        if not isinstance(error, errors.CantelopError):
            error = errors.CantelopError(repr(error))
        self.set_status(error.http_status)
        self.finish({"error": error.to_json()})

    def log_exception(self, *args: Any) -> None:
        pass

    async def found(self, key: str) -> FakeSession:
        if self.daemon.faults.drop:
            self.request.connection.stream.close()  # type: ignore[union-attr]
            raise errors.CantelopError("dropped")
        if self.daemon.faults.hang:
            await self.gone.wait()
        return self.daemon.find(key)


class _Info(_Base):
    def get(self) -> None:
        self.finish(self.daemon.info().to_json())


class _Sessions(_Base):
    def get(self) -> None:
        self.finish({"sessions": [s.look().to_json() for s in self.daemon.sessions.values()]})

    async def post(self) -> None:
        request = SessionRequest.from_json(json.loads(self.request.body))
        with suppress(TimeoutError):
            async with asyncio.timeout(self.daemon.faults.launch_seconds):
                await self.gone.wait()
        if self.gone.is_set():
            self.daemon.requests.append(request)
            return
        await self.finish(self.daemon.create(request).to_json())


class _Session(_Base):
    async def get(self, key: str) -> None:
        await self.finish((await self.found(key)).look().to_json())

    async def delete(self, key: str) -> None:
        one = await self.found(key)
        self.daemon.ended.append(key)
        one.end()
        await self.finish({})


class _Wait(_Base):
    async def get(self, key: str) -> None:
        one = await self.found(key)
        with suppress(TimeoutError, ProcessLookupError):
            async with asyncio.timeout(float(self.get_argument("seconds"))):
                await _ended(one.process.pid)
        await self.finish(one.look().to_json())


async def _ended(pid: int) -> None:
    fd = os.pidfd_open(pid)
    try:
        await wait_pidfd(fd)
    finally:
        os.close(fd)


class _Signal(_Base):
    async def post(self, key: str) -> None:
        one = await self.found(key)
        if one.process.poll() is None:
            os.killpg(one.process.pid, int(json.loads(self.request.body)["signum"]))
        await self.finish({})


class _Logs(_Base):
    async def get(self, key: str) -> None:
        await self.found(key)
        await self.finish(Logs(console="", kernel="", vmm="").to_json())


class _Endpoints(_Base):
    def delete(self, token: str) -> None:
        self.daemon.release(token)
        self.finish({})
