"""All sessions of one daemon: who may have one, who owns it, and what ends it.

Layer 5. Every endpoint reservation is tied to the process of the client that asked, by its pidfd:
when that process ends, however it ends, the session behind the reservation is ended and the
endpoints go.
"""

from __future__ import annotations

import asyncio
import grp
import logging
import os
import pwd
import socket
import time
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cantelop_kernels.config import App, Config
from cantelop_kernels.endpoints import EndpointFolders
from cantelop_kernels.errors import (
    BadRequest,
    EmulationRefused,
    LaunchError,
    NotFound,
    PermissionRefused,
)
from cantelop_kernels.image import ImageStore, VerifiedImages
from cantelop_kernels.process import wait_pidfd
from cantelop_kernels.sandbox import Plan
from cantelop_kernels.schema import Endpoints, SessionRequest
from cantelop_kernels.session import Session
from cantelop_kernels.slot import SlotTable
from cantelop_kernels.vmm import Vmm

REMEMBERED = 256
"""Ended sessions whose exit can still be asked for."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end of a connection, as the kernel says (unix(7), SO_PEERCRED)."""

    uid: int
    gid: int
    pid: int


@dataclass(slots=True)
class _Reservation:
    endpoints: Endpoints
    uid: int
    gid: int
    session: Session | None = None
    released: bool = False
    watch: asyncio.Task[None] | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Sessions:
    """Owned by the daemon; called by `api`, always with the peer of the connection."""

    def __init__(
        self, config: Config, state: Path, images: ImageStore, vmm: Vmm, folders: EndpointFolders
    ) -> None:
        self._config = config
        self._state = state
        self._images = images
        self._verified = VerifiedImages(images)
        self._vmm = vmm
        self._folders = folders
        self._slots = SlotTable(config.uid_base, config.max_sessions)
        self._sessions: dict[str, Session] = {}
        self._reservations: dict[str, _Reservation] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False
        self._busy_at = time.monotonic()

    def __repr__(self) -> str:
        return f"<Sessions {self.live} live, {self._slots!r}>"

    @property
    def live(self) -> int:
        return sum(not session.ended.is_set() for session in self._sessions.values())

    def idle_for(self) -> float:
        """Seconds since the last session ended, or since the start; 0 while one lives."""
        if self.live or self._reservations:
            self._busy_at = time.monotonic()
        return time.monotonic() - self._busy_at

    def admit(self, peer: Peer) -> None:
        """Raises PermissionRefused for a user that the operator does not serve."""
        if peer.uid != 0 and not _listed(peer, self._config.users):
            raise PermissionRefused(
                f"user {_name(peer.uid)} may not use this daemon",
                hint="ask the operator to add you to `users` in the configuration",
            )

    async def create(self, request: SessionRequest, peer: Peer) -> Session:
        """A session whose kernel listens. When this fails or is cancelled nothing is left of it.

        Raises LaunchError, ImageError, NotFound, BadRequest, PermissionRefused, EmulationRefused.
        """
        plan = await self._plan(request, peer)
        reservation = self._reserve(request, peer)
        async with reservation.lock:
            try:
                return await self._start(request, plan, reservation)
            except BaseException:
                if request.endpoints is None:
                    await self._release(reservation)
                raise

    def get(self, session_id: str, peer: Peer) -> Session:
        """Raises NotFound for an unknown session and for someone else's, in the same words."""
        session = self._sessions.get(session_id)
        if session is None or peer.uid not in (0, session.user):
            raise NotFound(f"no session {session_id!r}", hint="cantelop ps lists yours")
        return session

    def ls(self, peer: Peer) -> list[Session]:
        return [one for one in self._sessions.values() if peer.uid in (0, one.user)]

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
        if reservation is not None and peer.uid in (0, reservation.uid):
            await self._release(reservation)

    async def drain(self, reason: str) -> None:
        """End everything, and start nothing more."""
        self._draining = True
        for session in self._sessions.values():
            session.stop(reason)
        for session in list(self._sessions.values()):
            await session.ended.wait()
        for reservation in list(self._reservations.values()):
            await self._release(reservation)

    async def _plan(self, request: SessionRequest, peer: Peer) -> Plan:
        """Decide what the session gets, before anything is acquired."""
        app = self._config.app(request.app)
        if peer.uid != 0 and not _listed(peer, app.users):
            raise PermissionRefused(
                f"user {_name(peer.uid)} may not use the App {request.app!r}",
                hint="ask the operator to add you to its `users`",
            )
        self._check_emulation(request, peer)
        return Plan(
            image=await asyncio.to_thread(self._verified.resolve, request.image or app.image),
            images=self._images,
            vcpus=_within("vcpus", request.vcpus, app.vcpus, 1, app.max_vcpus),
            memory_mib=_within(
                "memory_mib", request.memory_mib, app.memory_mib, 192, app.max_memory_mib
            ),
            scratch_mib=app.scratch_mib,
            state=self._state,
            boot_deadline=self._config.boot_deadline,
        )

    def _check_emulation(self, request: SessionRequest, peer: Peer) -> None:
        operator = peer.uid == 0 and request.allow_emulation
        if self._vmm.emulated and not (self._config.allow_emulation or operator):
            raise EmulationRefused(
                "this machine has no hardware virtualization, and emulation is not allowed here",
                hint="use a host with KVM; for trusted code only: cantelop serve --allow-emulation",
            )

    def _reserve(self, request: SessionRequest, peer: Peer) -> _Reservation:
        if self._draining:
            raise _stopping()
        if request.endpoints is None:
            endpoints = self._folders.reserve()
            reservation = _Reservation(endpoints, peer.uid, peer.gid)
        else:
            found = self._reservations.get(request.endpoints)
            if found is None or found.uid != peer.uid:
                raise NotFound("no such endpoints", hint="start the kernel anew, without a token")
            reservation = found
        self._watch(reservation, peer)
        self._reservations[reservation.endpoints.token] = reservation
        return reservation

    def _watch(self, reservation: _Reservation, peer: Peer) -> None:
        """Tie the reservation to the process of `peer` (in place of an earlier one)."""
        try:
            pidfd = os.pidfd_open(peer.pid)
        except (ProcessLookupError, ValueError, OSError) as error:
            raise BadRequest(
                "the client's process is not to be seen from the daemon",
                hint="run both in one pid namespace",
            ) from error
        if reservation.watch is not None:
            reservation.watch.cancel()
        reservation.watch = self._task(self._release_when_ended(reservation, pidfd))

    async def _release_when_ended(self, reservation: _Reservation, pidfd: int) -> None:
        try:
            await wait_pidfd(pidfd)
        finally:
            os.close(pidfd)
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
        await self._folders.remove(reservation.endpoints)

    async def _start(
        self, request: SessionRequest, plan: Plan, reservation: _Reservation
    ) -> Session:
        if reservation.session is not None:
            reservation.session.stop("another session took its endpoints")
            await reservation.session.ended.wait()
        request, refused = _with_allowed_env(request, self._config.app(request.app))
        listeners = await self._listen(reservation)
        session = Session(request, reservation.uid, plan, self._vmm, reservation.endpoints)
        session.notices += [
            f"not passed into the guest, since the App {request.app!r} does not name it: {name}"
            for name in refused
        ]
        reservation.session = session
        self._remember(session)
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task(session.live(self._slots, listeners, started))
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
        endpoints = reservation.endpoints
        listeners = await self._folders.listen(endpoints, reservation.uid, reservation.gid)
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


