"""One microVM with everything around it: taken step by step, given back in reverse.

Layer 4. `boot` reads as the order in which a sandbox comes to be. Each step's undo is registered
as it is made, so whatever fails, nothing is left; and whatever fails is told with its step and the
last lines of the guest's console.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cantelop_kernels import host, jail, record, scratch, seccomp, vsock, wire
from cantelop_kernels.cgroup import Caps, Hierarchy, Leaf
from cantelop_kernels.errors import (
    CantelopError,
    DeadlineExceeded,
    ImageError,
    LaunchError,
    SandboxGone,
)
from cantelop_kernels.image import Image, ImageStore
from cantelop_kernels.jail import Jail
from cantelop_kernels.link import Link, connect, listen
from cantelop_kernels.process import UNKNOWN, Process, finish
from cantelop_kernels.record import Running, SessionRecord
from cantelop_kernels.schema import Logs
from cantelop_kernels.slot import Slot, SlotTable
from cantelop_kernels.uids import kill_all
from cantelop_kernels.vmm import Drive, Machine, Vmm, VmSpec

_LOGS_DEADLINE = 1.0
_CAUSE_DEADLINE = 0.5
_BIND_DEADLINE = 5.0
"""Seconds for the guest to take a `bind`; a healthy one needs a few hundredths."""
_NO_LOGS = Logs("", "", "")


@dataclass(frozen=True, slots=True)
class _Parts:
    """The processes of a sandbox."""

    machine: Machine
    attendant: Process


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a sandbox is made from."""

    image: Image
    images: ImageStore
    vcpus: int
    memory_mib: int
    scratch_mib: int
    state: Path
    boot_deadline: float
    cgroups: Hierarchy
    caps: Caps


