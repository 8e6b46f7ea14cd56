"""What ends a session besides its kernel: its client, idleness, age; and what it is seen to use."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from cantelop_kernels.cli import stats
from cantelop_kernels.errors import NotFound
from cantelop_kernels.jail import Jail
from cantelop_kernels.vmm import Machine, VmSpec
from tests.fakes.fake_vmm import FakeVmm
from tests.fakes.host_stack import Running, Stack, connected, eventually, output
from tests.host.test_access import NOBODY, as_user
from tests.host.test_adoption import CLIENT
from tests.host.test_launch_faults import DIAL, BadVmm


async def other_client(stack: Stack) -> tuple[asyncio.subprocess.Process, str]:
    """Another process that holds a session, and the session's id."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CLIENT, str(stack.socket)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    return child, (await child.stdout.readline()).decode().strip()


async def killed(child: asyncio.subprocess.Process) -> None:
    child.kill()
    await child.wait()


async def test_a_session_outlives_its_client_by_the_grace_time(running: Running) -> None:
    async with running(grace_seconds=1.0) as stack:
        child, session = await other_client(stack)
        await killed(child)
        await asyncio.sleep(0.3)
        assert (await stack.client.get(session)).state == "running"
        ended = await stack.client.wait(session, 5)
        assert ended.exit is not None and "client's process ended" in ended.exit.reason
        await eventually(lambda: stack.folders() == [])


async def test_a_session_is_taken_over_in_time(running: Running) -> None:
    async with running(grace_seconds=1.0) as stack:
        child, session = await other_client(stack)
        await killed(child)
        view = await stack.client.attach(session)
        await asyncio.sleep(1.5)
        assert (await stack.client.get(session)).state == "running"
        await stack.client.end(session)
        with pytest.raises(NotFound, match="has ended"):
            await stack.client.attach(session)
        await stack.client.release(view.endpoints.token)


async def test_a_client_may_ask_for_less_grace_and_not_for_more(running: Running) -> None:
    async with running(grace_seconds=1.0) as stack:
        for asked, given in ((0.0, 0.0), (0.5, 0.5), (99.0, 1.0), (None, 1.0)):
            view = await stack.create(grace_seconds=asked)
            session = next(one for one in stack.sessions if one.id == view.id)
            assert session.owner.grace == given
            await stack.client.end(view.id)


async def test_nobody_takes_over_what_is_someone_elses(running: Running) -> None:
    async with running(users=["*"]) as stack:
        view = await stack.create()
        for step in (["POST", f"/v1/sessions/{view.id}/attach", {}],):
            ((status, body),) = await as_user(NOBODY, stack, step)
            assert status == 404 and "no session" in body["error"]["message"]


def app(**settings: Any) -> dict[str, Any]:
    return {"default": settings}


async def test_an_idle_kernel_is_ended_and_a_busy_one_is_not(running: Running) -> None:
    async with running(apps=app(idle_seconds=1.0)) as stack:
        idle, busy = await stack.create(), await stack.create()
        async with connected(busy) as kernel:
            text = await output(kernel, "import time; time.sleep(3); print('done')")
            assert text == "done\n"
        ended = await stack.client.get(idle.id)
        assert ended.exit is not None and "idle for 1 s" in ended.exit.reason
        ended = await stack.client.wait(busy.id, 10)
        assert ended.exit is not None and "idle for 1 s" in ended.exit.reason


