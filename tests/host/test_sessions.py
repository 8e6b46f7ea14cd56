"""A session from claim to destruction, and everything that can end it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import psutil
import pytest

from cantelop_kernels import host
from cantelop_kernels.errors import BadRequest, NotFound, SandboxGone
from cantelop_kernels.peers import Peer
from tests.fakes.host_stack import Running, Stack, connected, eventually, output, processes


async def test_code_runs_and_nothing_is_left(stack: Stack) -> None:
    view = await stack.create()
    assert view.state == "running" and view.exit is None
    async with connected(view) as kernel:
        assert await output(kernel, "print(6 * 7)") == "42\n"
    assert len(stack.folders()) == 2
    await stack.client.end(view.id)
    await stack.client.end(view.id)  # idempotent
    ended = await stack.client.get(view.id)
    assert ended.state == "exited"
    assert ended.exit is not None and ended.exit.reason == "ended by its owner"
    await stack.client.release(view.endpoints.token)
    await stack.client.release(view.endpoints.token)
    assert stack.folders() == []
    assert processes() == []
    assert stack.vmm.machines == []


async def test_the_same_place_serves_the_next_session(stack: Stack) -> None:
    """A restart is a new sandbox behind the same endpoints; an open client goes on."""
    first = await stack.create()
    async with connected(first) as kernel:
        one = await output(kernel, "import os; print(os.getpid())")
        await stack.client.end(first.id)
        second = await stack.create(endpoints=first.endpoints.token)
        assert second.endpoints == first.endpoints and second.id != first.id
        await kernel.wait_for_ready(timeout=20)
        assert await output(kernel, "import os; print(os.getpid())") != one


async def test_a_new_session_takes_the_place_of_a_live_one(stack: Stack) -> None:
    first = await stack.create()
    await stack.create(endpoints=first.endpoints.token)
    ended = await stack.client.get(first.id)
    assert ended.exit is not None and "took its endpoints" in ended.exit.reason


@pytest.mark.parametrize(
    ("code", "reason", "exit_code", "signum"),
    [
        ("import os; os._exit(3)", "status 3", 3, None),
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL", None, 9),
    ],
)
async def test_how_a_kernel_ended_is_told(
    stack: Stack, code: str, reason: str, exit_code: int | None, signum: int | None
) -> None:
    view = await stack.create()
    async with connected(view) as kernel:
        cell = kernel.execute(code)
        ended = await stack.client.wait(view.id, 10)
    assert ended.exit is not None and reason in ended.exit.reason
    assert ended.exit.cell == cell
    assert (ended.exit.exit_code, ended.exit.signal) == (exit_code, signum)
    assert os.listdir(stack.state / "sandboxes") == []


async def test_a_signal_reaches_the_kernel(stack: Stack) -> None:
    view = await stack.create()
    async with connected(view) as kernel:
        kernel.execute("import time; print('go', flush=True); time.sleep(60)")
        while (await kernel.get_iopub_msg(timeout=10))["msg_type"] != "stream":
            pass
        await stack.client.signal(view.id, signal.SIGINT)
        reply = await kernel.get_shell_msg(timeout=5)
        assert reply["content"]["ename"] == "KeyboardInterrupt"


async def test_a_machine_that_the_host_killed_for_memory(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = await stack.create()
    before = host.oom_kills()
    monkeypatch.setattr(host, "oom_kills", lambda: before + 1)
    stack.vmm.machines[0].signal(signal.SIGKILL)
    ended = await stack.client.wait(view.id, 5)
    assert ended.exit is not None and "the host ran out of memory" in ended.exit.reason


async def test_a_machine_that_dies_ends_its_session(stack: Stack) -> None:
    view = await stack.create()
    stack.vmm.machines[0].signal(signal.SIGKILL)
    ended = await stack.client.wait(view.id, 5)
    assert ended.exit is not None
    assert "the virtual machine ended (signal 9)" in ended.exit.reason
    assert "memory" not in ended.exit.reason
    assert ended.ended is not None and ended.ended >= ended.created


async def test_an_attendant_that_dies_ends_its_session(stack: Stack) -> None:
    view = await stack.create()
    (attendant,) = processes()
    attendant.kill()
    ended = await stack.client.wait(view.id, 5)
    assert ended.exit is not None and "attendant ended" in ended.exit.reason


CLIENT = """
import asyncio, sys
from pathlib import Path
from cantelop_kernels import client, schema
view = asyncio.run(client.Client(Path(sys.argv[1])).create(schema.SessionRequest(key="k")))
print(view.id, flush=True)
sys.stdin.read()
"""


async def _client_process(stack: Stack) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        CLIENT,
        str(stack.socket),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )


async def test_a_client_that_is_killed_leaves_nothing(stack: Stack) -> None:
    process = await _client_process(stack)
    assert process.stdout is not None
    session_id = (await process.stdout.readline()).decode().strip()
    process.kill()
    await process.wait()
    ended = await stack.client.wait(session_id, 5)
    assert ended.exit is not None and "client" in ended.exit.reason
    await eventually(lambda: stack.folders() == [])


async def test_a_client_that_is_killed_while_it_waits_leaves_nothing(stack: Stack) -> None:
    for pause in (0.0, 0.1, 0.3):
        process = await _client_process(stack)
        await eventually(lambda: bool(stack.folders()))
        await asyncio.sleep(pause)
        process.kill()
        await process.wait()
        await eventually(lambda: stack.folders() == [] and processes() == [])


async def test_a_cancelled_launch_is_undone(stack: Stack) -> None:
    work = asyncio.ensure_future(stack.create())
    await eventually(lambda: bool(stack.folders()))
    work.cancel()
    await asyncio.wait([work])
    await eventually(lambda: stack.folders() == [] and processes() == [])
    assert stack.sessions.live == 0


async def test_two_sessions_do_not_share_anything(stack: Stack) -> None:
    one, two = await asyncio.gather(stack.create(), stack.create())
    assert one.endpoints.ip != two.endpoints.ip
    assert len({p.uids().real for p in processes()}) == 2
    await stack.client.end(one.id)
    async with connected(two) as kernel:
        assert await output(kernel, "print('still here')") == "still here\n"


async def test_env_passes_by_name_only(running: Running) -> None:
    async with running(apps={"default": {"env": ["LANG"]}}) as stack:
        view = await stack.create(env={"LANG": "C.UTF-8", "SECRET_TOKEN": "x"})
        assert len(view.notices) == 1 and "SECRET_TOKEN" in view.notices[0]
        async with connected(view) as kernel:
            code = "import os; print(os.environ.get('SECRET_TOKEN'), os.environ['LANG'])"
            assert await output(kernel, code) == "None C.UTF-8\n"


async def test_a_kernel_command_of_ones_own(stack: Stack) -> None:
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--quiet"]
    argv[4] = "/run/cantelop/kernel/connection.json"
    view = await stack.create(argv=argv)
    async with connected(view) as kernel:
        assert await output(kernel, "import sys; print(sys.argv[-1])") == "--quiet\n"


async def test_sizes_beyond_the_app_are_refused(stack: Stack) -> None:
    for field, value in (("vcpus", 99), ("memory_mib", 1 << 19), ("memory_mib", 1)):
        with pytest.raises(BadRequest, match=field):
            await stack.create(**{field: value})
    with pytest.raises(NotFound, match="no App named"):
        await stack.create(app="nope")
    with pytest.raises(NotFound, match="no such endpoints"):
        await stack.create(endpoints="ab" * 8)
    assert stack.folders() == []


async def test_logs_of_a_live_and_of_an_ended_session(stack: Stack) -> None:
    view = await stack.create()
    async with connected(view) as kernel:
        await output(kernel, r"import os; _ = os.write(2, b'from the \x1b[31mfd\n')")
        await asyncio.sleep(0.3)
        assert "from the [31mfd" in (await stack.client.logs(view.id)).kernel
        kernel.execute("import os; os._exit(0)")
        await stack.client.wait(view.id, 10)
    assert "from the" in (await stack.client.logs(view.id)).kernel


CYCLES = int(os.environ.get("CANTELOP_CYCLES", "20"))


async def test_many_cycles_leave_the_daemon_as_it_was(running: Running) -> None:
    """Start, execute, stop, from the pool: files, memory and folders stay flat."""
    me = psutil.Process()
    async with running(apps={"default": {"warm": 1}}) as stack:

        async def cycle() -> None:
            view = await stack.create()
            async with connected(view) as kernel:
                assert await output(kernel, "print(1)") == "1\n"
            await stack.client.end(view.id)
            await stack.client.release(view.endpoints.token)

        async def settled() -> None:
            async with asyncio.timeout(20):
                while [one.ready for one in await stack.client.pool()] != [1]:
                    await asyncio.sleep(0.05)

        for _ in range(5):
            await cycle()
        await settled()
        files, memory = me.num_fds(), me.memory_info().rss
        for _ in range(CYCLES):
            await cycle()
        await settled()
        grown = me.memory_info().rss - memory
        print(f"{CYCLES} cycles: {me.num_fds() - files} files, {grown >> 10} KiB more")
        assert me.num_fds() <= files
        assert grown < (2 << 20) + CYCLES * 32_768  # ended sessions are remembered for a while
        assert len(processes()) == 1


async def test_endpoints_released_while_a_session_starts_on_them(stack: Stack) -> None:
    view = await stack.create()
    token = view.endpoints.token
    for pause in (0.0, 0.01, 0.1, 0.3):
        work = asyncio.ensure_future(stack.create(endpoints=token))
        await asyncio.sleep(pause)
        await stack.client.release(token)
        with pytest.raises((NotFound, SandboxGone)):
            await work
        await eventually(lambda: stack.folders() == [] and processes() == [])
        token = (await stack.create()).endpoints.token
    assert stack.sessions.live == 1


async def test_draining_ends_what_runs(running: Running) -> None:
    async with running() as stack:
        view = await stack.create()
        drain = asyncio.ensure_future(stack.sessions.drain("the daemon was stopped"))
        ended = await stack.client.wait(view.id, 5)
        await drain
        assert ended.exit is not None and ended.exit.reason == "the daemon was stopped"
        with pytest.raises(Exception, match="stopping"):
            await stack.create()


async def test_a_launch_that_is_ended_says_so(stack: Stack) -> None:
    work = asyncio.ensure_future(stack.create())
    await eventually(lambda: bool(stack.folders()))
    (view,) = await stack.client.sessions()
    await stack.client.end(view.id)
    with pytest.raises(SandboxGone, match="ended by its owner"):
        await work


async def test_a_process_that_a_vmm_forked_ends_with_the_sandbox(stack: Stack) -> None:
    view = await stack.create()
    vmm_uid = min(p.uids().real for p in processes()) - 1
    stray = await asyncio.create_subprocess_exec(
        "setpriv", f"--reuid={vmm_uid}", "--clear-groups", "sleep", "60"
    )
    await eventually(lambda: len(processes()) == 2)
    await stack.client.end(view.id)
    assert await stray.wait() == -signal.SIGKILL
    assert processes() == []


@pytest.mark.parametrize("pause", [0.0, 0.01, 0.05, 0.1, 0.2, 0.3])
async def test_an_end_that_comes_during_the_end(stack: Stack, pause: float) -> None:
    """A sandbox that is being taken away, since its kernel has ended, is taken away whole."""
    view = await stack.create()
    async with connected(view) as kernel:
        kernel.execute("import os; os._exit(0)")
        session = stack.sessions.get(view.id, Peer(0, 0, 0))
        await eventually(lambda: not session.is_running)
        await asyncio.sleep(pause)
        await stack.client.end(view.id)
        await stack.client.release(view.endpoints.token)
    assert stack.folders() == []
    assert processes() == []
