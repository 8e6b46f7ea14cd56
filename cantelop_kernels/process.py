"""Child processes: run one to its end, or spawn one and watch it through its pidfd.

Layer 1, and the only user of `subprocess` in the project. Every child gets a session of its own,
so a Ctrl-C at the terminal reaches this process only, and what it started is ended in order.
A child is reaped as soon as it ends, whether or not anybody waits, as long as the loop runs.
"""

from __future__ import annotations

import asyncio
import marshal
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any, ClassVar

from . import confine
from .errors import CantelopError, DeadlineExceeded
from .pipes import Capture, feed, read

__all__ = [
    "DEVNULL",
    "UNKNOWN",
    "CommandFailed",
    "Completed",
    "Identity",
    "Process",
    "finish",
    "run",
    "run_patiently",
    "wait_pidfd",
]

TAIL = 4096
"""Characters of stderr kept for error messages."""

_GRACE = 2.0
"""Seconds between TERM and KILL for a command that ran out of time or was cancelled."""

_AFTER_KILL = 10.0
"""Seconds in which the kernel must end a killed process; only one stuck in a device needs more."""

UNKNOWN = 255
"""Return code of an adopted process: only a parent learns the real one."""

_NOT_STARTED = 127
_PAUSES = (0.1, 0.3, 1.0, 3.0)

_DRAIN = 1.0
"""Seconds to read what is left in the pipes once the command has ended."""


class CommandFailed(CantelopError):
    """A command ended badly, or could not be started. `details`: argv0, returncode, stderr."""

    code: ClassVar[str] = "command_failed"

    def __init__(self, argv0: str, returncode: int, stderr_tail: str, *, hint: str = "") -> None:
        name = Path(argv0).name
        how = f"signal {-returncode}" if returncode < 0 else f"status {returncode}"
        last = next((line for line in reversed(stderr_tail.splitlines()) if line.strip()), "")
        message = f"{name} ended with {how}" + (f": {last.strip()}" if last else "")
        super().__init__(message, hint=hint, argv0=argv0, returncode=returncode, stderr=stderr_tail)
        self.returncode = returncode
        self.stderr_tail = stderr_tail


@dataclass(frozen=True, slots=True)
class Completed:
    """What a command left: all of its stdout, the last `TAIL` characters of its stderr."""

    returncode: int
    stdout: str
    stderr_tail: str


async def wait_pidfd(fd: int) -> None:
    """Return when the process behind `fd` has ended; any number may wait on one pidfd.

    The pidfd stays the caller's. Works for processes that are not children of this one.
    """
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    own = os.dup(fd)  # the loop knows one reader per file descriptor

    def on_ended() -> None:
        loop.remove_reader(own)
        if not ended.done():
            ended.set_result(None)

    loop.add_reader(own, on_ended)
    try:
        await ended
    finally:
        loop.remove_reader(own)
        os.close(own)


async def finish(work: Awaitable[None]) -> None:
    """Await `work` to its end, even when the caller is cancelled (again) meanwhile: for undoing."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # the caller's own end matters more
        raise cancelled
    await task


@dataclass(frozen=True, slots=True)
class Identity:
    """A process, and no other that gets its pid later: `start` is in clock ticks since boot
    (proc(5), /proc/pid/stat field 22)."""

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> Identity:
        """Raises ProcessLookupError where it has ended (a zombie has)."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            raise ProcessLookupError(pid) from None
        state, *fields = stat.rpartition(")")[2].split()
        if state in ("Z", "X"):
            raise ProcessLookupError(pid)
        return cls(pid, int(fields[18]))

    def open(self) -> int:
        """A pidfd, which the caller closes. Raises ProcessLookupError where it has ended."""
        fd = os.pidfd_open(self.pid)
        try:
            if Identity.of(self.pid) != self:
                raise ProcessLookupError(self.pid)
        except BaseException:
            os.close(fd)
            raise
        return fd

    @contextmanager
    def held(self) -> Iterator[int]:
        """A pidfd for a while. Raises ProcessLookupError where the process has ended."""
        fd = self.open()
        try:
            yield fd
        finally:
            os.close(fd)