async def test_a_session_is_warned_and_ended_at_its_age(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING")
    async with running(apps=app(lifetime_seconds=3.0)) as stack:
        view = await stack.create()
        await eventually(lambda: f"session {view.id} ends in" in caplog.text, 10)
        ended = await stack.client.wait(view.id, 10)
        assert ended.exit is not None and "older than 3 s" in ended.exit.reason
        assert any("this session ends in" in notice for notice in ended.notices)


async def test_a_session_whose_disk_fills_is_told_its_size(running: Running) -> None:
    async with running(apps=app(scratch_mib=64), silence_seconds=1.0) as stack:
        view = await stack.create()
        session = next(one for one in stack.sessions if one.id == view.id)
        assert session.sandbox is not None
        (session.sandbox.place.folder / "scratch.img").write_bytes(b"x" * (60 << 20))
        await eventually(lambda: any("its disk is nearly full" in one for one in session.notices))
        (notice,) = session.notices
        assert "60 of 64 MiB, the scratch_mib of its App 'default'" in notice
        await asyncio.sleep(0.5)
        assert len(session.notices) == 1


@pytest.mark.parametrize("who", ["machine", "attendant"])
async def test_a_sandbox_that_was_stopped_is_ended(running: Running, who: str) -> None:
    """THREATS 4: by the VMM's own uid, say. Its neighbour does not notice."""
    async with running(silence_seconds=1.0) as stack:
        view, neighbour = await stack.create(), await stack.create()
        session = next(one for one in stack.sessions if one.id == view.id)
        assert session.sandbox is not None
        session.sandbox.processes[who].signal(signal.SIGSTOP)
        async with connected(neighbour) as kernel:
            ended = await stack.client.wait(view.id, 10)
            assert ended.exit is not None and "did not answer for 1 s" in ended.exit.reason
            assert await output(kernel, "print(1)") == "1\n"
        assert len(stack.folders()) == 3  # the neighbour's sandbox, and both endpoints


class OneEvil(FakeVmm):
    """The first guest answers every question with something else, and ends when hung up on."""

    evil = True

    @asynccontextmanager
    async def run(
        self, spec: VmSpec, jail: Jail, *, console: int, log: int
    ) -> AsyncIterator[Machine]:
        says = "say(HELLO)\nwhile True:\n d = s.recv(9999) or sys.exit(0); m = json.loads(d[4:])\n"
        says += " say(dict(type='done', id=m['id']))\n"
        says += " if m['type'] == 'bind': say(dict(type='ready', pid=1))"
        run = BadVmm(DIAL + says).run if self.evil else super().run
        self.evil = False
        async with run(spec, jail, console=console, log=log) as machine:
            yield machine


async def test_a_guest_that_answers_something_else_harms_itself_alone(running: Running) -> None:
    async with running(OneEvil(), apps=app(lifetime_seconds=4.0), silence_seconds=1.0) as stack:
        evil, good = await stack.create(), await stack.create()
        ended = await stack.client.wait(evil.id, 10)
        assert ended.exit is not None and "nobody asked for" in ended.exit.reason
        assert "broke the rules of its channel" in ended.exit.reason
        ended = await stack.client.wait(good.id, 10)  # its limit still holds
        assert ended.exit is not None and "older than 4 s" in ended.exit.reason


async def test_usage_is_told_to_the_owner_alone(running: Running) -> None:
    async with running(users=["*"]) as stack:
        view = await stack.create()
        async with connected(view) as kernel:
            await output(kernel, "x = 'y' * 1000; print(x)")
            work = asyncio.ensure_future(output(kernel, "import time; time.sleep(1)"))
            await asyncio.sleep(0.3)
            assert (await stack.client.usage(view.id)).busy is True
            await work
            while (usage := await stack.client.usage(view.id)).busy:
                await asyncio.sleep(0.05)  # the agent hears of it a moment after the client
        assert usage.busy is False and usage.idle_seconds is not None
        assert usage.memory > 1 << 20 and usage.cpu_seconds > 0
        assert usage.to_client > 1000 and usage.to_kernel > 100
        assert [one.id for one in await stack.client.stats()] == [view.id]
        one, every = await as_user(
            NOBODY, stack, ["GET", f"/v1/sessions/{view.id}/stats"], ["GET", "/v1/stats"]
        )
        assert one[0] == 404 and every == [200, {"stats": []}]
        await stack.client.end(view.id)
        with pytest.raises(NotFound, match="does not run"):
            await stack.client.usage(view.id)


async def test_a_session_that_its_cpu_quota_holds_back_can_see_so(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = await stack.create()
    session = next(one for one in stack.sessions if one.id == view.id)
    assert session.sandbox is not None
    taken = replace(session.sandbox.leaf.taken(), throttled=12.345)
    monkeypatch.setattr(type(session.sandbox.leaf), "taken", lambda self: taken)
    usage = await stack.client.usage(view.id)
    assert usage.throttled_seconds == 12.345
    shown = stats.render({view.id: view}, [usage]).splitlines()
    at = shown[0].index("THROTTLED")
    assert shown[1][at:].startswith("12.3s")


async def test_a_machine_that_was_killed_at_its_memory_limit(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = await stack.create()
    session = next(one for one in stack.sessions if one.id == view.id)
    assert session.sandbox is not None
    taken = replace(session.sandbox.leaf.taken(), oom_kills=1)
    monkeypatch.setattr(type(session.sandbox.leaf), "taken", lambda self: taken)
    stack.vmm.machines[0].signal(signal.SIGKILL)
    ended = await stack.client.wait(view.id, 5)
    assert ended.exit is not None and "took more memory of the host" in ended.exit.reason


METRICS = """
import http.client, socket, sys
class Unix(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX); self.sock.connect(sys.argv[1])
one = Unix("x", timeout=20); one.request("GET", "/metrics")
sys.stdout.write(one.getresponse().read().decode())
"""


async def test_metrics_count_what_happens(running: Running) -> None:
    async with running(users=["*"]) as stack:
        view = await stack.create()
        await stack.client.end(view.id)
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", METRICS, str(stack.socket)), stdout=subprocess.PIPE
        )
        text = (await child.communicate())[0].decode()
        for line in (
            'cantelop_claims_total{kind="cold"} 1.0',
            'cantelop_claim_seconds_count{kind="cold"} 1.0',
            "cantelop_boot_seconds_count 1.0",
            "cantelop_sessions_live 0.0",
            "cantelop_claims_waiting 0.0",
        ):
            assert line in text.splitlines()
        ((status, body),) = await as_user(NOBODY, stack, ["GET", "/metrics"])
        assert status == 403, json.dumps(body)
