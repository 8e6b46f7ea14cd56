"""A session: one kernel's stay in a sandbox, from the request to the destruction.

Layer 5. Each session is one task that holds its sandbox: whatever ends the session (its owner, its
kernel, its client's death, the daemon) makes that task destroy the sandbox. While it runs, a record
beside the sandbox lets another daemon go on with it, should this one die.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from cantelop_kernels import record
from cantelop_kernels.admission import Admission, Need
from cantelop_kernels.errors import CantelopError, DeadlineExceeded, LaunchError, SandboxGone
from cantelop_kernels.exits import describe
from cantelop_kernels.pool import Launcher, Observer, Pool
from cantelop_kernels.process import Identity
from cantelop_kernels.record import Running, SessionRecord
from cantelop_kernels.sandbox import Plan, Sandbox, explained
from cantelop_kernels.schema import Endpoints, Exit, Logs, SessionRequest, SessionView

_MIB = 1 << 20

_WARM_TRIES = 2
"""Warm sandboxes that one request may use up: what neither takes may be the request's fault."""

EMULATED = "running under emulation, without hardware virtualization: no security boundary"


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose a session is. `client` is the process whose end ends it, after `grace` seconds."""

    uid: int
    gid: int
    client: Identity
    grace: float


@dataclass(frozen=True, slots=True)
class Names:
    """What a session goes by: its own id, its App, and the request that asked for it."""

    id: str
    app: str
    request: str


@dataclass(frozen=True, slots=True)
class Means:
    """Where a session gets its sandbox from."""

    pool: Pool
    launcher: Launcher
    admission: Admission
    observer: Observer
    queue_seconds: float
    vmm: str
    emulated: bool


class Session:
    """Made by `Sessions`, new or from a record. `ended` is set once its sandbox is gone."""

    def __init__(
        self, names: Names, plan: Plan, owner: Owner, means: Means, endpoints: Endpoints
    ) -> None:
        self.id = names.id
        self.app = names.app
        self._request_id = names.request
        self.plan = plan
        self.owner = owner
        self.endpoints = endpoints
        self.ended = asyncio.Event()
        self.exit: Exit | None = None
        self.leftover: CantelopError | None = None
        """Set where the sandbox could not be taken away whole."""
        self.cell = ""
        """Message id of the cell that ran when it was last looked at; see `exits.cell_id`."""
        self.notices = [EMULATED] if means.emulated else []
        self.created = time.time()
        self._ended_at: float | None = None
        self.sandbox: Sandbox | None = None
        """While it is there."""
        self._means = means
        self._warm = False
        self._state = "starting"
        self._step = "queued"
        self._boot_seconds = 0.0
        self._stop: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._last_logs = Logs("", "", "")

    def __repr__(self) -> str:
        return f"<Session {self.id} {self._state} {self._step}>"

    @property
    def is_running(self) -> bool:
        return self._state == "running"

    @property
    def user(self) -> int:
        return self.owner.uid

    def view(self) -> SessionView:
        return SessionView(
            id=self.id,
            app=self.app,
            user=self.user,
            image=self.plan.image.name,
            digest=self.plan.image.digest,
            vcpus=self.plan.vcpus,
            memory_mib=self.plan.memory_mib,
            state=self._state,
            step=self._step,
            created=self.created,
            boot_seconds=round(self._boot_seconds, 3),
            warm=self._warm,
            endpoints=self.endpoints,
            vmm=self._means.vmm,
            emulated=self._means.emulated,
            notices=self.notices,
            exit=self.exit,
            ended=self._ended_at,
        )

    def stop(self, reason: str) -> None:
        """Have it ended; the first reason given stands. Await `ended` for the end. Idempotent."""
        if not self._stop.done():
            self._stop.set_result(reason)

    async def signal(self, signum: int) -> None:
        """To the kernel's process group; nothing happens once the kernel has ended."""
        if self.sandbox is not None and self._state == "running":
            with suppress(SandboxGone):
                await self.sandbox.link.request("signal", signum=signum)

    async def logs(self) -> Logs:
        """Of the running sandbox, or what was kept when it ended."""
        return await self.sandbox.logs() if self.sandbox is not None else self._last_logs

    async def renew(self, owner: Owner) -> None:
        """Another process of the same user is the client from now on."""
        self.owner = owner
        if self.sandbox is not None and self._state == "running":
            self._save()
            with owner.client.held() as lease:
                await self.sandbox.link.request("lease", [lease])

    async def live(
        self,
        request: SessionRequest,
        listeners: Sequence[socket.socket],
        started: asyncio.Future[None],
    ) -> None:
        """The whole life of a new session. `started` gets the result of the launch; owns
        `listeners`."""
        try:
            await self._until_stopped(self._start_and_run(request, listeners, started), started)
        finally:
            for listener in listeners:
                listener.close()
            self._over(started)

    async def go_on(self, sandbox: Sandbox, known: SessionRecord) -> None:
        """The rest of the life of a session that another daemon has started."""
        self.sandbox = sandbox
        self.created, self.notices = known.created, known.notices
        self._boot_seconds, self._warm = known.boot_seconds, known.warm
        started = asyncio.get_running_loop().create_future()
        try:
            await self._until_stopped(self._run(sandbox, started), started)
        finally:
            self._over(started)

    def _over(self, started: asyncio.Future[None]) -> None:
        self.sandbox = None
        self._state, self._step = "exited", ""
        self._ended_at = time.time()
        self.exit = self.exit or Exit(reason="the daemon gave it up")
        if not started.done():
            started.set_exception(SandboxGone(f"the session was ended: {self.exit.reason}"))
        self.ended.set()

    async def _until_stopped(self, life: Any, started: asyncio.Future[None]) -> None:
        living = asyncio.ensure_future(life)
        either: list[asyncio.Future[Any]] = [living, self._stop]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._stop.done():
            self.exit = self.exit or Exit(reason=self._stop.result(), cell=self.cell)
            living.cancel()
            await asyncio.wait([living])
        if not living.cancelled() and (error := living.exception()) is not None:
            self.exit = self.exit or Exit(reason=str(error))
            if not started.done():
                started.set_exception(error)
                return
            raise error

    async def _start_and_run(
        self,
        request: SessionRequest,
        listeners: Sequence[socket.socket],
        started: asyncio.Future[None],
    ) -> None:
        begun = time.monotonic()
        sandbox = await self._bound(request, listeners)
        self._boot_seconds = time.monotonic() - begun
        self._means.observer.claimed(self._warm, self._boot_seconds)
        await self._run(sandbox, started)

    async def _run(self, sandbox: Sandbox, started: asyncio.Future[None]) -> None:
        """From a kernel that listens to the destruction of its sandbox."""
        try:
            self._state, self._step = "running", ""
            self._save()
            if not started.done():
                started.set_result(None)
            try:
                self.exit = describe(await sandbox.ended(), self.plan.memory_mib * _MIB)
            except SandboxGone as gone:
                self.exit = Exit(reason=gone.message, cell=self.cell)
        finally:
            self._state, self._step = "ending", "destroying the sandbox"
            try:
                self._last_logs = await sandbox.logs()
            finally:
                await self._destroy(sandbox)

    async def _destroy(self, sandbox: Sandbox) -> None:
        try:
            await sandbox.destroy()
        finally:
            self.leftover = sandbox.leftover

    async def _bound(self, request: SessionRequest, listeners: Sequence[socket.socket]) -> Sandbox:
        """A sandbox that is this session's: a warm one, else one of its own. A warm one that does
        not answer costs a moment and is no error."""
        self._warm = True
        for _ in range(_WARM_TRIES):
            warm = self._means.pool.claim(self.plan)
            if warm is None:
                break
            if await self._bind(warm, request, listeners):
                return warm
        self._warm = False
        sandbox = await self._cold()
        await self._bind(sandbox, request, listeners)
        return sandbox

    async def _cold(self) -> Sandbox:
        self._at_step("waiting for room")
        means, need = self._means, Need(self.plan.memory_mib, self.plan.vcpus)
        ticket = await means.admission.take(need, means.queue_seconds, means.pool.make_room)
        sandbox = await means.launcher.boot(self.plan, ticket, self._at_step)
        means.pool.came_up(self.plan)
        return sandbox

    async def _bind(
        self, sandbox: Sandbox, request: SessionRequest, listeners: Sequence[socket.socket]
    ) -> bool:
        """Give the sandbox all that makes it this session's. After this there is only the end.

        False where a warm sandbox did not take it, and is destroyed: it may have died unseen. Where
        the kernel does not start, LaunchError says why.
        """
        self._at_step("kernel start")
        self.sandbox = sandbox
        try:
            await self._tell(sandbox, request, listeners)
        except BaseException as error:
            missed = self._warm and isinstance(error, SandboxGone | DeadlineExceeded)
            missed = missed and not sandbox.taken
            try:
                if isinstance(error, CantelopError) and not missed:
                    raise _with_kernel_log(error, self._step, await sandbox.logs()) from error
            finally:
                self.sandbox = None
                await sandbox.destroy()
            if missed:
                return False
            raise
        return True

    async def _tell(
        self, sandbox: Sandbox, request: SessionRequest, listeners: Sequence[socket.socket]
    ) -> None:
        try:
            with self.owner.client.held() as lease:
                await sandbox.bind(
                    listeners,
                    lease,
                    self.plan.boot_deadline,
                    hostname=self.id,
                    argv=request.argv,
                    extra=request.extra,
                    env=request.env,
                    cwd=request.cwd,
                    key=request.key,
                    signature_scheme=request.signature_scheme,
                    kernel_name=request.kernel_name,
                )
        except ProcessLookupError:
            raise LaunchError("its client's process ended") from None

    def _save(self) -> None:
        """A full disk costs the session nothing but its survival of this daemon."""
        assert self.sandbox is not None
        try:
            record.save(self.sandbox.place.folder, self._record(self.sandbox))
        except ProcessLookupError:
            return  # it is about to be seen that the sandbox has died
        except OSError as error:
            self.notices.append(f"this session would not survive its daemon: {error.strerror}")

    def _record(self, sandbox: Sandbox) -> SessionRecord:
        slot, plan, owner = sandbox.place.slot, self.plan, self.owner
        known = {name: Running.of(one.pid) for name, one in sandbox.processes.items()}
        return SessionRecord(
            version=record.VERSION,
            id=self.id,
            slot=slot.index,
            user=owner.uid,
            group=owner.gid,
            app=self.app,
            request_id=self._request_id,
            image=plan.image.name,
            digest=plan.image.digest,
            vcpus=plan.vcpus,
            memory_mib=plan.memory_mib,
            scratch_mib=plan.scratch_mib,
            created=self.created,
            boot_seconds=self._boot_seconds,
            warm=self._warm,
            notices=self.notices,
            endpoints=self.endpoints,
            grace=owner.grace,
            client_pid=owner.client.pid,
            client_start=owner.client.start,
            attendant=known.pop("attendant"),
            machine=known.pop("machine"),
            helpers=known,
            run_at=sandbox.place.run_at,
        )

    def _at_step(self, name: str) -> None:
        self._step = name


def new_id() -> str:
    return f"s-{secrets.token_hex(6)}"


def _with_kernel_log(error: CantelopError, step: str, logs: Logs) -> LaunchError:
    """A kernel that does not start says why on its own stderr, not on the console."""
    made = explained(error, step, logs)
    made.details["kernel"] = logs.kernel
    return made
