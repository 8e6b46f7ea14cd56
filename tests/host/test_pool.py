"""The warm pool: who gets what, what becomes of it, and what happens when boots fail."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from cantelop_kernels.errors import Exhausted, LaunchError, SandboxGone
from cantelop_kernels.image import ImageStore
from cantelop_kernels.jail import Jail
from cantelop_kernels.sandbox import Sandbox
from cantelop_kernels.schema import PoolView, SessionView
from cantelop_kernels.vmm import Machine, VmSpec
from tests.fakes.fake_vmm import FakeVmm
from tests.fakes.host_stack import Running, Stack, connected, eventually, output, processes

WARM_SECONDS = 20.0


def warm(number: int, **more: Any) -> dict[str, Any]:
    return {"default": {"warm": number, **more}}


async def shelf(stack: Stack) -> PoolView:
    (view,) = await stack.client.pool()
    return view


async def ready(stack: Stack, number: int) -> PoolView:
    """Once so many are warm."""
    async with asyncio.timeout(WARM_SECONDS):
        while True:
            views = await stack.client.pool()
            if views and views[0].ready == number:
                return views[0]
            await asyncio.sleep(0.05)


async def test_a_warm_sandbox_is_given_and_replaced(running: Running) -> None:
    async with running(apps=warm(1)) as stack:
        view = await ready(stack, 1)
        assert (view.target, view.apps, view.failures) == (1, ["default"], 0)
        assert view.memory_used[0] > 0
        (waiting,) = stack.vmm.machines
        session = await stack.create()
        assert session.warm and session.boot_seconds < 2
        async with connected(session) as kernel:
            assert await output(kernel, "print(6 * 7)") == "42\n"
            reply = await kernel.execute_interactive("1", timeout=10)
            assert reply["content"]["execution_count"] == 2
        await ready(stack, 1)
        assert len(stack.vmm.machines) == 2 and waiting in stack.vmm.machines
        await stack.client.end(session.id)
        assert waiting not in stack.vmm.machines  # used: never given again
        assert (await shelf(stack)).ready == 1


async def test_nothing_of_the_exercise_is_to_be_seen(running: Running) -> None:
    look = "print(sorted(k for k in globals() if not k.startswith('__')), In, Out, _ih)"
    async with running(apps=warm(1)) as stack:
        await ready(stack, 1)
        first, second = await stack.create(), await stack.create(memory_mib=600)
        assert (first.warm, second.warm) == (True, False)
        said = []
        for view in (first, second):
            async with connected(view) as kernel:
                said.append(await output(kernel, look))
        assert said[0] == said[1]


async def test_two_clients_never_get_the_same(running: Running) -> None:
    """THREATS 30: one gets the last warm one, the others boot their own."""
    async with running(apps=warm(1)) as stack:
        await ready(stack, 1)
        views = await asyncio.gather(*(stack.create() for _ in range(4)))
        assert sorted(view.warm for view in views) == [False, False, False, True]
        pids = set()
        for view in views:
            async with connected(view) as kernel:
                pids.add(await output(kernel, "import os; print(os.getpid())"))
        assert len(pids) == 4


async def test_eight_claims_on_two(running: Running) -> None:
    async with running(apps=warm(2)) as stack:
        await ready(stack, 2)
        views = await asyncio.gather(*(stack.create() for _ in range(8)))
        assert sum(view.warm for view in views) >= 2
        for view in views:
            async with connected(view) as kernel:
                assert await output(kernel, "print(1)") == "1\n"


async def test_a_command_of_ones_own_starts_in_a_warm_sandbox(running: Running) -> None:
    argv = ["python3", "-m", "ipykernel_launcher", "-f", "/run/cantelop/kernel/connection.json"]
    async with running(apps=warm(1)) as stack:
        await ready(stack, 1)
        view = await stack.create(argv=argv)
        assert view.warm
        async with connected(view) as kernel:
            assert await output(kernel, "print(1)") == "1\n"


async def test_other_sizes_and_commands_that_fail_are_no_matter_of_the_pool(
    running: Running,
) -> None:
    async with running(apps=warm(1)) as stack:
        await ready(stack, 1)
        assert not (await stack.create(memory_mib=768)).warm
        with pytest.raises(LaunchError, match="status 1"):
            await stack.create(argv=["false"])
        await ready(stack, 1)
        assert len(stack.vmm.machines) == 2


async def test_one_that_died_is_replaced_and_never_given(running: Running) -> None:
    async with running(apps=warm(1)) as stack:
        await ready(stack, 1)
        (machine,) = stack.vmm.machines
        machine.signal(signal.SIGKILL)
        view = await stack.create()  # at once: before anybody could have seen it
        async with connected(view) as kernel:
            assert await output(kernel, "print(1)") == "1\n"
        await ready(stack, 1)


async def test_one_that_hangs_costs_a_moment(running: Running) -> None:
    """A stopped VMM takes no bind: the session gets another sandbox."""
    async with running(apps=warm(1)) as stack:
        await ready(stack, 1)
        (machine,) = stack.vmm.machines
        machine.signal(signal.SIGSTOP)
        view = await stack.create()
        async with connected(view) as kernel:
            assert await output(kernel, "print(1)") == "1\n"
        assert machine not in stack.vmm.machines


async def test_an_old_one_is_replaced(running: Running) -> None:
    async with running(apps=warm(1), warm_max_age=2.0) as stack:
        await ready(stack, 1)
        (machine,) = stack.vmm.machines
        await eventually(lambda: machine not in stack.vmm.machines, 10)
        await ready(stack, 1)


async def test_the_ceiling_is_reached_where_more_are_wanted(running: Running) -> None:
    async with running(apps=warm(1, warm_max=2)) as stack:
        await ready(stack, 1)
        for _ in range(3):
            await stack.create()
        assert (await ready(stack, 2)).target == 2


async def test_all_apps_together_have_a_ceiling(running: Running) -> None:
    async with running(apps=warm(5), warm_total=1) as stack:
        await ready(stack, 1)
        await asyncio.sleep(1)
        assert (await shelf(stack)).ready == 1


class Failing(FakeVmm):
    """Machines that do not come up, as long as `broken` is set."""

    broken = True
    tries = 0

    @asynccontextmanager
    async def run(
        self, spec: VmSpec, jail: Jail, *, console: int, log: int
    ) -> AsyncIterator[Machine]:
        self.tries += 1
        if self.broken:
            raise LaunchError("the machine is broken")
        async with super().run(spec, jail, console=console, log=log) as machine:
            yield machine


async def test_boots_that_fail_back_off_and_are_told(
    running: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cantelop_kernels.pool.FIRST_PAUSE", 0.05)
    vmm = Failing()
    async with running(vmm, apps=warm(1)) as stack:
        await eventually(lambda: vmm.tries == 5, 10)
        await eventually(lambda: "suspended" in caplog.text)
        view = await shelf(stack)
        assert view.failures == 5 and "broken" in view.last_error
        assert view.retry_seconds > 60
        with pytest.raises(LaunchError, match="broken"):  # a session tries for itself
            await stack.create()
        vmm.broken = False
        await stack.create()
        assert (await ready(stack, 1)).failures == 0  # and its success is news for the pool


async def test_a_corrupt_image_while_the_pool_refills(running: Running) -> None:
    async with running(apps=warm(1)) as stack:
        await ready(stack, 1)
        first = await stack.create()
        await ready(stack, 1)
        root = ImageStore(stack.state).resolve("python3").root
        root.write_bytes(b"short")
        stack.sessions.pool.look_again()
        await eventually(lambda: "corrupt" in str(stack.sessions.pool.unresolved))
        assert "corrupt" in (await stack.client.info()).unresolved["default"]
        async with connected(first) as kernel:
            assert await output(kernel, "print(1)") == "1\n"


async def test_a_full_host_makes_room_of_warm_ones(running: Running) -> None:
    """Another size than the warm ones': one of them has to go, and nobody waits in vain."""
    limits = {"max_memory_mib": 2 * (512 + 64), "queue_seconds": 20.0}
    async with running(apps=warm(2), **limits) as stack:
        await ready(stack, 2)
        view = await stack.create(memory_mib=400)
        assert not view.warm
        await stack.create(memory_mib=500)
        assert (await shelf(stack)).ready == 0


