"""Talks to the daemon on its Unix socket. Used by the provisioner and the command line.

Imports layer 0 only. Every call opens one connection, asks, and closes it: nothing is held open
between calls, so a synchronous KernelManager (which runs no loop between calls) and a strict test
suite (which fails on an unclosed socket) are both served.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import secrets
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from tornado.httpclient import HTTPClientError, HTTPRequest, HTTPResponse
from tornado.httputil import HTTPHeaders
from tornado.iostream import IOStream, StreamClosedError
from tornado.netutil import Resolver
from tornado.simple_httpclient import HTTPStreamClosedError, HTTPTimeoutError, SimpleAsyncHTTPClient
from tornado.tcpclient import TCPClient

from cantelop_kernels import config, errors
from cantelop_kernels.schema import Info, Logs, PoolView, SessionRequest, SessionView, Usage

CALL_DEADLINE = 30.0
LAUNCH_DEADLINE = 180.0
"""Seconds; above the daemon's own boot deadline, so that its error is the one that is seen."""


_PASSED_ON = re.compile(r"PATH|HOME|TZ|LANG|LC_\w+|TMPDIR|CANTELOP_\w+|\w+_proxy", re.IGNORECASE)


class _UnixResolver(Resolver):
    """Sends every connection of tornado's HTTP client to one Unix socket."""

    @classmethod
    def configurable_base(cls) -> type[Resolver]:
        return _UnixResolver

    @classmethod
    def configurable_default(cls) -> type[Resolver]:
        return _UnixResolver

    def initialize(self, path: Path) -> None:
        self._path = path

    async def resolve(
        self, host: str, port: int, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[tuple[int, Any]]:
        return [(socket.AF_UNIX, str(self._path))]


class Client:
    """One daemon, named by its socket. Holds no connection; safe to share between tasks."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or config.socket_path()

    def __repr__(self) -> str:
        return f"<Client {self.path}>"

    async def info(self) -> Info:
        """Who answers there. Raises DaemonUnavailable or PermissionRefused."""
        return Info.from_json(await self._call("GET", "/v1/info"))

    async def create(self, request: SessionRequest) -> SessionView:
        """Start a session; returns once its kernel listens. If this is cancelled it is undone, also
        where the answer was on its way already."""
        request_id = secrets.token_hex(8)
        body = replace(request, request_id=request_id).to_json()
        try:
            answer = await self._call("POST", "/v1/sessions", body, LAUNCH_DEADLINE)
        except (asyncio.CancelledError, errors.OutcomeUnknown, errors.DeadlineExceeded):
            await self._take_back(request_id)
            raise
        return SessionView.from_json(answer)

    async def _take_back(self, request_id: str) -> None:
        with suppress(errors.CantelopError):  # a daemon that is gone has nothing to undo
            await self._call("DELETE", f"/v1/requests/{request_id}")

    async def sessions(self) -> list[SessionView]:
        """The caller's own sessions (root: everybody's), ended ones for a while included."""
        body = await self._call("GET", "/v1/sessions")
        return [SessionView.from_json(item) for item in body["sessions"]]

    async def get(self, session_id: str) -> SessionView:
        """Raises NotFound for an id that is unknown, forgotten or someone else's."""
        return SessionView.from_json(await self._call("GET", f"/v1/sessions/{session_id}"))

    async def wait(self, session_id: str, seconds: float) -> SessionView:
        """As `get`, but answers when the kernel has ended, or after `seconds` at the latest."""
        path = f"/v1/sessions/{session_id}/wait?seconds={seconds}"
        return SessionView.from_json(
            await self._call("GET", path, deadline=seconds + CALL_DEADLINE)
        )

    async def signal(self, session_id: str, signum: int) -> None:
        """Send a signal to the kernel's process group; does nothing when it has ended."""
        await self._call("POST", f"/v1/sessions/{session_id}/signal", {"signum": signum})

    async def end(self, session_id: str) -> None:
        """Destroy the sandbox; returns once nothing of it is left. Idempotent."""
        await self._call("DELETE", f"/v1/sessions/{session_id}")

    async def logs(self, session_id: str) -> Logs:
        return Logs.from_json(await self._call("GET", f"/v1/sessions/{session_id}/logs"))

    async def attach(self, session_id: str) -> SessionView:
        """Make this process the session's client, in place of one that has ended."""
        return SessionView.from_json(
            await self._call("POST", f"/v1/sessions/{session_id}/attach", {})
        )

    async def stats(self) -> list[Usage]:
        """Of the caller's running sessions (root: everybody's)."""
        body = await self._call("GET", "/v1/stats")
        return [Usage.from_json(item) for item in body["stats"]]

    async def usage(self, session_id: str) -> Usage:
        """Of one running session."""
        return Usage.from_json(await self._call("GET", f"/v1/sessions/{session_id}/stats"))

    async def pool(self) -> list[PoolView]:
        """The warm sandboxes, by image and size."""
        return (await self.info()).pool

    async def release(self, token: str) -> None:
        """Give endpoints back; a session still behind them is ended. Idempotent."""
        await self._call("DELETE", f"/v1/endpoints/{token}")

    async def _call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        deadline: float = CALL_DEADLINE,
    ) -> Any:
        request = HTTPRequest(
            f"http://cantelop{path}",
            method=method,
            headers=HTTPHeaders({"Content-Type": "application/json"}),
            body=None if body is None else json.dumps(body),
            connect_timeout=10.0,
            request_timeout=deadline,
            follow_redirects=False,
        )
        response = await self._fetch(request)
        return _decode(response)

    async def _fetch(self, request: HTTPRequest) -> HTTPResponse:
        async with _http(self.path) as http:
            try:
                return await http.fetch(request, raise_error=False)
            except (FileNotFoundError, ConnectionRefusedError) as error:
                raise errors.DaemonUnavailable(
                    f"no cantelop daemon answers on {self.path}",
                    hint="start one with: sudo cantelop serve",
                    stopped=isinstance(error, FileNotFoundError),
                ) from error
            except PermissionError as error:
                raise errors.PermissionRefused(
                    f"no permission to use {self.path}",
                    hint="ask the operator to add you to `users` in the configuration",
                ) from error
            except HTTPTimeoutError as error:
                raise errors.DeadlineExceeded(
                    f"the daemon did not answer {request.method} {request.url[15:]} in time",
                    hint="look at `cantelop ps` and the daemon's log",
                ) from error
            except (HTTPStreamClosedError, StreamClosedError, OSError, HTTPClientError) as error:
                raise errors.OutcomeUnknown(
                    f"the connection to the daemon broke: {error}",
                    hint="look at `cantelop ps` before trying again",
                ) from error