class Sandbox:
    """A booted guest whose agent has said hello. Belongs to nobody until `bind`.

    Whoever holds one destroys it, once or more often, however its life went.
    """

    def __init__(
        self, place: Jail, leaf: Leaf, link: Link, parts: _Parts, undo: AsyncExitStack
    ) -> None:
        """`undo` is everything that destroying it takes."""
        self.place = place
        self.leaf = leaf
        self.link = link
        self.leftover: CantelopError | None = None
        """Why something of it stays, once it has been destroyed as far as can be."""
        self.taken = False
        """Whether the guest has taken a `bind`."""
        self._machine = parts.machine
        self._attendant = parts.attendant
        self._undo = undo
        self._destruction: asyncio.Future[None] | None = None
        self._oom_kills = host.oom_kills()

    def __repr__(self) -> str:
        return f"<Sandbox {self.place.slot.name} {self._machine!r}>"

    @property
    def processes(self) -> dict[str, Process]:
        """Every process of it on the host, by what it is."""
        return {
            "attendant": self._attendant,
            "machine": self._machine.process,
            **self._machine.helpers,
        }

    @property
    def alive(self) -> bool:
        """Whether all of them run."""
        return all(one.returncode is None for one in self.processes.values())

    async def destroy(self) -> None:
        """Returns once nothing of it is left, also to those who come second; goes on to its end
        where its caller is cancelled. Raises CantelopError where something stays."""
        if self._destruction is None:
            record.remove(self.place.folder)
            self._destruction = asyncio.ensure_future(self._destroy())
        await finish(self._destruction)

    async def _destroy(self) -> None:
        try:
            await self._undo.aclose()
        except CantelopError as error:
            self.leftover = error
            raise

    async def warm_up(self, deadline: float) -> int:
        """Have the kernel started and exercised, for whoever comes; returns the bytes of memory in
        use in the guest then. Called once, before `bind`. Raises as `bind` does."""
        await self.link.request("warm_up")
        await self._first(self.link.warm, self.link.exited, deadline)
        return int(self.link.warm.result()["memory_used"])

    async def bind(
        self, listeners: Sequence[socket.socket], lease: int, deadline: float, **what: Any
    ) -> None:
        """Make it one session's; returns once the kernel listens on all its channels.

        `lease` is a pidfd of the client. `what` are the fields of `wire.TO_GUEST["bind"]` that the
        caller decides; clock and entropy are added here. Called once. Raises LaunchError where the
        kernel ends instead, SandboxGone and DeadlineExceeded where the sandbox does not answer.
        """
        fds = [*(listener.fileno() for listener in listeners), lease]
        entropy = os.urandom(64).hex()
        now = time.time_ns()
        await self.link.request(
            "bind",
            fds,
            deadline=_BIND_DEADLINE,
            **what,
            time_ns=now,
            entropy=entropy,
        )
        self.taken = True
        await self._first(self.link.ready, self.link.exited, deadline)

    async def ended(self) -> dict[str, Any]:
        """How the kernel ended (`wire` "exited"). Raises SandboxGone when the sandbox died."""
        machine = asyncio.ensure_future(self._machine.ended())
        attendant = asyncio.ensure_future(self._attendant.wait())
        exited: asyncio.Future[dict[str, Any]] = asyncio.ensure_future(
            asyncio.shield(self.link.exited)
        )
        tasks: list[asyncio.Future[Any]] = [machine, attendant, exited]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if exited.done() and exited.exception() is None:
                return exited.result()
            if self.link.broken:  # the machine then ends too, for want of the line
                raise SandboxGone(f"the guest broke the rules of its channel: {self.link.broken}")
            # the guest's line breaks a moment before the cause is seen
            await asyncio.wait(
                [machine, attendant], timeout=_CAUSE_DEADLINE, return_when=asyncio.FIRST_COMPLETED
            )
            if attendant.done():
                raise SandboxGone(f"the attendant ended ({_how(attendant.result())})")
            if machine.done():
                raise SandboxGone(machine.result() + self._perhaps_for_memory())
            return exited.result()
        finally:
            await _cancel(*tasks)

    def _perhaps_for_memory(self) -> str:
        """Whether the host's Linux has killed the machine, at its limit or for want of memory; in
        the second case it does not say whom it chose."""
        if self.leaf.taken().oom_kills:
            return "; it took more memory of the host than a sandbox of its size may"
        killed = {-signal.SIGKILL, UNKNOWN} & {one.returncode for one in self.processes.values()}
        if not killed or host.oom_kills() <= self._oom_kills:
            return ""
        return "; the host ran out of memory meanwhile, and Linux killed for it"

    async def logs(self) -> Logs:
        """Empty where the attendant cannot tell (any more)."""
        try:
            async with asyncio.timeout(_LOGS_DEADLINE):
                return await self.link.logs()
        except (CantelopError, TimeoutError):
            return _NO_LOGS

    async def hello(self, deadline: float) -> None:
        """Wait for the guest's agent. Raises LaunchError when the machine ends first."""
        await self._first(self.link.hello, None, deadline)
        version = self.link.hello.result()["version"]
        if version != wire.VERSION:
            raise LaunchError(
                f"the image's agent speaks version {version}, this daemon {wire.VERSION}",
                hint="build the image again: cantelop image build",
            )

    async def _first(
        self,
        wanted: asyncio.Future[dict[str, Any]],
        instead: asyncio.Future[dict[str, Any]] | None,
        deadline: float,
    ) -> None:
        """Await `wanted`, unless the machine, its attendant or `instead` ends before."""
        others: list[Awaitable[Any]] = [self._machine.ended(), self._attendant.wait()]
        others += [asyncio.shield(instead)] if instead is not None else []
        tasks = [asyncio.ensure_future(other) for other in (asyncio.shield(wanted), *others)]
        try:
            async with asyncio.timeout(deadline):
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if wanted.done():
                wanted.result()
                return
            raise LaunchError(self._why(tasks[1:]))
        except TimeoutError:
            raise DeadlineExceeded(f"nothing came from the guest within {deadline:g} s") from None
        finally:
            await _cancel(*tasks)

    def _why(self, others: Sequence[asyncio.Future[Any]]) -> str:
        machine, attendant, *kernel = others
        if machine.done():
            return str(machine.result())
        if attendant.done():
            return f"the attendant ended ({_how(attendant.result())})"
        return f"the kernel ended ({_how_kernel(kernel[0].result())})"


