"""The daemon's HTTP/JSON interface on its Unix socket.

Layer 6. The caller is who the kernel says it is (SO_PEERCRED), never who a request claims to be.
Bodies are small, parsed by `schema` (unknown fields are refused), and every error is one JSON
object of the form of `errors.CantelopError.to_json`. The counterpart is `client`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from tornado.httpserver import HTTPServer
from tornado.iostream import IOStream
from tornado.web import Application, HTTPError, RequestHandler

from cantelop_kernels.errors import BadRequest, CantelopError, NotFound, PermissionRefused
from cantelop_kernels.peers import Peer
from cantelop_kernels.schema import Info, SessionRequest
from cantelop_kernels.sessions import Sessions

MAX_BODY = 256 * 1024
MAX_HEADER = 16 * 1024
MAX_WAIT = 300.0
_IDLE_SECONDS = 30.0
BODY_SECONDS = 10.0
_PAUSE = 1.0
MAX_CONNECTIONS = 512
"""Of one user at a time: each kernel that is waited for holds one."""
MAX_CONNECTIONS_REFUSED = 8
MAX_CONNECTIONS_ALL = 4096
"""Of all users together; root, who has to look after them, is not kept out by it."""
_UCRED = struct.Struct("3i")

log = logging.getLogger(__name__)


def peer_of(sock: socket.socket) -> Peer:
    """Who is at the other end of a connected Unix socket."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, gid = _UCRED.unpack(raw)
    return Peer(uid=uid, gid=gid, pid=pid)


class _ClientGone(Exception):
    """Nobody waits for the answer any more; what was asked for has been undone."""