def has_waiting(stack: Stack, number: int) -> bool:
    return stack.sessions.waiting == number


async def test_those_who_wait_are_served_in_turn(running: Running) -> None:
    async with running(max_sessions=1, queue_seconds=30.0) as stack:
        first = await stack.create()
        turns: list[int] = []

        async def one(number: int) -> None:
            view: SessionView = await stack.create()
            turns.append(number)
            await stack.client.end(view.id)

        waiting = []
        for number in range(3):
            waiting.append(asyncio.ensure_future(one(number)))
            await eventually(partial(has_waiting, stack, number + 1))
        waiting[1].cancel()
        await eventually(lambda: stack.sessions.waiting == 2)
        await stack.client.end(first.id)
        await asyncio.gather(waiting[0], waiting[2])
        assert turns == [0, 2]


async def test_a_session_that_came_while_the_pool_took_the_last_place(running: Running) -> None:
    async with running(max_memory_mib=512 + 64, apps=warm(1), queue_seconds=30.0) as stack:
        async with asyncio.timeout(20):
            while not (await stack.client.pool() and (await shelf(stack)).booting):
                await asyncio.sleep(0.01)
        view = await stack.create()
        async with connected(view) as kernel:
            assert await output(kernel, "print(1)") == "1\n"


async def test_a_request_that_no_guest_takes_costs_the_pool_little(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(apps=warm(3)) as stack:
        await ready(stack, 3)
        taken: list[Sandbox] = []

        async def refuse(self: Sandbox, *_: object, **__: object) -> None:
            taken.append(self)
            raise SandboxGone("it does not take it")

        with monkeypatch.context() as patch:
            patch.setattr(Sandbox, "bind", refuse)
            with pytest.raises(LaunchError, match="does not take it"):
                await stack.create()
        assert len(taken) == 3  # two warm ones, and its own
        await ready(stack, 3)


async def test_what_can_never_fit_is_refused_at_once(running: Running) -> None:
    async with running(max_memory_mib=600, queue_seconds=60.0) as stack:
        with pytest.raises(Exhausted, match="more than this host gives"):
            await stack.create(memory_mib=1024)


async def test_a_hundred_claims_and_cancels_leave_nothing(running: Running) -> None:
    async with running(apps=warm(1), queue_seconds=5.0) as stack:
        await ready(stack, 1)
        before = len(os.listdir("/proc/self/fd"))
        for pause in (0.0, 0.005, 0.02, 0.05, 0.1) * 4:
            work = asyncio.ensure_future(stack.create())
            await asyncio.sleep(pause)
            work.cancel()
            await asyncio.wait([work])
            if not work.cancelled():  # it was quicker
                await stack.client.end(work.result().id)
                await stack.client.release(work.result().endpoints.token)
        await eventually(lambda: stack.sessions.live == 0, 20)
        await ready(stack, 1)
        await eventually(lambda: len(os.listdir("/proc/self/fd")) <= before, 10)
        assert len(processes()) == 1