class Process:
    """A long-running process: spawned as a child, or adopted from a daemon that died.

    Make one with `Process.spawn` or `Process.adopt`, inside a running loop.
    """

    def __init__(self, pid: int, pidfd: int, popen: subprocess.Popen[bytes] | None) -> None:
        self.pid = pid
        self._popen = popen
        self._pidfd = pidfd
        self._closing = False
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._loop.add_reader(pidfd, self._on_exit)

    @classmethod
    def adopt(cls, identity: Identity) -> Process:
        """Watch a process that is no child of this one: how it ends cannot be known (`UNKNOWN`).

        Raises ProcessLookupError where it has ended.
        """
        return cls(identity.pid, identity.open(), None)

    @classmethod
    def spawn(
        cls,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str | Path | None = None,
        stdin: int = DEVNULL,
        stdout: int = DEVNULL,
        stderr: int = DEVNULL,
        pass_fds: Sequence[int] = (),
        new_session: bool = True,
        umask: int = -1,
    ) -> Process:
        """Start `argv` with exactly `env`; `pass_fds` keep their numbers in the child.

        `umask` -1 inherits this process's own.

        Raises CommandFailed where the program cannot be started. The caller keeps the file
        descriptors it passed and closes them itself.
        """
        popen = _popen(
            argv,
            env=dict(env),
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=tuple(pass_fds),
            start_new_session=new_session,
            umask=umask,
        )
        return cls(popen.pid, _pidfd_of(popen), popen)

    @classmethod
    async def confined(
        cls,
        confinement: Mapping[str, Any],
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: int = DEVNULL,
        stderr: int = DEVNULL,
        pass_fds: Sequence[int] = (),
    ) -> Process:
        """Start `argv` in namespaces of its own, with the rights that `confinement` leaves it.

        `confine` says what a confinement is; argv[0] is a path in its root. It is a child of this
        process, and its own process 1. Returns once the program itself runs. Raises CommandFailed
        with what the kernel refused; then, and on cancellation, nothing of it is left.
        """
        started: list[Process] = []

        async def start() -> None:
            text = await _start_confined(
                {"confinement": dict(confinement), "argv": list(argv), "env": dict(env)},
                stdout=stdout,
                stderr=stderr,
                pass_fds=pass_fds,
            )
            pid = next((int(line[4:]) for line in text if line.startswith("pid ")), None)
            if pid is not None:
                started.append(cls(pid, os.pidfd_open(pid), None))
            why = next((line[6:] for line in text if line.startswith("error ")), None)
            if pid is None or why is not None:
                raise CommandFailed(argv[0], _NOT_STARTED, f"cannot be confined: {why or 'ended'}")

        try:
            await finish(start())
        except BaseException:
            for one in started:
                await finish(_discard(one))
            raise
        return started[0]

    def __repr__(self) -> str:
        state = "running" if self.returncode is None else f"ended {self.returncode}"
        return f"<Process {self.pid} {state}>"

    @property
    def pidfd(self) -> int:
        """Valid until `close()`; -1 after."""
        return self._pidfd

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative where a signal ended it."""
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        """The return code, once it has ended (negative: signal). Any number may wait."""
        return await asyncio.shield(self._ended)

    def signal(self, signum: int) -> None:
        """Send a signal to this process and no other; nothing happens when it is gone."""
        if self._pidfd >= 0 and not self._ended.done():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signum)

    async def stop(self, grace: float) -> int:
        """End it: TERM, after `grace` seconds KILL (at once on cancellation). Idempotent.

        Raises DeadlineExceeded where even KILL did not end it in time.
        """
        self.signal(signal.SIGTERM)
        with suppress(TimeoutError):
            try:
                async with asyncio.timeout(grace):
                    return await self.wait()
            finally:
                self.signal(signal.SIGKILL)
        try:
            async with asyncio.timeout(_AFTER_KILL):
                return await self.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"process {self.pid} did not end when killed") from None

    def close(self) -> None:
        """Give the pidfd back. A process that still runs is left alone, and reaped when it ends."""
        self._closing = True
        if self._ended.done() and self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def _on_exit(self) -> None:
        returncode = self._popen.poll() if self._popen is not None else self._status()
        if returncode is None:
            return  # never seen: a pidfd is readable only after the end
        self._loop.remove_reader(self._pidfd)
        self._ended.set_result(returncode)
        if self._closing:
            self.close()

    def _status(self) -> int | None:
        """Of a process that subprocess does not know: a confined one, or an adopted one."""
        try:
            done = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            return UNKNOWN
        if done is None:
            return None
        return done.si_status if done.si_code == os.CLD_EXITED else -done.si_status


async def run(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    stdin: bytes | None = None,
    deadline: float,
    check: bool = True,
    on_line: Callable[[str], None] | None = None,
) -> Completed:
    """Run a command to its end and return what it wrote.

    `deadline` is in seconds; when it passes, or on cancellation, the whole process group gets TERM
    and then KILL before this returns. Processes the command left in its group are killed. `env`
    None inherits. `on_line` gets every line of stdout and stderr as it comes (`\\r` ends one too).
    Raises DeadlineExceeded; CommandFailed where `check` is set and the status is not 0, and
    where the program cannot be started.
    """
    popen = _popen(
        argv,
        env=None if env is None else dict(env),
        cwd=cwd,
        stdin=DEVNULL if stdin is None else PIPE,
        stdout=PIPE,
        stderr=PIPE,
        start_new_session=True,
    )
    pidfd = _pidfd_of(popen)
    out, err = Capture(on_line, None), Capture(on_line, TAIL)
    pipes = asyncio.ensure_future(_pump(popen, stdin, out, err))
    try:
        async with asyncio.timeout(deadline):
            await wait_pidfd(pidfd)
    except TimeoutError:
        name = Path(argv[0]).name
        raise DeadlineExceeded(f"{name} did not end within {deadline:g} s", argv0=argv[0]) from None
    finally:
        await finish(_end_group(popen, pidfd, pipes))
    result = Completed(popen.returncode, out.text(), err.text())
    if check and result.returncode != 0:
        raise CommandFailed(argv[0], result.returncode, result.stderr_tail)
    return result


async def run_patiently(
    argv: Sequence[str],
    *,
    deadline: float,
    env: Mapping[str, str] | None = None,
    check: bool = True,
) -> Completed:
    """As `run`, for undoing: a host that has no process to spare may have one in a moment."""
    for pause in _PAUSES:
        try:
            return await run(argv, env=env, deadline=deadline, check=check)
        except CommandFailed as error:
            if error.returncode != _NOT_STARTED:
                raise
            await asyncio.sleep(pause)
    return await run(argv, env=env, deadline=deadline, check=check)


async def _start_confined(
    order: dict[str, Any], *, stdout: int, stderr: int, pass_fds: Sequence[int]
) -> list[str]:
    """Run `confine` as a program; the lines of its report, whose end is the program's start."""
    reading, report = os.pipe()
    memory = os.memfd_create("confinement")
    try:
        os.write(memory, marshal.dumps(order | {"report": report}))
        os.lseek(memory, 0, os.SEEK_SET)
        starter = _popen(
            [sys.executable, "-I", "-S", confine.__file__, str(memory)],
            env={},
            stdin=DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=(memory, report, *pass_fds),
            start_new_session=True,
        )
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(report)
        os.close(memory)
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(reading, "rb", buffering=0)
    )
    try:
        text = await stream.read()
    finally:
        transport.close()
        starter.wait()  # it has ended, or is about to: the report is closed
    return text.decode(errors="replace").splitlines()


