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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from cantelop_kernels import api, host, jail, reaper, tools
from cantelop_kernels.config import Config
from cantelop_kernels.endpoints import EndpointFolders
from cantelop_kernels.errors import ConfigError, PermissionRefused
from cantelop_kernels.image import ImageStore
from cantelop_kernels.sessions import Sessions
from cantelop_kernels.trust import changeable_by_others
from cantelop_kernels.vmm import Vmm
from cantelop_kernels.vmm.qemu import Qemu, find_binary

log = logging.getLogger(__name__)

_LOCKS = Path("/run/cantelop-locks")


@dataclass(frozen=True, slots=True)
class Options:
    """Of one run. `idle_seconds` None: serve until told to stop."""

    socket: Path
    state: Path
    idle_seconds: float | None = None


async def default_vmm(state: Path) -> Vmm:
    """QEMU, on KVM where the CPU has it. Fetches the vsock helper where it is not there yet.

    Raises ConfigError where others than root could change what is to be run (THREATS.md 12).
    """
    helper = await tools.ensure_vhost_device_vsock(state)
    vmm = Qemu(find_binary(), helper, not host.hardware_kvm(), host.tsc_khz())
    for program in (vmm.binary, vmm.vhost_vsock):
        _check_trusted(program)
    return vmm


def _check_trusted(path: Path) -> None:
    found = changeable_by_others(path)
    if found is not None:
        raise ConfigError(
            f"{found} can be changed by others than root, and {path.name} would run from there",
            hint=f"chown root {found}; chmod go-w {found}",
        )


async def serve(
    config: Config,
    options: Options,
    ready: Callable[[], None],
    make_vmm: Callable[[Path], Awaitable[Vmm]] = default_vmm,
) -> None:
    """Serve until SIGTERM or SIGINT, or until idle; then end every session.

    `ready` is called once the socket answers. Raises ConfigError and PermissionRefused with the
    reason where the daemon cannot start; nothing is left then.
    """
    _check_root()
    _allow_many_files()
    async with running(config, options, make_vmm) as sessions:
        ready()
        log.info("serving on %s", options.socket)
        await _until_told(sessions, options.idle_seconds)
        log.info("stopping")


@asynccontextmanager
async def running(
    config: Config, options: Options, make_vmm: Callable[[Path], Awaitable[Vmm]]
) -> AsyncIterator[Sessions]:
    prepare_folders(options)
    folders = EndpointFolders(options.socket.parent / f"{options.socket.stem}.ipc")
    with (
        _lock(options.socket.with_suffix(".lock"), f"another daemon serves {options.socket}"),
        _lock(_uid_lock(config), f"another daemon uses the uids from {config.uid_base}"),
    ):
        for found in await reaper.reap(options.state, config.uid_base):
            log.warning("left behind by an earlier daemon, removed: %s", found)
        await folders.prepare()
        vmm = await make_vmm(options.state)
        sessions = Sessions(config, options.state, ImageStore(options.state), vmm, folders)
        app = api.application(config, str(options.state), vmm, sessions)
        with _listener(options.socket) as listener:
            http = api.server(app, listener, sessions)
            try:
                yield sessions
            finally:
                http.stop()
                await sessions.drain("the daemon was stopped")
                await http.close_all_connections()
                await folders.close()


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
    """Everybody may connect; who is served is decided by the peer's credentials."""
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


async def _until_told(sessions: Sessions, idle_seconds: float | None) -> None:
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, told.set)
    while not told.is_set():
        try:
            async with asyncio.timeout(idle_seconds):
                await told.wait()
        except TimeoutError:
            if sessions.idle_for() >= (idle_seconds or 0):
                return