class _Connector(TCPClient):
    """Remembers what it opened: tornado's client leaves a cancelled request's connection open.

    The daemon undoes a launch when its connection closes, so closed it must be (tornado 6.6).
    """

    def __init__(self, resolver: Resolver) -> None:
        super().__init__(resolver)
        self._streams: list[IOStream] = []
        self._closed = False

    async def connect(self, *args: Any, **kwargs: Any) -> IOStream:
        stream = await super().connect(*args, **kwargs)
        if self._closed:  # cancelled while it connected: nothing may be asked any more
            stream.close()
        self._streams.append(stream)
        return stream

    def close(self) -> None:
        self._closed = True
        for stream in self._streams:
            stream.close()
        super().close()


@asynccontextmanager
async def _http(path: Path) -> AsyncIterator[SimpleAsyncHTTPClient]:
    resolver = _UnixResolver(path=path)
    http = SimpleAsyncHTTPClient(force_instance=True, resolver=resolver)
    http.tcp_client = _Connector(resolver)
    try:
        yield http
    finally:
        http.close()
        resolver.close()


def _decode(response: HTTPResponse) -> Any:
    try:
        body = json.loads(response.body or b"{}")
    except ValueError as error:
        raise errors.OutcomeUnknown(
            "the daemon's answer is not JSON", hint="is another program on that socket?"
        ) from error
    if response.code >= 400:
        raise errors.from_json(body.get("error", {}) if isinstance(body, dict) else {})
    return body


