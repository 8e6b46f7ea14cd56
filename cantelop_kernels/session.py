"""A session: one kernel's stay in a sandbox, from the request to the destruction.

Layer 5. Each session is one task that holds its sandbox as a context: whatever ends the session
(its owner, its kernel, its client's death, the daemon) makes that task leave the context, and
leaving it destroys the sandbox.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import time
from contextlib import ExitStack, suppress
from typing import Any

from cantelop_kernels.errors import CantelopError, LaunchError, SandboxGone
from cantelop_kernels.sandbox import Plan, Sandbox, explained, launch
from cantelop_kernels.schema import Endpoints, Exit, Logs, SessionRequest, SessionView
from cantelop_kernels.slot import SlotTable
from cantelop_kernels.vmm import Vmm

_MIB = 1 << 20

EMULATED = "running under emulation, without hardware virtualization: no security boundary"


class Session:
    """Made by `Sessions.create`. `ended` is set once nothing of the sandbox is left."""

    def __init__(
        self, request: SessionRequest, user: int, plan: Plan, vmm: Vmm, endpoints: Endpoints
    ) -> None:
        self.id = f"s-{secrets.token_hex(6)}"
        self.user = user
        self.endpoints = endpoints
        self.ended = asyncio.Event()
        self.exit: Exit | None = None
        self.leftover: CantelopError | None = None
        """Set where the sandbox could not be taken away whole."""
        self.notices = [EMULATED] if vmm.emulated else []
        self._request = request
        self._plan = plan
        self._vmm = vmm
        self._state = "starting"
        self._step = "queued"
        self._created = time.time()
        self._boot_seconds = 0.0
        self._stop: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._sandbox: Sandbox | None = None
        self._last_logs = Logs("", "", "")

    def __repr__(self) -> str:
        return f"<Session {self.id} {self._state} {self._step}>"

    @property
    def is_running(self) -> bool:
        return self._state == "running"

    def view(self) -> SessionView:
        return SessionView(
            id=self.id,
            app=self._request.app,
            user=self.user,
            image=self._plan.image.name,
            digest=self._plan.image.digest,
            vcpus=self._plan.vcpus,
            memory_mib=self._plan.memory_mib,
            state=self._state,
            step=self._step,
            created=self._created,
            boot_seconds=round(self._boot_seconds, 3),
            endpoints=self.endpoints,
            vmm=self._vmm.name,
            emulated=self._vmm.emulated,
            notices=self.notices,
            exit=self.exit,
        )

    def stop(self, reason: str) -> None:
        """Have it ended; the first reason given stands. Await `ended` for the end. Idempotent."""
        if not self._stop.done():
            self._stop.set_result(reason)

    async def signal(self, signum: int) -> None:
        """To the kernel's process group; nothing happens once the kernel has ended."""
        if self._sandbox is not None and self._state == "running":
            with suppress(SandboxGone):
                await self._sandbox.link.request("signal", signum=signum)

    async def logs(self) -> Logs:
        """Of the running sandbox, or what was kept when it ended."""
        return await self._sandbox.logs() if self._sandbox is not None else self._last_logs

    async def live(
        self, slots: SlotTable, listeners: list[Any], started: asyncio.Future[None]
    ) -> None:
        """The whole life. `started` gets the result of the launch; owns `listeners`."""
        try:
            with ExitStack() as stack:
                for listener in listeners:
                    stack.enter_context(listener)
                await self._live(slots, listeners, started)
        finally:
            self._sandbox = None
            self._state, self._step = "exited", ""
            self.exit = self.exit or Exit(reason="the daemon gave it up")
            if not started.done():
                started.set_exception(SandboxGone(f"the session was ended: {self.exit.reason}"))
            self.ended.set()

    async def _live(
        self, slots: SlotTable, listeners: list[Any], started: asyncio.Future[None]
    ) -> None:
        boot = asyncio.ensure_future(self._boot_and_run(slots, listeners, started))
        either: list[asyncio.Future[Any]] = [boot, self._stop]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._stop.done():
            self.exit = self.exit or Exit(reason=self._stop.result())
            boot.cancel()
            await asyncio.wait([boot])
        if not boot.cancelled() and (error := boot.exception()) is not None:
            self.exit = self.exit or Exit(reason=str(error))
            if not started.done():
                started.set_exception(error)
                return
            if isinstance(error, CantelopError):
                self.leftover = error
            raise error

    async def _boot_and_run(
        self, slots: SlotTable, listeners: list[Any], started: asyncio.Future[None]
    ) -> None:
        begun = time.monotonic()
        async with launch(self._plan, self._vmm, slots, self._at_step) as sandbox:
            self._sandbox = sandbox
            await self._bind(sandbox, listeners)
            self._boot_seconds = time.monotonic() - begun
            self._state, self._step = "running", ""
            if not started.done():
                started.set_result(None)
            try:
                self.exit = describe(await sandbox.ended())
            except SandboxGone as gone:
                self.exit = Exit(reason=gone.message)
            self._state, self._step = "ending", "destroying the sandbox"
            self._last_logs = await sandbox.logs()

    async def _bind(self, sandbox: Sandbox, listeners: list[Any]) -> None:
        """Give the sandbox all that makes it this session's. After this there is only the end."""
        self._at_step("kernel start")
        request = self._request
        try:
            await sandbox.start(
                listeners,
                self._plan.boot_deadline,
                argv=request.argv,
                extra=request.extra,
                env=request.env,
                cwd=request.cwd,
                key=request.key,
                signature_scheme=request.signature_scheme,
                kernel_name=request.kernel_name,
            )
        except CantelopError as error:
            raise _with_kernel_log(error, self._step, await sandbox.logs()) from error

    def _at_step(self, name: str) -> None:
        self._step = name


def _with_kernel_log(error: CantelopError, step: str, logs: Logs) -> LaunchError:
    """A kernel that does not start says why on its own stderr, not on the console."""
    made = explained(error, step, logs)
    made.details["kernel"] = logs.kernel
    return made


def describe(exited: dict[str, Any]) -> Exit:
    """The guest's report as an `Exit`, with its reason in words for people."""
    limit, peak = exited["memory_limit"], exited["memory_peak"]
    if exited["oom"]:
        reason = (
            f"out of memory: the kernel was killed at its limit of {limit / _MIB:.0f} MiB "
            f"(peak {peak / _MIB:.0f} MiB); use less, or ask for more with memory_mib"
        )
    elif exited["signal"] is not None:
        reason = f"the kernel was killed by {_signal_name(exited['signal'])}"
    elif exited["exit_code"] == 0:
        reason = "the kernel exited"
    else:
        reason = f"the kernel exited with status {exited['exit_code']}"
    return Exit(
        reason=reason,
        exit_code=exited["exit_code"],
        signal=exited["signal"],
        oom=exited["oom"],
        memory_limit=limit,
        memory_peak=peak,
    )


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"