class _Handler(RequestHandler):
    sessions: Sessions
    peer: Peer
    _work: asyncio.Task[Any] | None = None

    def initialize(self, sessions: Sessions) -> None:
        self.sessions = sessions

    def prepare(self) -> None:
        connection: Any = self.request.connection
        self.peer = peer_of(connection.stream.socket)
        self.sessions.admit(self.peer)

    async def while_connected(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Do it, unless the client goes away meanwhile; then there is nobody to answer."""
        self._work = asyncio.ensure_future(work)
        try:
            return await self._work
        except asyncio.CancelledError:
            raise _ClientGone from None

    def on_connection_close(self) -> None:
        if self._work is not None:
            self._work.cancel()

    def body(self) -> Any:
        try:
            return json.loads(self.request.body)
        except (ValueError, RecursionError) as error:
            raise BadRequest("the body is not JSON") from error

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        error = kwargs["exc_info"][1]
        if isinstance(error, HTTPError):
            error = NotFound("no such thing") if status_code == 404 else BadRequest(str(error))
        elif not isinstance(error, CantelopError):
            error = CantelopError("the daemon failed inside", hint="its log says where")
        self.finish({"error": error.to_json()})

    def _handle_request_exception(self, e: BaseException) -> None:
        if isinstance(e, _ClientGone):
            return
        if isinstance(e, CantelopError):
            self.set_status(e.http_status)
            self.write_error(e.http_status, exc_info=(type(e), e, None))
        else:
            super()._handle_request_exception(e)

    def log_exception(self, typ: Any, value: Any, tb: Any) -> None:
        if not isinstance(value, HTTPError):
            log.error("%s %s failed", self.request.method, self.request.path, exc_info=value)


class _Info(_Handler):
    def initialize(self, sessions: Sessions, info: Callable[[], Info]) -> None:  # type: ignore[override]
        self.sessions = sessions
        self._info = info

    def get(self) -> None:
        self.finish(self._info().to_json())


class _Sessions(_Handler):
    def get(self) -> None:
        self.finish({"sessions": [one.view().to_json() for one in self.sessions.ls(self.peer)]})

    async def post(self) -> None:
        request = SessionRequest.from_json(self.body())
        session = await self.while_connected(self.sessions.create(request, self.peer))
        self.set_status(201)
        await self.finish(session.view().to_json())


class _Session(_Handler):
    def get(self, session_id: str) -> None:
        self.finish(self.sessions.get(session_id, self.peer).view().to_json())

    async def delete(self, session_id: str) -> None:
        await self.sessions.end(session_id, self.peer)
        await self.finish({})


class _Wait(_Handler):
    async def get(self, session_id: str) -> None:
        session = self.sessions.get(session_id, self.peer)
        await self.while_connected(_within(self._seconds(), session.ended.wait()))
        await self.finish(session.view().to_json())

    def _seconds(self) -> float:
        try:
            seconds = float(self.get_query_argument("seconds"))
        except ValueError:
            raise BadRequest("seconds must be a number") from None
        if math.isnan(seconds):  # a timer that is due at no time would hold up all others
            raise BadRequest("seconds must be a number")
        return min(max(seconds, 0.0), MAX_WAIT)


class _Signal(_Handler):
    async def post(self, session_id: str) -> None:
        body = self.body()
        if not isinstance(body, dict) or body.keys() != {"signum"}:
            raise BadRequest("the body must be an object with signum, and no more")
        if type(body["signum"]) is not int or not 1 <= body["signum"] <= 64:
            raise BadRequest("signum must be a whole number from 1 to 64")
        session = self.sessions.get(session_id, self.peer)
        await self.while_connected(session.signal(body["signum"]))
        await self.finish({})


class _Logs(_Handler):
    async def get(self, session_id: str) -> None:
        logs = await self.while_connected(self.sessions.get(session_id, self.peer).logs())
        await self.finish(logs.to_json())


class _Endpoints(_Handler):
    async def delete(self, token: str) -> None:
        await self.sessions.release(token, self.peer)
        await self.finish({})


class _Attach(_Handler):
    async def post(self, session_id: str) -> None:
        session = await self.sessions.attach(session_id, self.peer)
        await self.finish(session.view().to_json())


class _Stats(_Handler):
    """Of one session, or of all that run and are the caller's."""

    async def get(self, session_id: str = "") -> None:
        if session_id:
            session = self.sessions.get(session_id, self.peer)
            usage = await self.while_connected(self.sessions.usage(session))
            await self.finish(usage.to_json())
            return
        all_of_them = await self.while_connected(self.sessions.usages(self.peer))
        await self.finish({"stats": [one.to_json() for one in all_of_them]})


class _Metrics(_Handler):
    def initialize(self, sessions: Sessions, text: Callable[[], bytes]) -> None:  # type: ignore[override]
        self.sessions = sessions
        self._text = text

    def get(self) -> None:
        if self.peer.uid != 0:
            raise PermissionRefused("only root may read the metrics", hint="scrape as root")
        self.set_header("Content-Type", CONTENT_TYPE_LATEST)
        self.finish(self._text())


class _Request(_Handler):
    async def delete(self, request_id: str) -> None:
        await self.sessions.take_back(request_id, self.peer)
        await self.finish({})


class _Missing(_Handler):
    def prepare(self) -> None:
        super().prepare()
        raise NotFound(f"no such resource: {self.request.path[:100]}")


async def _within(seconds: float, work: Awaitable[Any]) -> None:
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        return


def application(
    sessions: Sessions, info: Callable[[], Info], metrics: Callable[[], bytes]
) -> Application:
    """Every resource in one table."""
    given = {"sessions": sessions}
    one = r"/v1/sessions/([A-Za-z0-9-]{1,64})"
    return Application(
        [
            (r"/v1/info", _Info, given | {"info": info}),
            (r"/metrics", _Metrics, given | {"text": metrics}),
            (r"/v1/stats", _Stats, given),
            (r"/v1/sessions", _Sessions, given),
            (one, _Session, given),
            (one + "/wait", _Wait, given),
            (one + "/signal", _Signal, given),
            (one + "/logs", _Logs, given),
            (one + "/stats", _Stats, given),
            (one + "/attach", _Attach, given),
            (r"/v1/requests/([0-9a-f]{1,64})", _Request, given),
            (r"/v1/endpoints/([0-9a-f]{1,64})", _Endpoints, given),
            (r".*", _Missing, given),
        ],
        log_function=_log_request,
    )


def _log_request(handler: RequestHandler) -> None:
    request = handler.request
    log.debug("%s %s %d", request.method, request.path, handler.get_status())


class Server(HTTPServer):
    """HTTP on one listening Unix socket, with a bound on what one user may hold open.

    `admit` raises for a uid that the daemon does not serve; such a one still gets its answer, but
    few connections at a time.
    """

    def initialize(self, app: Application, admit: Callable[[Peer], None]) -> None:  # type: ignore[override]
        super().initialize(
            app,
            max_body_size=MAX_BODY,
            max_header_size=MAX_HEADER,
            max_buffer_size=MAX_BODY + MAX_HEADER,
            idle_connection_timeout=_IDLE_SECONDS,
            body_timeout=BODY_SECONDS,
        )
        self._admit = admit
        self._open: Counter[int] = Counter()
        self._uids: dict[Any, int] = {}
        self._listener: socket.socket | None = None

    def listen_on(self, listener: socket.socket) -> None:
        """Accept from now on; the listener stays the caller's."""
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def stop(self) -> None:
        """Accept no more. Idempotent."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener = None

    def on_close(self, server_conn: object) -> None:
        super().on_close(server_conn)
        uid = self._uids.pop(getattr(server_conn, "stream", None), None)
        if uid is not None:
            self._open[uid] -= 1

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # no descriptor is left: let those that are open end first
            log.error("cannot accept connections for a second: %s", error)
            loop = asyncio.get_running_loop()
            loop.remove_reader(listener)
            loop.call_later(_PAUSE, self._resume)
            return
        peer = peer_of(connection)
        crowded = peer.uid != 0 and self._open.total() >= MAX_CONNECTIONS_ALL
        if crowded or self._open[peer.uid] >= self._limit(peer):
            connection.close()
            return
        connection.setblocking(False)
        stream = IOStream(connection, max_buffer_size=MAX_BODY + MAX_HEADER)
        self._open[peer.uid] += 1
        self._uids[stream] = peer.uid
        self.handle_stream(stream, ())

    def _resume(self) -> None:
        if self._listener is not None:
            self.listen_on(self._listener)

    def _limit(self, peer: Peer) -> int:
        try:
            self._admit(peer)
        except PermissionRefused:
            return MAX_CONNECTIONS_REFUSED
        return MAX_CONNECTIONS


def server(app: Application, listener: socket.socket, sessions: Sessions) -> Server:
    """Serve `app` on a listening Unix socket, with tornado's limits set."""
    made = Server(app, sessions.admit)
    made.listen_on(listener)
    return made
