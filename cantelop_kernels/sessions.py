"""All sessions of one daemon: who may have one, who owns it, and what ends it.

Layer 5. Every endpoint reservation is tied to the process of the client that asked, by its pidfd:
when that process ends, however it ends, the session behind the reservation is ended and the
endpoints go, unless another process of the same user takes the session over in time.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from cantelop_kernels.admission import Need
from cantelop_kernels.config import App, Config
from cantelop_kernels.endpoints import EndpointFolders
from cantelop_kernels.errors import (
    BadRequest,
    CantelopError,
    EmulationRefused,
    Exhausted,
    LaunchError,
    NotFound,
    PermissionRefused,
)
from cantelop_kernels.peers import Peer, listed, user_name
from cantelop_kernels.plans import Plans
from cantelop_kernels.pool import Pool
from cantelop_kernels.process import Identity, finish, wait_pidfd
from cantelop_kernels.record import SessionRecord
from cantelop_kernels.sandbox import Plan, adopt
from cantelop_kernels.schema import Endpoints, SessionRequest, Usage
from cantelop_kernels.session import Means, Names, Owner, Session, new_id
from cantelop_kernels.slot import Slot, SlotTable
from cantelop_kernels.usage import Meter

MAX_RESERVATIONS = 1024
"""Endpoints of one user at a time, with a session behind them or kept for a restart."""

REMEMBERED = 256
"""Ended sessions whose exit can still be asked for."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Reservation:
    endpoints: Endpoints
    owner: Owner
    session: Session | None = None
    request_id: str = ""
    """Of the request that asked for the session."""
    kept: bool = False
    """Whether the endpoints were held before that request."""
    released: bool = False
    watch: asyncio.Task[None] | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Sessions:
    """Owned by the daemon; called by `api`, always with the peer of the connection."""

    def __init__(
        self,
        config: Config,
        plans: Plans,
        slots: SlotTable,
        means: Means,
        folders: EndpointFolders,
    ) -> None:
        self._config = config
        self._plans = plans
        self._slots = slots
        self._means = means
        self._folders = folders
        self._sessions: dict[str, Session] = {}
        self._reservations: dict[str, _Reservation] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False
        self._creating = 0
        self._busy_at = time.monotonic()
        self._meter = Meter()

    def __repr__(self) -> str:
        return f"<Sessions {self.live} live>"

    @property
    def live(self) -> int:
        return sum(not session.ended.is_set() for session in self._sessions.values())

    def idle_for(self) -> float:
        """Seconds since the last request or session ended; 0 while there is one."""
        if self.live or self._reservations or self._creating:
            self._busy_at = time.monotonic()
        return time.monotonic() - self._busy_at

    @property
    def pool(self) -> Pool:
        return self._means.pool

    @property
    def taken(self) -> int:
        """Places on the host that are given to sandboxes, warm ones too."""
        return self._means.admission.granted

    @property
    def waiting(self) -> int:
        """Claims that wait for room on the host."""
        return self._means.admission.waiting

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def admit(self, peer: Peer) -> None:
        """Raises PermissionRefused for a user that the operator does not serve."""
        if peer.uid != 0 and not listed(peer, self._config.users):
            raise PermissionRefused(
                f"user {user_name(peer.uid)} may not use this daemon",
                hint="ask the operator to add you to `users` in the configuration",
            )

    async def create(self, request: SessionRequest, peer: Peer) -> Session:
        """A session whose kernel listens. When this fails or is cancelled nothing is left of it.

        Raises LaunchError, ImageError, NotFound, BadRequest, PermissionRefused, EmulationRefused.
        """
        self._creating += 1
        try:
            return await self._create(request, peer)
        finally:
            self._creating -= 1
            self._busy_at = time.monotonic()

    async def _create(self, request: SessionRequest, peer: Peer) -> Session:
        self._check_emulation(request, peer)
        app = self._app(request, peer)
        plan = await asyncio.to_thread(self._plans.of, app, request)
        reservation = self._reserve(request, peer)
        async with reservation.lock:
            try:
                return await self._start(request, plan, reservation)
            except BaseException:
                if request.endpoints is None:
                    await finish(self._release(reservation))
                raise

    def get(self, session_id: str, peer: Peer) -> Session:
        """Raises NotFound for an unknown session and for someone else's, in the same words."""
        session = self._sessions.get(session_id)
        if session is None or peer.uid not in (0, session.user):
            raise NotFound(f"no session {session_id!r}", hint="cantelop ps lists yours")
        return session

    def ls(self, peer: Peer) -> list[Session]:
        return [one for one in self._sessions.values() if peer.uid in (0, one.user)]

    async def usage(self, session: Session) -> Usage:
        """Raises NotFound where it does not run."""
        return await self._meter.read(session)

    async def usages(self, peer: Peer) -> list[Usage]:
        """Of all that run and are the caller's (root: everybody's)."""
        running = [one for one in self.ls(peer) if one.is_running]
        self._meter.forget({one.id for one in self._sessions.values() if one.is_running})
        read = await asyncio.gather(*map(self.usage, running), return_exceptions=True)
        return [one for one in read if isinstance(one, Usage)]

    async def end(self, session_id: str, peer: Peer) -> None:
        """Returns once nothing of its sandbox is left; raises the reason where that failed.
        Idempotent."""
        session = self.get(session_id, peer)
        session.stop("ended by its owner" if peer.uid == session.user else "ended by the operator")
        await session.ended.wait()
        if session.leftover is not None:
            raise session.leftover

    async def release(self, token: str, peer: Peer) -> None:
        """Give endpoints back, ending the session behind them. Idempotent."""
        reservation = self._reservations.get(token)
        if reservation is not None and peer.uid in (0, reservation.owner.uid):
            await self._release(reservation)

    async def take_back(self, request_id: str, peer: Peer) -> None:
        """End what a request has started whose client did not wait for the answer. Idempotent."""
        for reservation in list(self._reservations.values()):
            ours = reservation.request_id == request_id and peer.uid == reservation.owner.uid
            if ours and reservation.session is not None:
                reservation.session.stop("its client went away")
                if not reservation.kept:
                    await self._release(reservation)

    async def attach(self, session_id: str, peer: Peer) -> Session:
        """The caller's process is the session's client from now on. Raises NotFound, and
        SandboxGone where it has ended."""
        session = self.get(session_id, peer)
        reservation = self._reservations.get(session.endpoints.token)
        if session.ended.is_set() or reservation is None or reservation.released:
            raise NotFound(f"session {session_id} has ended", hint="start a new kernel")
        reservation.owner = replace(reservation.owner, client=_identity(peer))
        self._watch(reservation)
        await session.renew(reservation.owner)
        return session

    async def adopt(self, known: SessionRecord) -> None:
        """Go on with a session that an earlier daemon has left alive. Raises SandboxGone."""
        plan = self._plans.known(known)
        slot = Slot(known.slot, self._config.uid_base)
        ticket = self._means.admission.force(Need(known.memory_mib, known.vcpus))
        gone = partial(self._means.admission.give, ticket)
        sandbox = await adopt(plan, self._slots, slot, known, gone)
        client = Identity(known.client_pid, known.client_start)
        owner = Owner(known.user, known.group, client, known.grace)
        names = Names(known.id, known.app, known.request_id)
        session = Session(names, plan, owner, self._means, known.endpoints)
        reservation = _Reservation(known.endpoints, owner, session, known.request_id)
        self._reservations[known.endpoints.token] = reservation
        self._remember(session)
        self._task(session.go_on(sandbox, known))
        self._watch(reservation)

    async def drain(self, reason: str, seconds: float = 0.0) -> None:
        """Start nothing more, give what runs so many seconds to end by itself, then end it."""
        self._draining = True
        ended = [one.ended.wait() for one in self._sessions.values() if not one.ended.is_set()]
        if ended and seconds:
            log.info("waiting up to %g s for %d sessions", seconds, len(ended))
            await asyncio.wait([asyncio.ensure_future(one) for one in ended], timeout=seconds)
        else:
            for one in ended:
                one.close()
        for session in self._sessions.values():
            session.stop(reason)
        for session in list(self._sessions.values()):
            await session.ended.wait()
        for reservation in list(self._reservations.values()):
            try:
                await self._release(reservation)
            except CantelopError as error:
                log.warning("%s", error)

    async def leave(self) -> None:
        """Start nothing more, and give up what does not run yet; the rest is another daemon's."""
        self._draining = True
        starting = [one for one in self._sessions.values() if not one.is_running]
        for session in starting:
            session.stop("the daemon was stopped")
        for session in starting:
            await session.ended.wait()
        log.info("leaving %d sessions to the next daemon", self.live)

    def _app(self, request: SessionRequest, peer: Peer) -> App:
        """The App, where this user may have it."""
        app = self._config.app(request.app)
        if peer.uid != 0 and not listed(peer, app.users):
            raise PermissionRefused(
                f"user {user_name(peer.uid)} may not use the App {request.app!r}",
                hint="ask the operator to add you to its `users`",
            )
        return app

    def _check_emulation(self, request: SessionRequest, peer: Peer) -> None:
        operator = peer.uid == 0 and request.allow_emulation
        if self._means.emulated and not (self._config.allow_emulation or operator):
            raise EmulationRefused(
                "this machine has no hardware virtualization, and emulation is not allowed here",
                hint="use a host with KVM; for trusted code only: cantelop serve --allow-emulation",
            )

    def _reserve(self, request: SessionRequest, peer: Peer) -> _Reservation:
        if self._draining:
            raise _stopping()
        most = self._config.grace_seconds
        grace = most if request.grace_seconds is None else min(max(0, request.grace_seconds), most)
        owner = Owner(peer.uid, peer.gid, _identity(peer), grace)
        if request.endpoints is None:
            held = sum(one.owner.uid == peer.uid for one in self._reservations.values())
            if held >= MAX_RESERVATIONS:
                raise Exhausted(
                    f"{held} sessions or endpoints are held by this user",
                    hint="shut kernels down that are not needed, or end their Jupyter server",
                )
            reservation = _Reservation(self._folders.reserve(), owner)
        else:
            found = self._reservations.get(request.endpoints)
            if found is None or found.owner.uid != peer.uid:
                raise NotFound("no such endpoints", hint="start the kernel anew, without a token")
            reservation = found
            reservation.owner = owner
        reservation.request_id = request.request_id
        reservation.kept = request.endpoints is not None
        self._watch(reservation)
        self._reservations[reservation.endpoints.token] = reservation
        return reservation

    def _watch(self, reservation: _Reservation) -> None:
        """Tie the reservation to its owner's process (in place of an earlier one)."""
        if reservation.watch is not None:
            reservation.watch.cancel()
        reservation.watch = self._task(self._release_when_ended(reservation))

    async def _release_when_ended(self, reservation: _Reservation) -> None:
        owner = reservation.owner
        with suppress(ProcessLookupError), owner.client.held() as pidfd:
            await wait_pidfd(pidfd)
        if owner.grace and reservation.session is not None:
            log.info("the client of %r ended; %g s of grace", reservation.session, owner.grace)
            await asyncio.sleep(owner.grace)
        reservation.watch = None
        if reservation.session is not None:
            reservation.session.stop("its client's process ended")
        await self._release(reservation)

    async def _release(self, reservation: _Reservation) -> None:
        reservation.released = True
        if reservation.watch is not None:
            reservation.watch.cancel()
        if reservation.session is not None:
            reservation.session.stop("its endpoints were released")
            await reservation.session.ended.wait()
        self._reservations.pop(reservation.endpoints.token, None)
        self._busy_at = time.monotonic()
        await self._folders.remove(reservation.endpoints)

    async def _start(
        self, request: SessionRequest, plan: Plan, reservation: _Reservation
    ) -> Session:
        if reservation.session is not None:
            reservation.session.stop("another session took its endpoints")
            await reservation.session.ended.wait()
        request, refused = _with_allowed_env(request, self._config.app(request.app))
        listeners = await self._listen(reservation)
        owner, endpoints = reservation.owner, reservation.endpoints
        names = Names(new_id(), request.app, request.request_id)
        session = Session(names, plan, owner, self._means, endpoints)
        session.notices += [
            f"not passed into the guest, since the App {request.app!r} does not name it: {name}"
            for name in refused
        ]
        reservation.session = session
        self._remember(session)
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task(session.live(request, listeners, started))
        try:
            await asyncio.shield(started)
        except asyncio.CancelledError:
            session.stop("its client went away")
            started.add_done_callback(lambda future: future.exception())
            raise
        finally:
            if not session.is_running:
                await session.ended.wait()
        return session

    async def _listen(self, reservation: _Reservation) -> list[socket.socket]:
        """The sockets, unless all was given up while this request waited for its turn."""
        endpoints, owner = reservation.endpoints, reservation.owner
        listeners = await self._folders.listen(endpoints, owner.uid, owner.gid)
        if not (reservation.released or self._draining):
            return listeners
        for listener in listeners:
            listener.close()
        await self._folders.remove(endpoints)
        if self._draining:
            raise _stopping()
        raise NotFound("the endpoints were released", hint="start the kernel anew")

    def _remember(self, session: Session) -> None:
        self._sessions[session.id] = session
        ended = [one for one in self._sessions.values() if one.ended.is_set()]
        for old in ended[: max(0, len(ended) - REMEMBERED)]:
            del self._sessions[old.id]

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_report)
        return task


def _identity(peer: Peer) -> Identity:
    """The process behind a connection. Raises BadRequest where it cannot be watched."""
    try:
        return Identity.of(peer.pid)
    except (ProcessLookupError, ValueError, OSError) as error:
        raise BadRequest(
            "the client's process is not to be seen from the daemon",
            hint="run both in one pid namespace",
        ) from error


def _stopping() -> LaunchError:
    return LaunchError("the daemon is stopping", hint="try again when it is back")


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a session's task failed: %r", error, exc_info=error)


def _with_allowed_env(request: SessionRequest, app: App) -> tuple[SessionRequest, list[str]]:
    """Only what the App names passes into the guest, and the kernel's session name.

    Also returns the names that do not pass.
    """
    allowed = {*app.env, "JPY_SESSION_NAME"}
    refused = sorted(request.env.keys() - allowed) if "*" not in app.env else []
    env = {name: value for name, value in request.env.items() if name not in refused}
    return replace(request, env=env), refused
