"""The daemon: puts the pieces together, serves, and takes them apart in order.

Layer 6, composition root. Runs as root; reads no byte that a guest wrote.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tornado.web import Application

from cantelop_kernels import (
    __version__,
    api,
    cgroup,
    host,
    jail,
    preflight,
    reaper,
    seccomp,
    systemd,
)
from cantelop_kernels.admission import Admission, Limits
from cantelop_kernels.cgroup import Hierarchy
from cantelop_kernels.config import Config
from cantelop_kernels.endpoints import EndpointFolders
from cantelop_kernels.errors import (
    ConfigError,
    EmulationRefused,
    PermissionRefused,
    SandboxGone,
)
from cantelop_kernels.image import ImageStore
from cantelop_kernels.lease import Leases
from cantelop_kernels.metrics import Metrics
from cantelop_kernels.plans import Plans
from cantelop_kernels.pool import Launcher, Pool
from cantelop_kernels.record import SessionRecord
from cantelop_kernels.schema import Info
from cantelop_kernels.session import EMULATED, Means
from cantelop_kernels.sessions import Sessions
from cantelop_kernels.slot import SlotTable
from cantelop_kernels.trust import changeable_by_others
from cantelop_kernels.vmm import Vmm
from cantelop_kernels.vmm.choice import default_vmm

log = logging.getLogger(__name__)

_LOCKS = Path("/run/cantelop-locks")

_OVERHEAD = 64
_OVERHEAD_EMULATED = 192
"""MiB of host memory per sandbox beyond the guest's own, as a rule: VMM, helper, attendant; the
translated code of an emulated guest comes on top."""

_MOST_OVERHEAD = 128
_MOST_OVERHEAD_EMULATED = 704
"""The same at the most, for the cgroup's cap: a buffer of 512 MiB for translated code can fill."""


@dataclass(frozen=True, slots=True)
class Options:
    """Of one run. `idle_seconds` None: serve until told to stop."""

    socket: Path
    state: Path
    idle_seconds: float | None = None


async def serve(
    config: Config,
    options: Options,
    ready: Callable[[], None],
    make_vmm: Callable[[Path], Awaitable[Vmm]] | None = None,
) -> None:
    """Serve until told to stop, or until idle.

    SIGTERM, SIGINT and SIGHUP let the sessions end within `drain_seconds` and then end them;
    SIGUSR1 leaves them to the next daemon, as does the death of this one. `ready` is called once
    the socket answers. Raises ConfigError and PermissionRefused with the reason where the daemon
    cannot start, or must not since a boundary would be hollow; nothing is left then. `make_vmm` is
    for tests: they put a fake in its place.
    """
    _check_root()
    refused = preflight.refusal(preflight.boundary(config, options.state))
    if refused is not None:
        raise refused
    _allow_many_files()
    chosen = make_vmm or partial(default_vmm, config)
    async with running(config, options, _real_or_allowed(config, options, chosen)) as sessions:
        ready()
        systemd.notify("READY=1")
        log.info("serving on %s", options.socket)
        told = await _until_told(sessions, options.idle_seconds)
        systemd.notify("STOPPING=1")
        if told == signal.SIGUSR1:
            raise _LeftToTheNext
        log.info("stopping")
        sessions.pool.suspend()
        await sessions.drain("the daemon was stopped", config.drain_seconds)


def _real_or_allowed(
    config: Config, options: Options, make_vmm: Callable[[Path], Awaitable[Vmm]]
) -> Callable[[Path], Awaitable[Vmm]]:
    """The same VMM, unless it emulates and nobody has allowed that (THREATS.md 5).

    A daemon that a command of root's has started for itself starts all the same: it may be there to
    end what another one left, and every session that is asked of it is decided on by itself.
    """

    async def make(state: Path) -> Vmm:
        vmm = await make_vmm(state)
        if vmm.emulated and not config.allow_emulation and options.idle_seconds is None:
            raise EmulationRefused(
                "this machine has no hardware virtualization, and emulation is not allowed here",
                hint="use a host with KVM; for trusted code only: cantelop serve --allow-emulation",
            )
        if vmm.emulated:
            log.warning("%s", EMULATED)
        return vmm

    return make