def _how(returncode: int) -> str:
    return f"signal {-returncode}" if returncode < 0 else f"status {returncode}"


def _how_kernel(exited: dict[str, Any]) -> str:
    if exited["signal"] is not None:
        return f"signal {exited['signal']}"
    return f"status {exited['exit_code']}"


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()


class _Steps:
    """Names the step that is under way, for whoever watches and for the error if it fails."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self.now = ""
        self.sandbox: Sandbox | None = None

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.now = name
        self._tell(name)
        yield

    async def explain(self, error: Exception) -> LaunchError:
        logs = await self.sandbox.logs() if self.sandbox else _NO_LOGS
        return explained(error, self.now, logs)


def explained(error: Exception, step: str, logs: Logs) -> LaunchError:
    """The error of a launch that failed at `step`, with what the guest and VMM said last."""
    message = error.message if isinstance(error, CantelopError) else str(error)
    hint = error.hint if isinstance(error, CantelopError) else ""
    return LaunchError(
        f"the sandbox did not come up, at the step {step!r}: {message}",
        hint=hint,
        step=step,
        console=logs.console,
        vmm=logs.vmm,
    )


async def boot(
    plan: Plan,
    vmm: Vmm,
    slots: SlotTable,
    gone: Callable[[], None],
    on_step: Callable[[str], None] = lambda _: None,
) -> Sandbox:
    """A booted sandbox, which the caller destroys. Where this fails nothing is left.

    `gone` is called once, when nothing of it is left, or as much has gone as can. Raises
    LaunchError with `step` and `console` in its details.
    """
    steps = _Steps(on_step)
    stack = AsyncExitStack()
    stack.callback(gone)
    try:
        return await _acquire(plan, vmm, slots, stack, steps)
    except BaseException as error:
        try:
            if isinstance(error, CantelopError | OSError):
                raise await steps.explain(error) from error
        finally:
            await finish(stack.aclose())
        raise


async def adopt(
    plan: Plan, slots: SlotTable, slot: Slot, known: SessionRecord, gone: Callable[[], None]
) -> Sandbox:
    """The sandbox of a session that an earlier daemon has left alive. Where this fails it is
    destroyed. `gone` as for `boot`. Raises SandboxGone."""
    stack = AsyncExitStack()
    stack.callback(gone)
    place = Jail(slot, jail.sandboxes(plan.state) / slot.name, run_at=known.run_at)
    try:
        slots.take(slot)
        stack.callback(slots.release, slot)
        with suppress(ImageError):  # it may have been removed; the machine has it open
            stack.enter_context(plan.images.hold(plan.image))
        leaf = plan.cgroups.find(slot.name)
        stack.push_async_callback(_destroy, place, leaf, slots)
        attendant = _adopted(stack, known.attendant)
        helpers = {name: _adopted(stack, one) for name, one in known.helpers.items()}
        machine = Machine(_adopted(stack, known.machine), helpers)
        link = connect(place.folder)
        stack.callback(link.close)
        return Sandbox(place, leaf, link, _Parts(machine, attendant), stack)
    except BaseException as error:
        await finish(stack.aclose())
        if isinstance(error, CantelopError | OSError):
            raise SandboxGone(f"its sandbox is gone: {error}") from error
        raise


def _adopted(stack: AsyncExitStack, known: Running) -> Process:
    """A process of that sandbox, and its end as undo."""
    process = Process.adopt(known.identity)
    stack.callback(process.close)
    stack.push_async_callback(process.stop, 0.0)
    return process


async def _acquire(
    plan: Plan, vmm: Vmm, slots: SlotTable, stack: AsyncExitStack, step: _Steps
) -> Sandbox:
    with step("slot"):
        slot = _take_slot(slots)
        stack.callback(slots.release, slot)
    with step("image"):
        stack.enter_context(plan.images.hold(plan.image))
    with step("cgroup"):
        leaf = plan.cgroups.make(slot.name, plan.caps)
        stack.push_async_callback(leaf.remove)
    with step("folder"):
        place = jail.make(plan.state, slot, leaf.procs, vmm.run_at(slot))
        stack.push_async_callback(_destroy, place, leaf, slots)
    with step("disk"):
        disk = await scratch.make(place.folder / "scratch.img", plan.scratch_mib, slot.vmm_uid)
    with step("attendant"):
        pipes = stack.enter_context(_Pipes.open())
        link, attendant = await stack.enter_async_context(_attendant(place, pipes))
    with step("virtual machine"):
        machine = await stack.enter_async_context(
            vmm.run(_spec(plan, disk), place, console=pipes.console[1], log=pipes.log[1])
        )
        pipes.close_writers()
        sandbox = step.sandbox = Sandbox(place, leaf, link, _Parts(machine, attendant), stack)
    with step("guest boot"):
        await sandbox.hello(plan.boot_deadline)
    return sandbox


def _take_slot(slots: SlotTable) -> Slot:
    slot = slots.acquire()
    if slot is None:
        raise LaunchError(
            "all sandboxes are taken", hint="end one (cantelop ps, kill) or raise max_sessions"
        )
    return slot


async def _destroy(place: Jail, leaf: Leaf, slots: SlotTable) -> None:
    """Where something of the sandbox stays, its uids and names are not given to another one."""
    try:
        slot = place.slot
        await leaf.remove()
        await kill_all((slot.vmm_uid, slot.attendant_uid))  # what they may have forked
        await jail.remove(place)
    except BaseException:
        slots.quarantine(place.slot)
        raise


def _spec(plan: Plan, disk: Path) -> VmSpec:
    image = plan.image
    drives = (Drive(image.root, read_only=True), Drive(disk, read_only=False))
    return VmSpec(plan.vcpus, plan.memory_mib, image.vmlinux, image.initramfs, drives)


@dataclass(slots=True)
class _Pipes:
    """Two pipes (read end, write end) from the VMM to the attendant; root never reads."""

    console: tuple[int, int]
    log: tuple[int, int]

    @classmethod
    @contextmanager
    def open(cls) -> Iterator[_Pipes]:
        pipes = cls(os.pipe(), os.pipe())
        try:
            yield pipes
        finally:
            for fd in {*pipes.console, *pipes.log} - {-1}:
                os.close(fd)

    def close_readers(self) -> None:
        """Once the attendant has them: then it sees the end when the VMM is gone."""
        self.console = (_close(self.console[0]), self.console[1])
        self.log = (_close(self.log[0]), self.log[1])

    def close_writers(self) -> None:
        """Once the VMM has them."""
        self.console = (self.console[0], _close(self.console[1]))
        self.log = (self.log[0], _close(self.log[1]))


def _close(fd: int) -> int:
    os.close(fd)
    return -1


@asynccontextmanager
async def _attendant(place: Jail, pipes: _Pipes) -> AsyncIterator[tuple[Link, Process]]:
    """Start the attendant with its descriptors; leaving the context ends it."""
    with listen(place.folder) as listener:
        process = await _spawn_attendant(place, pipes, listener)
    try:
        link = connect(place.folder)
        try:
            yield link, process
        finally:
            link.close()
    finally:
        await process.stop(0.0)
        process.close()


async def _spawn_attendant(place: Jail, pipes: _Pipes, daemon: socket.socket) -> Process:
    slot = place.slot
    owner = {"uid": slot.attendant_uid, "gid": slot.gid}
    with (
        vsock.listen(place.run, wire.CONTROL_PORT, **owner) as guest,
        vsock.listen(place.run, wire.LOG_PORT, **owner) as log,
    ):
        fds = {
            "daemon": daemon.fileno(),
            "guest": guest.fileno(),
            "log": log.fileno(),
            "console": pipes.console[0],
            "vmm-log": pipes.log[0],
        }
        argv = [sys.executable, "-P", "-m", "cantelop_kernels.attendant"]
        argv += [f"--{name}={number}" for name, number in fds.items()]
        rights = place.late_confinement(seccomp.attendant())
        process = await place.start_with_rights(
            [*argv, f"--confinement={json.dumps(rights)}"],
            env={"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
            log=pipes.log[1],
            pass_fds=tuple(fds.values()),
        )
    pipes.close_readers()
    return process