def _stopping() -> LaunchError:
    return LaunchError("the daemon is stopping", hint="try again when it is back")


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a session's task failed: %r", error, exc_info=error)


def _within(name: str, asked: int | None, default: int, least: int, most: int) -> int:
    value = default if asked is None else asked
    if not least <= value <= max(most, default):
        raise BadRequest(
            f"{name} must be between {least} and {most}, not {value}",
            hint=f"the App's max_{name} sets the upper end",
        )
    return value


def _with_allowed_env(request: SessionRequest, app: App) -> tuple[SessionRequest, list[str]]:
    """Only what the App names passes into the guest, and the kernel's session name.

    Also returns the names that do not pass.
    """
    allowed = {*app.env, "JPY_SESSION_NAME"}
    refused = sorted(request.env.keys() - allowed) if "*" not in app.env else []
    env = {name: value for name, value in request.env.items() if name not in refused}
    return replace(request, env=env), refused


def _listed(peer: Peer, users: Iterable[str]) -> bool:
    names = {str(peer.uid), _name(peer.uid), "*", *(f"@{name}" for name in _groups(peer))}
    return not names.isdisjoint(users)


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _groups(peer: Peer) -> list[str]:
    """Names of the groups that the user database gives to this user."""
    names = []
    for gid in os.getgrouplist(_name(peer.uid), peer.gid):
        try:
            names.append(grp.getgrgid(gid).gr_name)
        except KeyError:
            continue
    return names