class _LeftToTheNext(BaseException):
    """Makes `running` end this process with its sessions still alive."""


@asynccontextmanager
async def running(
    config: Config, options: Options, make_vmm: Callable[[Path], Awaitable[Vmm]]
) -> AsyncIterator[Sessions]:
    """A daemon that serves while the context is open; leaving it ends every session."""
    prepare_folders(options)
    folders = EndpointFolders(options.socket.parent / f"{options.socket.stem}.ipc")
    with (
        _lock(options.socket.with_suffix(".lock"), f"another daemon serves {options.socket}"),
        _lock(_uid_lock(config), f"another daemon uses the uids from {config.uid_base}"),
        _listener(options.socket) as listener,
    ):
        cgroups = cgroup.hierarchy(config.cgroup_parent)
        seccomp.attendant()  # fails here, not at the first sandbox
        found = await reaper.reap(options.state, config.uid_base, cgroups)
        for what in found.removed:
            log.warning("left behind by an earlier daemon, removed: %s", what)
        await folders.prepare(keep=[one.endpoints.token for one in found.alive])
        made = _assemble(config, options.state, await make_vmm(options.state), folders, cgroups)
        for known in found.alive:
            await _adopt(made.sessions, known)
        try:
            async with made.serving(config, options, listener):
                yield made.sessions
        except _LeftToTheNext:
            await made.sessions.leave()
            os._exit(0)  # an orderly end of the loop would end the sessions' tasks
        finally:
            await made.sessions.drain("the daemon was stopped")
            await folders.close()
            cgroups.release()


@dataclass(frozen=True, slots=True)
class _Parts:
    sessions: Sessions
    pool: Pool
    leases: Leases
    metrics: Metrics
    admission: Admission

    vmm: Vmm

    @asynccontextmanager
    async def serving(
        self, config: Config, options: Options, listener: socket.socket
    ) -> AsyncIterator[None]:
        """Answer requests, refill the pool, look after leases; at the end the pool is empty."""
        tasks = [
            asyncio.ensure_future(self.pool.run()),
            asyncio.ensure_future(self.leases.run(self.sessions)),
        ]
        http = api.server(self._app(config, options), listener, self.sessions)
        try:
            yield
        finally:
            http.stop()
            await _end_tasks(tasks)
            await self.pool.close()
        await self.sessions.drain("the daemon was stopped")
        await http.close_all_connections()

    def _app(self, config: Config, options: Options) -> Application:
        def info() -> Info:
            return Info(
                version=__version__,
                pid=os.getpid(),
                state=str(options.state),
                vmm=self.vmm.name,
                emulated=self.vmm.emulated,
                allow_emulation=config.allow_emulation,
                sessions=self.sessions.live,
                apps=sorted(config.apps),
                pool=self.pool.views(),
                unresolved=self.pool.unresolved,
                waiting=self.admission.waiting,
            )

        return api.application(self.sessions, info, self.metrics.text)


def _assemble(
    config: Config, state: Path, vmm: Vmm, folders: EndpointFolders, cgroups: Hierarchy
) -> _Parts:
    slots = SlotTable(config.uid_base, config.max_sessions)
    metrics = Metrics()
    admission = Admission(_limits(config, vmm))
    launcher = Launcher(vmm, slots, admission, metrics)
    most = _MOST_OVERHEAD_EMULATED if vmm.emulated else _MOST_OVERHEAD
    plans = Plans(config, state, ImageStore(state), cgroups, most)
    pool = Pool(
        plans.wishes(),
        launcher,
        admission,
        total=config.warm_total,
        max_age=config.warm_max_age,
        warm_deadline=config.boot_deadline,
    )
    admission.on_freed = pool.on_freed
    means = Means(pool, launcher, admission, metrics, config.queue_seconds, vmm.name, vmm.emulated)
    sessions = Sessions(config, plans, slots, means, folders)
    metrics.watch(pool.views, lambda: sessions.live, lambda: admission.waiting)
    return _Parts(sessions, pool, Leases(config), metrics, admission, vmm)


