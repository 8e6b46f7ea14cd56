"""Everything that can die, at every step: the right error in bounded time, and nothing left.

In all of it a neighbour's kernel runs on, and does not notice. The daemon's own death is in
`test_adoption`, images and disks in `test_launch_faults` and `test_pool`.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from cantelop_kernels import sandbox, session
from cantelop_kernels.errors import CantelopError, LaunchError
from cantelop_kernels.jail import Jail
from cantelop_kernels.process import Process
from cantelop_kernels.schema import SessionView
from cantelop_kernels.vmm import Machine, VmSpec
from tests.fakes.fake_vmm import FakeVmm
from tests.fakes.host_stack import (
    UID_BASE,
    Running,
    Stack,
    connected,
    eventually,
    output,
    processes,
)
from tests.host.test_adoption import CLIENT

BOUND = 15.0
"""Seconds in which every fault has to be seen. Most need one or two."""


class WithHelper(FakeVmm):
    """As QEMU has one: a process without which the machine is of no use."""

    def __init__(self) -> None:
        super().__init__()
        self.helpers: list[Process] = []

    @asynccontextmanager
    async def run(
        self, spec: VmSpec, jail: Jail, *, console: int, log: int
    ) -> AsyncIterator[Machine]:
        helper = Process.spawn(["sleep", "600"], env={"PATH": "/usr/bin:/bin"})
        self.helpers.append(helper)
        try:
            async with super().run(spec, jail, console=console, log=log) as machine:
                yield Machine(machine.process, {"the vsock helper": helper})
        finally:
            self.helpers.remove(helper)
            await helper.stop(0.0)
            helper.close()


def snapshot() -> dict[str, Any]:
    """All of the machine that a sandbox could leave something in, this process included."""
    return {
        "processes": sorted(one.pid for one in processes()),
        "children": sorted(one.pid for one in psutil.Process().children(recursive=True)),
        "mounts": sorted(Path("/proc/self/mountinfo").read_text().splitlines()),
        "namespaces": sorted(one.name for one in Path("/run/netns").glob("*")),
        "cgroups": sorted(str(p) for p in Path("/sys/fs/cgroup").glob(f"**/cantelop-{UID_BASE}-*")),
        "files": len(os.listdir("/proc/self/fd")),
    }


@dataclass
class Scene:
    """A daemon with a neighbour whose cell runs the whole time."""

    stack: Stack
    neighbour: SessionView
    before: dict[str, Any]

    async def nothing_left(self) -> None:
        ipc = Path(self.neighbour.endpoints.ip).parent.name
        kept = {ipc, f"cantelop-{UID_BASE}-0"}
        await eventually(lambda: set(self.stack.folders()) == kept, 10)
        after: dict[str, Any] = {}

        def same() -> bool:
            after.update(snapshot())
            return after == self.before

        try:
            await eventually(same, 10)
        except TimeoutError:
            assert after == self.before


@pytest.fixture
async def scene(running: Running) -> AsyncIterator[Scene]:
    async with running(WithHelper(), silence_seconds=2.0) as stack:
        neighbour = await stack.create()
        async with connected(neighbour) as kernel:
            assert await output(kernel, "kept = 42") == ""
            await stack.client.info()
            made = Scene(stack, neighbour, snapshot())
            yield made
            assert await output(kernel, "print(kept)") == "42\n"
            await made.nothing_left()


def victim(stack: Stack, who: str) -> Process | psutil.Process:
    """Of the latest sandbox."""
    if who == "machine":
        return stack.vmm.machines[-1]  # type: ignore[no-any-return]
    if who == "helper":
        return stack.vmm.helpers[-1]  # type: ignore[no-any-return]
    children = psutil.Process().children()
    attendants = [one for one in children if "cantelop_kernels.attendant" in one.cmdline()]
    return max(attendants, key=lambda one: one.create_time())


def at_step(patch: pytest.MonkeyPatch, step: str, deed: Callable[[], None]) -> None:
    """Do it once when a launch enters that step."""
    done: list[str] = []

    def entered(name: str) -> None:
        if name == step and not done:
            done.append(name)
            deed()

    enter, bind = sandbox._Steps.__call__, session.Session._at_step

    def call(self: Any, name: str) -> Any:
        entered(name)
        return enter(self, name)

    def note(self: Any, name: str) -> None:
        bind(self, name)
        if name == "kernel start":
            entered(name)

    patch.setattr(sandbox._Steps, "__call__", call)
    patch.setattr(session.Session, "_at_step", note)


WHO_AND_WHEN = [
    ("attendant", "virtual machine"),
    ("attendant", "guest boot"),
    ("attendant", "kernel start"),
    ("machine", "guest boot"),
    ("machine", "kernel start"),
    ("helper", "guest boot"),
    ("helper", "kernel start"),
]

SAID = {
    "attendant": "attendant",
    "machine": "virtual machine ended (signal 9)",
    "helper": "the vsock helper ended (signal 9)",
}


@pytest.mark.parametrize(("who", "step"), WHO_AND_WHEN)
async def test_a_death_during_a_launch(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, who: str, step: str
) -> None:
    at_step(monkeypatch, step, lambda: _kill(victim(scene.stack, who)))
    with pytest.raises(LaunchError) as caught:
        async with asyncio.timeout(BOUND):
            await scene.stack.create()
    assert SAID[who] in caught.value.message or "gone" in caught.value.message
    view = await scene.stack.create()  # and the next one is served
    await scene.stack.client.end(view.id)
    await scene.stack.client.release(view.endpoints.token)


@pytest.mark.parametrize("who", ["attendant", "machine", "helper"])
async def test_a_death_in_the_middle_of_a_cell(scene: Scene, who: str) -> None:
    view = await scene.stack.create()
    async with connected(view) as kernel:
        kernel.execute("import time; print('up', flush=True); time.sleep(60)")
        while (await kernel.get_iopub_msg(timeout=10))["msg_type"] != "stream":
            pass
        _kill(victim(scene.stack, who))
        async with asyncio.timeout(3):
            ended = await scene.stack.client.wait(view.id, 10)
        assert ended.exit is not None and SAID[who] in ended.exit.reason
    await scene.stack.client.release(view.endpoints.token)


@pytest.mark.parametrize("who", ["attendant", "machine"])
async def test_a_stop_in_the_middle_of_a_cell(scene: Scene, who: str) -> None:
    view = await scene.stack.create()
    async with connected(view) as kernel:
        kernel.execute("import time; time.sleep(60)")
        os.kill(victim(scene.stack, who).pid, signal.SIGSTOP)
        async with asyncio.timeout(BOUND):
            ended = await scene.stack.client.wait(view.id, BOUND)
        assert ended.exit is not None and "did not answer" in ended.exit.reason
    await scene.stack.client.release(view.endpoints.token)


@pytest.mark.parametrize(
    "step",
    ["image", "folder", "disk", "attendant", "virtual machine", "guest boot", "kernel start"],
)
async def test_a_client_that_dies_during_its_launch(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    reached = asyncio.Event()
    at_step(monkeypatch, step, reached.set)
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CLIENT, str(scene.stack.socket)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    async with asyncio.timeout(BOUND):
        await reached.wait()
    child.kill()
    await child.communicate()
    await eventually(lambda: scene.stack.sessions.live == 1, BOUND)


@pytest.mark.parametrize("error", [errno.ENOMEM, errno.EAGAIN, errno.EMFILE])
async def test_no_process_can_be_had(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """What fork says on a machine that has no memory, processes or descriptors left."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        at_step(patch, "attendant", lambda: patch.setattr(subprocess, "Popen", refuse))
        with pytest.raises(CantelopError, match=os.strerror(error)):
            async with asyncio.timeout(BOUND):
                work = asyncio.ensure_future(scene.stack.create())
                await eventually(lambda: subprocess.Popen is refuse, BOUND)
                await asyncio.sleep(0.05)
                patch.undo()  # the undoing needs processes too
                await work


def _kill(process: Process | psutil.Process) -> None:
    if isinstance(process, Process):
        process.signal(signal.SIGKILL)
    else:
        process.kill()