async def _discard(process: Process) -> None:
    await process.stop(0.0)
    process.close()


def _popen(argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(list(argv), **options)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CommandFailed(argv[0], _NOT_STARTED, f"cannot be started: {why}") from error


def _pidfd_of(popen: subprocess.Popen[bytes]) -> int:
    """A child that is not reaped yet keeps its pid, so this cannot be someone else's."""
    try:
        return os.pidfd_open(popen.pid)
    except OSError as error:
        popen.kill()
        popen.wait()
        raise CommandFailed(str(popen.pid), _NOT_STARTED, f"no pidfd: {error.strerror}") from error


async def _end_group(popen: subprocess.Popen[bytes], pidfd: int, pipes: asyncio.Task[None]) -> None:
    """Leave nothing of a command: its group, its zombie, its pipes. Runs once per command."""
    try:
        await _kill_group(popen.pid, pidfd)
        await asyncio.wait([pipes], timeout=_DRAIN)
    finally:
        pipes.cancel()
        await asyncio.wait([pipes])
        for pipe in (popen.stdin, popen.stdout, popen.stderr):
            if pipe is not None:
                pipe.close()
        os.close(pidfd)
        popen.poll()
    if not pipes.cancelled():
        pipes.result()


async def _kill_group(pid: int, pidfd: int) -> None:
    """End all of it, in two turns. The leader is not reaped yet: `pid` names no other group."""
    for signum, patience in ((signal.SIGTERM, _GRACE), (signal.SIGKILL, _AFTER_KILL)):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signum)
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await wait_pidfd(pidfd)


async def _pump(
    popen: subprocess.Popen[bytes], stdin: bytes | None, out: Capture, err: Capture
) -> None:
    assert popen.stdout is not None and popen.stderr is not None
    async with asyncio.TaskGroup() as group:
        group.create_task(read(popen.stdout, out))
        group.create_task(read(popen.stderr, err))
        if popen.stdin is not None and stdin is not None:
            group.create_task(feed(popen.stdin, stdin))