def _limits(config: Config, vmm: Vmm) -> Limits:
    memory = config.max_memory_mib or (host.memory_total() >> 20) * 4 // 5
    return Limits(
        memory_mib=memory,
        vcpus=max(1, int(config.vcpus_per_core * (os.cpu_count() or 1))),
        sandboxes=config.max_sessions,
        overhead_mib=_OVERHEAD_EMULATED if vmm.emulated else _OVERHEAD,
    )


async def _adopt(sessions: Sessions, known: SessionRecord) -> None:
    try:
        await sessions.adopt(known)
    except SandboxGone as error:
        log.warning("session %s could not be adopted: %s", known.id, error)
    else:
        log.info("adopted session %s", known.id)


async def _end_tasks(tasks: Sequence[asyncio.Future[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the daemon had failed: %r", error, exc_info=error)


def _check_root() -> None:
    if os.geteuid() != 0:
        raise PermissionRefused(
            "the daemon must run as root: it gives every sandbox a user of its own",
            hint="sudo cantelop serve",
        )


def _allow_many_files() -> None:
    """A session holds about a dozen descriptors, a client one; the usual soft limit is 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def prepare_folders(options: Options) -> None:
    """Make what is missing, and refuse what others could change (THREATS.md 12).

    Every folder above the state must let other users through, since a VMM runs as one.
    """
    for folder in (options.socket.parent, options.state, jail.sandboxes(options.state)):
        try:
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make {folder}: {error.strerror}") from error
    for folder in (jail.sandboxes(options.state), *_above(jail.sandboxes(options.state))):
        mode = folder.stat().st_mode
        if not mode & 0o001:
            raise ConfigError(
                f"{folder} is closed to other users, and a sandbox's VMM runs as one",
                hint=f"chmod o+x {folder}, or set CANTELOP_STATE to another place",
            )
    for folder, setting in (
        (jail.sandboxes(options.state), "CANTELOP_STATE"),
        (options.socket.parent, "CANTELOP_SOCKET"),
    ):
        found = changeable_by_others(folder)
        if found is not None:
            raise ConfigError(
                f"{found} can be changed by others than root",
                hint=f"chmod go-w {found}, or set {setting} to another place",
            )


def _above(folder: Path) -> list[Path]:
    return list(folder.resolve().parents)


def _uid_lock(config: Config) -> Path:
    return _LOCKS / f"cantelop-{config.uid_base}.lock"


@contextmanager
def _lock(path: Path, taken: str) -> Iterator[None]:
    """Held while the daemon lives; the kernel lets go of it when it dies."""
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot use the lock {path}: {error.strerror}") from error
    with os.fdopen(fd, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                taken, hint="stop it, or use another CANTELOP_SOCKET and uid_base"
            ) from None
        yield


@contextmanager
def _listener(path: Path) -> Iterator[socket.socket]:
    """Everybody may connect; who is served is decided by the peer's credentials. A socket that
    systemd has opened stays its own."""
    given = systemd.listening_socket()
    if given is not None:
        with given:
            yield given
        return
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    with listener:
        try:
            listener.bind(str(path))
            path.chmod(0o666)
            listener.listen(128)
        except OSError as error:
            raise ConfigError(f"cannot listen on {path}: {error.strerror or error}") from error
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


async def _until_told(sessions: Sessions, idle_seconds: float | None) -> int | None:
    """The signal that it got; None where it was idle for so long."""
    loop = asyncio.get_running_loop()
    told: asyncio.Future[int] = loop.create_future()

    def tell(signum: int) -> None:
        if not told.done():
            told.set_result(signum)

    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        loop.add_signal_handler(signum, tell, signum)
    while True:
        left = None if idle_seconds is None else idle_seconds - sessions.idle_for()
        if left is not None and left <= 0:
            return None
        with suppress(TimeoutError):
            async with asyncio.timeout(left):
                return await asyncio.shield(told)