async def ensure_daemon(path: Path | None = None, *, allow_emulation: bool = False) -> Client:
    """A client whose daemon answers; root starts one (which ends when idle) where there is none.

    Called before the first request of a launch. Several callers at once are fine: the daemon's
    socket lock lets one win, and the others find it. Raises DaemonUnavailable otherwise.
    """
    client = Client(path)
    if await _answers(client):
        return client
    with await asyncio.to_thread(_start_lock, client.path):
        if not await _answers(client):
            await _autostart(client.path, allow_emulation)
    return client


async def _answers(client: Client) -> bool:
    """Whether a daemon is there; raises where there is none and this user cannot start one."""
    try:
        await client.info()
    except errors.DaemonUnavailable:
        if os.geteuid() != 0:
            raise
        return False
    return True


def _start_lock(path: Path) -> IO[str]:
    """An open, locked file: of several clients that find no daemon, one starts it."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    lock = os.fdopen(os.open(path.with_suffix(".start"), flags, 0o600), "w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


async def _autostart(path: Path, allow_emulation: bool) -> None:
    """Start a daemon in a session of its own and wait until it says that it serves."""
    argv = [
        "env",
        "--chdir=/",
        "setsid",
        "--fork",
        sys.executable,
        "-P",
        "-m",
        "cantelop_kernels",
        "serve",
    ]
    argv += ["--socket", str(path.absolute()), "--exit-when-idle", "60"]
    argv += ["--allow-emulation"] if allow_emulation else []
    read = _spawn_detached(argv)
    try:
        await until_ready(read, path)
    finally:
        os.close(read)


async def until_ready(fd: int, path: Path) -> None:
    """Wait until a daemon that is being started says on its `--ready-fd` that it serves.

    `fd` is the pipe's other end, and stays the caller's; the daemon must be the only one that
    holds the end it writes to. Raises what the daemon says instead, or DaemonUnavailable.
    """
    said = await _read_all(fd, CALL_DEADLINE)
    if said != b"ready\n":
        _raise_start_failure(path, said)


def _daemon_env() -> dict[str, str]:
    """What a daemon gets of root's environment: it must not depend on where root happened to be,
    nor hold what root's session has secrets in."""
    kept = {name: value for name, value in os.environ.items() if _PASSED_ON.fullmatch(name)}
    for name in ("CANTELOP_CONFIG", "CANTELOP_STATE", "CANTELOP_SOCKET"):
        if kept.get(name):
            kept[name] = str(Path(kept[name]).absolute())
    return kept


def _spawn_detached(argv: list[str]) -> int:
    """Start it as nobody's child; returns the end of a pipe that is its `--ready-fd`.

    setsid --fork comes back at once and leaves no zombie to this process.
    """
    read, write = os.pipe()
    try:
        os.set_inheritable(write, True)
        pid = os.posix_spawnp(
            argv[0],
            [*argv, "--ready-fd", str(write)],
            _daemon_env(),
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            ],
        )
        os.waitpid(pid, 0)
    finally:
        os.close(write)
    return read


def _raise_start_failure(path: Path, said: bytes) -> None:
    try:
        raise errors.from_json(json.loads(said))
    except ValueError:
        raise errors.DaemonUnavailable(
            f"the daemon that was started for {path} did not come up",
            hint="see why with: cantelop serve",
        ) from None


async def _read_all(fd: int, deadline: float) -> bytes:
    """All that comes until the writer closes. Nothing, if that takes too long."""
    loop = asyncio.get_running_loop()
    os.set_blocking(fd, False)
    data, closed = bytearray(), asyncio.Event()

    def readable() -> None:
        chunk = os.read(fd, 65536)
        data.extend(chunk)
        if not chunk:
            closed.set()

    loop.add_reader(fd, readable)
    try:
        async with asyncio.timeout(deadline):
            await closed.wait()
    except TimeoutError:
        return b""
    finally:
        loop.remove_reader(fd)
    return bytes(data)
